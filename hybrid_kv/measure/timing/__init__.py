"""The project's way to measure time: one clock, and cases that are checked before and after.

The guard uses it from an installed package and `bench/` from a checkout. `compare` and asv put
today's copy into an older version, which must not lack what it imports: nothing of `hybrid_kv` but
results, threads and what it times.
"""

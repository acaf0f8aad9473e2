"""How time is measured: one clock, cases that are checked before and after, rivals compared in one run.

The guard uses it from an installed package and `bench/` from a checkout. It imports nothing of `hybrid_kv` but results
and what it times, so that `compare` and asv can put today's copy into an older version and measure both alike.
"""

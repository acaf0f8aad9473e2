"""What runs the benchmarks: the registry, `hybrid-kv compare` with its workers and verdicts, asv's history."""

"""The runners of benchmarks: the registry, `hybrid-kv compare` with its workers, asv's history."""

"""The guard of other engines: traffic, an oracle, verdicts, reproducers; see docs/targets.md."""

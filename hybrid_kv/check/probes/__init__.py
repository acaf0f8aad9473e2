"""The guard of engines that we did not write: traffic, an oracle, verdicts, and reproducers; see docs/targets.md."""

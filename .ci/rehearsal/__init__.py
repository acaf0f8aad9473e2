"""Modules of .ci/rehearse: expressions, GitHub's part, a night, its commands and its faults."""

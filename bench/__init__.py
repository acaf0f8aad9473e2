"""Microbenchmarks: `python -m bench`, `asv run`, and pytest-benchmark in `tests/bench`.

One file per operation.
"""

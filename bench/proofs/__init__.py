"""Proofs by z3 that kernels index states and tables rightly: `python -m bench.proofs`."""

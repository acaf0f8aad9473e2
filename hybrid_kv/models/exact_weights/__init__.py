"""Checkpoints whose every operation is exact.

The order of sums, chunks, batches and kernels change no bit.
"""

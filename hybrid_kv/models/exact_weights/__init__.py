"""Checkpoints whose every operation is exact: the order of sums, chunks, batches and kernels change no bit."""

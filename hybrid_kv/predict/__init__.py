"""What a step costs on a GPU that is not there: bytes, launches and waits by count, times constants with a source.

Contract. `step.cache_kernels` counts what the cache's kernels of one step move, from a plan's layers alone, without
torch. `gpu.microseconds` prices a kernel; `price.step_time` adds the host, says what bounds the step, and gives an
interval. Everything that leaves here is *predicted*: `bench.predict` holds it against tables that others measured.
"""

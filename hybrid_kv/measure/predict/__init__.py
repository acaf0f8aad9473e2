"""The cost of a step on a GPU that is not there: counts times constants with a source.

Contract. `step.cache_kernels` counts the bytes and launches of the cache's kernels in one step,
from a plan's layers alone, without torch. `gpu.microseconds` gives the parts of a kernel's time;
`step.step_time` adds the host, names the bound of the step, and gives an interval. Everything that
leaves here is *predicted*: `bench.predict` holds it against tables that others measured.
"""

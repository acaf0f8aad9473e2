"""What kernels cost, known without a GPU.

Contract. `launches.launches` calls each wrapper at the shapes of real models; `launches.aot_cases`
has what it launches there on GPUs with warps of `lanes`, as `record` sees it. `compile.measure`
compiles every case for every target and returns registers, spills, shared memory, thread blocks per
SM, the widest global load and store, and the instructions by class. All of it is deterministic for
one Triton version, so a machine without a GPU holds it exactly against the rows of an earlier
commit (`gate.judge`).

`counts` runs a step in Triton's interpreter instead, for launches and bytes; `peers` has the
kernels of other projects.
"""

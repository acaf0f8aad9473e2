"""What kernels cost, known without a GPU.

Contract. A kernel file with a Triton kernel has `aot_cases() -> list[AotCase]`, the configurations that it ships, at
the shapes of real models; where they depend on the size of a warp it takes that as `lanes`. `compile.measure` compiles
every case for every target and returns registers, spills, shared memory, thread blocks per SM, the widest global load
and store, and the instructions by class. All of it is deterministic for one Triton version, so a machine without a GPU
holds it exactly against the rows of an earlier commit (`gate.judge`).

`counts` runs a step in Triton's interpreter instead, for launches and bytes; `peers` has the kernels of other projects.
"""

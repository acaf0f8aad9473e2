"""Manager block ids to kernel block ids."""

from hybrid_kv.kernels.kernel_blocks.launch import (
    expand_list,
    expand_numpy,
    expand_torch,
    expand_triton,
    gather_kernel_blocks,
)

__all__ = ["expand_list", "expand_numpy", "expand_torch", "expand_triton", "gather_kernel_blocks"]

"""Manager block ids to kernel block ids.

Manager block `b` is kernel blocks `b * stride … b * stride + blocks_per_kv_block - 1`, where `stride` is
`blocks_per_kv_block` unless pages of other layers lie between. The engine never expands on the host: ids are staged as
they are and expanded while a step's input table is written (`kernels.block_tables`; `gather_kernel_blocks` is its
plainest form). `expand_*` are the alternatives that other engines use or used, and a kernel that does nothing else;
`bench/kernel_blocks.py` measures them.
"""

from hybrid_kv.kernels.kernel_blocks.launch import expand_triton
from hybrid_kv.kernels.kernel_blocks.reference import expand_list, expand_numpy, expand_torch, gather_kernel_blocks

__all__ = [
    "expand_list",
    "expand_numpy",
    "expand_torch",
    "expand_triton",
    "gather_kernel_blocks",
]

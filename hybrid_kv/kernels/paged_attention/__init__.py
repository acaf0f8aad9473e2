"""K and V of tokens in blocks: storing them in slots, and causal attention over a row's blocks.

Caches are [num_kernel_blocks, kernel_block_size, num_kv_heads, head_size] views whose blocks and
tokens lie at any stride, so that every layout of `cache.layout` is read where it is.
"""

from hybrid_kv.kernels.paged_attention.launch import paged_attention_varlen, store_kv
from hybrid_kv.kernels.paged_attention.reference import (
    SlotCells,
    attend_tokens,
    attend_with_bias,
    attention_mask,
    sees_nothing,
    slot_cells,
    token_index,
    window_index,
    window_mask,
    window_positions,
    write_kv,
)

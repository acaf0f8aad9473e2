"""K and V of tokens in blocks: storing them, and causal attention over the blocks of a row."""

from hybrid_kv.kernels.paged_attention.launch import (
    SlotCells,
    attend_tokens,
    attention_mask,
    paged_attention,
    paged_attention_varlen,
    paged_attention_varlen_reference,
    sees_nothing,
    slot_cells,
    store_kv,
    token_index,
    write_kv,
)

__all__ = [
    "SlotCells",
    "attend_tokens",
    "attention_mask",
    "paged_attention",
    "paged_attention_varlen",
    "paged_attention_varlen_reference",
    "sees_nothing",
    "slot_cells",
    "store_kv",
    "token_index",
    "write_kv",
]

"""Slots in the cache of token positions."""

from __future__ import annotations

import torch

PAD_SLOT = -1


def slot_mapping(
    table: torch.Tensor,
    rows: torch.Tensor,
    positions: torch.Tensor,
    block_size: int,
    cp_size: int = 1,
    cp_rank: int = 0,
    cp_interleave: int = 1,
) -> torch.Tensor:
    """Return the slot `block * block_size + offset` of each token, or `PAD_SLOT`.

    With context parallelism `cp_size` ranks share a *virtual* block of `block_size * cp_size`
    tokens, dealt out in runs of `cp_interleave` tokens; a token that another rank holds gets
    `PAD_SLOT` here. Ownership is decided in manager blocks, never in kernel blocks (vllm!51031). A
    position beyond the row's width gets `PAD_SLOT` too, instead of the next row's first block
    (vllm!54296).

    Args:
        table: [max_num_reqs, width] int32, manager blocks.
        rows: [num_tokens] int64, the table row of each token.
        positions: [num_tokens] int64, >= 0.

    Returns:
        [num_tokens] int64.
    """
    virtual = block_size * cp_size
    column = positions // virtual
    offset = positions % virtual
    inside = column < table.shape[1]
    block = table[rows, column.clamp(max=table.shape[1] - 1)].long()
    if cp_size > 1:
        inside &= offset // cp_interleave % cp_size == cp_rank
        offset = offset // (cp_interleave * cp_size) * cp_interleave + offset % cp_interleave
    return torch.where(inside, block * block_size + offset, PAD_SLOT)

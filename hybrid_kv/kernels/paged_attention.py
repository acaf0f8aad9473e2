"""Writing K and V to slots, and attention over kernel blocks."""

from __future__ import annotations

import torch
import torch.nn.functional as F


def write_kv(
    key: torch.Tensor, value: torch.Tensor, key_cache: torch.Tensor, value_cache: torch.Tensor, slots: torch.Tensor
) -> None:
    """Store one K and V per token; a negative slot (padding, or another rank's token) stores nothing.

    Args:
        key, value: [num_tokens, num_kv_heads, head_size].
        key_cache, value_cache: [num_kernel_blocks, kernel_block_size, num_kv_heads, head_size], strided views.
        slots: [num_tokens] int64.
    """
    valid = slots >= 0
    if not bool(valid.all()):
        slots, key, value = slots[valid], key[valid], value[valid]
    block_size = key_cache.shape[1]
    index = (slots // block_size, slots % block_size)
    key_cache.index_put_(index, key)
    value_cache.index_put_(index, value)


def gather_kv(cache: torch.Tensor, block_table: torch.Tensor) -> torch.Tensor:
    """All tokens of each row's blocks, in table order: [num_rows, num_blocks * kernel_block_size, heads, head_size]."""
    rows, num_blocks = block_table.shape
    return cache[block_table].view(rows, num_blocks * cache.shape[1], *cache.shape[2:])


def paged_attention(
    query: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    block_table: torch.Tensor,
    positions: torch.Tensor,
    scale: float,
) -> torch.Tensor:
    """Causal attention of each row's queries over its own blocks, grouped-query heads included.

    Args:
        query: [num_rows, len, num_heads, head_size].
        block_table: [num_rows, num_blocks] int32, kernel blocks; must cover every position.
        positions: [num_rows, len] int64; a query sees the tokens at positions up to its own. Padding may have any
            position >= 0: it then sees at least one key, so that no row of the softmax is empty.

    Returns:
        [num_rows, len, num_heads, head_size].
    """
    key = gather_kv(key_cache, block_table)
    value = gather_kv(value_cache, block_table)
    visible = torch.arange(key.shape[1], device=query.device) <= positions.unsqueeze(-1)
    # A mask does not stop NaN (0 * NaN), and unused slots hold whatever another layer's state left in the page.
    unused = ~visible.any(1)[..., None, None]
    key = key.masked_fill(unused, 0).transpose(1, 2)
    value = value.masked_fill(unused, 0).transpose(1, 2)
    out = F.scaled_dot_product_attention(
        query.transpose(1, 2), key, value, visible.unsqueeze(1), scale=scale, enable_gqa=query.shape[2] != key.shape[1]
    )
    return out.transpose(1, 2)

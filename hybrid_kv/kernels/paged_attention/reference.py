"""K and V of tokens in blocks, in plain torch, over padded rows: what a CPU runs."""

from __future__ import annotations

from functools import lru_cache
from typing import NamedTuple

import torch
import torch.nn.functional as F

from hybrid_kv.kernels.common.integers import cdiv, next_power_of_2
from hybrid_kv.kernels.common.strided import put_tokens, spacing

FOLDED_QUERIES = 16  # of a row, up to which heads that share K and V count as queries of one


class SlotCells(NamedTuple):
    """Kernel blocks and offsets of a step's tokens, in caches of one kernel block size."""

    kept: torch.Tensor | None  # [num_tokens] bool, tokens that have a slot; None if all have
    cells: tuple[torch.Tensor, torch.Tensor]  # kernel block and offset of those, int64


def slot_cells(slots: torch.Tensor, block_size: int) -> SlotCells:
    """Return the cells of slots [num_tokens] int64 for `write_kv`.

    A negative slot is padding, or another rank's token. On a GPU the host would wait to choose
    among the tokens: there such a token is stored in the null block.
    """
    if slots.is_cuda:
        slots = slots.clamp(min=0)
        return SlotCells(None, (slots // block_size, slots % block_size))
    valid = slots >= 0
    kept = None if bool(valid.all()) else valid
    slots = slots if kept is None else slots[kept]
    return SlotCells(kept, (slots // block_size, slots % block_size))


def write_kv(
    key: torch.Tensor,
    value: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    to: SlotCells,
) -> None:
    """Store one K and V per token that has a slot.

    Args:
        key, value: [num_tokens, num_kv_heads, head_size].
        key_cache, value_cache: [num_kernel_blocks, kernel_block_size, num_kv_heads, head_size],
            strided views, of 8 bits or of the same dtype.
        to: of the tokens, for this kernel block size.
    """
    if to.kept is not None:
        key = key[to.kept]
        value = value[to.kept]
    put_tokens(key_cache, to.cells, key)
    put_tokens(value_cache, to.cells, value)


def token_index(
    cache: torch.Tensor,
    block_table: torch.Tensor,
    last: torch.Tensor,
    num_keys: int,
    grid: int | None = None,
) -> torch.Tensor:
    """Return the places of each row's first `num_keys` tokens for `strided.gather_tokens`.

    After a row's last token stands that token again. So nothing is read that no query of the row
    may see: a mask does not stop NaN (0 * NaN), and unused slots hold whatever another layer's
    state left in the page.

    Args:
        cache: any with the strides of those to gather from.
        block_table: [num_rows, num_blocks] int32 or int64.
        last: [num_rows] int64, position of each row's last token.
        grid: tokens at multiples of it are not read either: the last one stands there, too.

    Returns:
        [num_rows * num_keys] int64.
    """
    _, per_block, per_token = spacing(cache)
    block_size = cache.shape[1]
    # By blocks: a division per key would cost as much as the gather.
    starts = block_table[:, : cdiv(num_keys, block_size)].long() * per_block
    places = starts.unsqueeze(-1) + _multiples(block_size, per_token, last.device)
    read = torch.minimum(
        _keys(next_power_of_2(num_keys), grid, last.device)[:num_keys], last.unsqueeze(1)
    )
    return places.flatten(1).gather(1, read).flatten()


def attention_mask(
    positions: torch.Tensor,
    num_keys: int,
    per_kv_head: int,
    dtype: torch.dtype,
    grid: int | None = None,
) -> torch.Tensor:
    """Return the mask that `attend_tokens` adds to the scores.

    It is 0 for the keys up to a query's own that are not on the grid, -inf for the others.

    Args:
        positions: [num_rows, len] int64, of the queries.
        per_kv_head: query heads that share a K and V.
        dtype: of the queries.

    Returns:
        [num_rows, 1, len, num_keys], or for few queries [num_rows, 1, len * per_kv_head, num_keys].
    """
    size = next_power_of_2(num_keys)
    device = positions.device
    row = size - 1 - positions
    if 1 < positions.shape[1] <= FOLDED_QUERIES:
        row = row.unsqueeze(-1).expand(-1, -1, per_kv_head)
    mask = _causal_rows(size, dtype, device)[:, :num_keys].index_select(0, row.flatten())
    if grid is not None:
        mask += _off_grid(size, grid, dtype, device)[:num_keys]
    return mask.view(len(positions), 1, -1, num_keys)


def window_index(
    cache: torch.Tensor,
    block_table: torch.Tensor,
    first: torch.Tensor,
    last: torch.Tensor,
    num_keys: int,
) -> torch.Tensor:
    """Return the places of each row's `num_keys` tokens from `first` on, as `token_index`.

    Blocks before those of `first` are not looked up: they may be another request's by now.

    Args:
        first, last: [num_rows] int64, positions of the first token that the row's queries see, and
            of its last one.
    """
    _, per_block, per_token = spacing(cache)
    read = torch.minimum(window_positions(first, num_keys), last.unsqueeze(1))
    block_idx = read // cache.shape[1]
    blocks = block_table.gather(1, block_idx).long()
    return (blocks * per_block + (read - block_idx * cache.shape[1]) * per_token).flatten()


def window_positions(first: torch.Tensor, num_keys: int) -> torch.Tensor:
    """Return [num_rows, num_keys] int64, the positions of each row's keys from `first` on."""
    return first.unsqueeze(1) + _multiples(num_keys, 1, first.device)


def window_mask(
    positions: torch.Tensor,
    keys: torch.Tensor,
    window: int,
    per_kv_head: int,
    dtype: torch.dtype,
) -> torch.Tensor:
    """Return the mask of `attend_tokens` for queries that see the last `window` tokens each.

    Its shape is that of `attention_mask`.

    Args:
        positions: [num_rows, len] int64, of the queries.
        keys: [num_rows, num_keys] int64, `window_positions`.
        per_kv_head: query heads that share a K and V.
        dtype: of the queries.
    """
    behind = positions.unsqueeze(-1) - keys.unsqueeze(1)
    hidden = (behind < 0) | (behind >= window)
    mask = torch.zeros(hidden.shape, dtype=dtype, device=keys.device).masked_fill_(
        hidden, -torch.inf
    )
    if 1 < positions.shape[1] <= FOLDED_QUERIES:
        mask = mask.repeat_interleave(per_kv_head, dim=1)
    return mask.unsqueeze(1)


def attend_with_bias(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    distances: torch.Tensor,
    bias: torch.Tensor,
    scale: float,
    window: int | None,
) -> torch.Tensor:
    """Attend as `attend_tokens`, with a bias of each query and head by the distance of a key.

    Args:
        distances: [num_rows, len, num_keys] int64, tokens from a key to a query; keys below 0 and,
            where there is a window, from it on are hidden.
        bias: [num_rows, len, num_heads, extent], added to the scaled score of the key that many
            tokens before; keys further away have none.
    """
    extent = bias.shape[-1]
    heads = query.shape[2]
    behind = distances.unsqueeze(2).expand(-1, -1, heads, -1)
    added = bias.gather(-1, behind.clamp(0, extent - 1)).masked_fill_(behind >= extent, 0)
    hidden = behind < 0 if window is None else (behind < 0) | (behind >= window)
    out = F.scaled_dot_product_attention(
        query.transpose(1, 2),
        key.transpose(1, 2),
        value.transpose(1, 2),
        added.masked_fill_(hidden, -torch.inf).transpose(1, 2).to(query.dtype),
        scale=scale,
        enable_gqa=heads != key.shape[2],
    )
    return out.transpose(1, 2)


# What every step reads, for a few sizes. Each small operation on a CPU takes as long as the copy of
# 30 KB.


@lru_cache(64)
def _multiples(count: int, unit: int, device: torch.device) -> torch.Tensor:
    return torch.arange(0, count * unit, unit, device=device)


@lru_cache(64)
def _keys(size: int, grid: int | None, device: torch.device) -> torch.Tensor:
    """Return the positions of keys, [size] int64; on the grid one beyond all."""
    place = torch.arange(size, device=device)
    return (
        place
        if grid is None
        else place.masked_fill_(place % grid == 0, torch.iinfo(torch.int64).max)
    )


@lru_cache(64)
def _off_grid(size: int, grid: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Return [size], -inf at multiples of `grid`, else 0."""
    place = torch.arange(size, device=device)
    return torch.zeros(size, dtype=dtype, device=device).masked_fill_(place % grid == 0, -torch.inf)


@lru_cache(64)
def _causal_rows(size: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Return [size, size], row r for a query at position `size - 1 - r`.

    All rows lie in one line of 2 * size.
    """
    line = torch.zeros(2 * size, dtype=dtype, device=device)
    line[size:] = -torch.inf
    return line.as_strided((size, size), (1, 1))


def attend_tokens(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    mask: torch.Tensor | None,
    scale: float,
    sinks: torch.Tensor | None = None,
) -> torch.Tensor:
    """Attend from each row's queries to the row's keys, grouped-query heads included.

    Args:
        query: [num_rows, len, num_heads, head_size].
        key, value: [num_rows, num_keys, num_kv_heads, head_size], finite.
        mask: `attention_mask` of keys of which each query sees at least one; None if every query
            sees every key.
        sinks: [num_heads], see `attend_with_sinks`.

    Returns:
        [num_rows, len, num_heads, head_size].
    """
    if sinks is not None:
        return attend_with_sinks(query, key, value, mask, scale, sinks)
    rows, length, heads, size = query.shape
    kv_heads = key.shape[2]
    key = key.transpose(1, 2)
    value = value.transpose(1, 2)
    if length > FOLDED_QUERIES:
        grouped = heads != kv_heads
        out = F.scaled_dot_product_attention(
            query.transpose(1, 2), key, value, mask, scale=scale, enable_gqa=grouped
        )
        return out.transpose(1, 2)
    # The heads that share K and V are queries of one head: nothing is copied, and K and V are read
    # once for all.
    folded = (
        query.view(rows, length, kv_heads, -1, size)
        .transpose(1, 2)
        .reshape(rows, kv_heads, -1, size)
    )
    out = F.scaled_dot_product_attention(folded, key, value, mask, scale=scale)
    return out.view(rows, kv_heads, length, -1, size).transpose(1, 2).reshape(query.shape)


def attend_with_sinks(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    mask: torch.Tensor | None,
    scale: float,
    sinks: torch.Tensor,
) -> torch.Tensor:
    """Attend as `attend_tokens`, with one more score in each softmax, which has no value.

    It is the head's own, the same for every query, and is never masked (gpt-oss, arXiv 2508.10925):
    so a head may attend to nothing. Torch's own attention has no such score; all scores of a step
    lie in memory here.

    Args:
        sinks: [num_heads].
    """
    rows, length, heads, size = query.shape
    num_keys, kv_heads = key.shape[1:3]
    grouped = query.view(rows, length, kv_heads, -1, size)
    scores = torch.einsum("rqhgd,rkhd->rhqgk", grouped, key) * scale
    if mask is not None:
        scores = scores + mask.view(rows, 1, length, -1, num_keys)
    sink = sinks.to(scores.dtype).view(kv_heads, 1, heads // kv_heads, 1)
    scores = torch.cat((scores, sink.expand(*scores.shape[:-1], 1)), dim=-1)
    wide = torch.promote_types(scores.dtype, torch.float32)
    weights = scores.softmax(dim=-1, dtype=wide)[..., :num_keys].to(value.dtype)
    return torch.einsum("rhqgk,rkhd->rqhgd", weights, value).reshape(query.shape)


def sees_nothing(positions: torch.Tensor, grid: int) -> torch.Tensor:
    """Return which queries have no key off the grid, in the shape of `positions`.

    A softmax over nothing is NaN.
    """
    # Position 0 is on every grid, position 1 on that of 1 alone.
    return positions == 0 if grid > 1 else torch.ones_like(positions, dtype=torch.bool)

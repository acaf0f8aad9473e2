"""Attention over blocks: K and V or one latent, stored through slots, read by padded rows and row by row."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import torch

from hybrid_kv.guard import definitions
from hybrid_kv.guard.kernel_cases.draw import Compared, Draw, longs, own_tokens, starts, wide
from hybrid_kv.kernels.mla import latent_attention, store_latent
from hybrid_kv.kernels.paged_attention import (
    paged_attention,
    paged_attention_varlen_reference,
    slot_cells,
    write_kv,
)
from hybrid_kv.kernels.paged_attention.reference import FOLDED_QUERIES

SCALE = 0.7


class Stored:
    """Rows of `totals` tokens, and the slots of their blocks; null where a row needs none.

    Tokens on the grid have none: nobody may read them. But the step stores a row's last one.
    """

    def __init__(self, draw: Draw, totals: list[int], grid: int) -> None:
        self.block_size = draw.number(1, 4)
        width = -(-max(totals) // self.block_size)
        blocks = draw.blocks(width * len(totals))
        needed = [-(-total // self.block_size) for total in totals]
        self.table = [[blocks.pop() if column < most else 0 for column in range(width)] for most in needed]
        self.num_blocks = 1 + width * len(totals)
        self.slots = [
            -draw.number(1, 2)
            if grid and token % grid == 0 and token < total - 1
            else definitions.slot(row, token, self.block_size)
            for row, total in zip(self.table, totals, strict=True)
            for token in range(total)
        ]
        self.cells = slot_cells(longs(self.slots), self.block_size)

    def expected(self, cache: torch.Tensor, tokens: torch.Tensor) -> definitions.Floats:
        """What a cache holds once the tokens of all rows are stored."""
        pool, stored = wide(cache), wide(tokens)
        for slot, token in zip(self.slots, stored, strict=True):
            if slot >= 0:
                pool[slot // self.block_size, slot % self.block_size] = token
        return pool


def padded(draw: Draw) -> Iterator[Compared]:
    """A few queries of a row, many, or one; a row that has fewer repeats its last."""
    (totals, new), grid = _lengths(draw), draw.one_of(0, 0, draw.number(1, 4))
    kv_heads, per_kv, size = draw.numbers(1, 3, 3)
    at, dtype = Stored(draw, totals, grid), draw.one_of(torch.float32, torch.float64)
    keys, values = draw.pool(at.num_blocks, 2, at.block_size, kv_heads, size, dtype=dtype).unbind(1)
    key, value = (draw.floats(sum(totals), kv_heads, size, dtype=dtype) for _ in "kv")
    expected = at.expected(keys, key), at.expected(values, value)
    write_kv(key, value, keys, values, at.cells)
    yield "write_kv, K", keys, expected[0]
    yield "write_kv, V", values, expected[1]
    query = draw.floats(len(totals), max(new), kv_heads * per_kv, size, dtype=dtype)
    positions = _positions(totals, new)
    table = torch.tensor(at.table, dtype=torch.int32)
    out = paged_attention(query, keys, values, table, positions, SCALE, grid or None)
    for row, own in enumerate(own_tokens(totals)):
        seen, ends = (wide(key[own]), wide(value[own])), positions[row].tolist()
        yield "paged_attention", out[row], definitions.attention(wide(query[row]), *seen, ends, SCALE, grid)


def varlen(draw: Draw) -> Iterator[Compared]:
    """Rows without tokens, rows of padding, tokens of no row."""
    grid = draw.one_of(0, 0, draw.number(1, 4))
    totals = draw.numbers(1, 9, draw.number(1, 4))
    new = [draw.one_of(total, draw.number(0, total)) for total in totals]
    kv_heads, per_kv, size = draw.numbers(1, 3, 3)
    at, dtype = Stored(draw, totals, grid), draw.one_of(torch.float32, torch.bfloat16)
    keys, values = draw.pool(at.num_blocks, 2, at.block_size, kv_heads, size, dtype=dtype).unbind(1)
    key, value = (draw.floats(sum(totals), kv_heads, size, dtype=dtype) for _ in "kv")
    write_kv(key, value, keys, values, at.cells)
    is_padding = [draw.number(0, 4) == 0 for _ in totals]
    table = torch.tensor(at.table, dtype=torch.int32)
    table[torch.tensor(is_padding)] = 0
    query = draw.floats(sum(new) + 2, kv_heads * per_kv, size, dtype=dtype)
    bounds = torch.tensor(starts(new), dtype=torch.int32)
    out = paged_attention_varlen_reference(query, keys, values, table, bounds, longs(totals), max(new), SCALE, grid)
    expected = np.zeros(query.shape)
    for row, (own, queries) in enumerate(zip(own_tokens(totals), own_tokens(new), strict=True)):
        if not is_padding[row]:
            seen, ends = (wide(key[own]), wide(value[own])), range(totals[row] - new[row], totals[row])
            expected[queries] = definitions.attention(wide(query[queries]), *seen, ends, SCALE, grid)
    yield "paged_attention_varlen", out, expected


def latent(draw: Draw) -> Iterator[Compared]:
    """All heads read one vector per token, and add up the first `rank` elements of it."""
    totals, new = _lengths(draw)
    heads, rank, rope = draw.numbers(1, 4, 3)
    at = Stored(draw, totals, 0)
    cache = draw.pool(at.num_blocks, at.block_size, rank + rope, dtype=torch.float64)
    tokens = draw.floats(sum(totals), rank + rope)
    # Some of them a second time, without a slot.
    twice, none = torch.cat([tokens, tokens[:2]]), [-1] * len(tokens[:2])
    expected = at.expected(cache, tokens)
    store_latent(twice, cache, slot_cells(longs(at.slots + none), at.block_size))
    yield "store_latent", cache, expected
    query, positions = draw.floats(len(totals), max(new), heads, rank + rope), _positions(totals, new)
    out = latent_attention(query, cache, torch.tensor(at.table, dtype=torch.int32), positions, SCALE, rank)
    for row, own in enumerate(own_tokens(totals)):
        keys, ends = wide(tokens[own])[:, None], positions[row].tolist()
        yield "latent_attention", out[row], definitions.attention(wide(query[row]), keys, keys[..., :rank], ends, SCALE)


def _lengths(draw: Draw) -> tuple[list[int], list[int]]:
    """Of rows, and how many of their tokens are queries: one of each, a few, or more than are folded."""
    most = draw.one_of(1, 2, 4, FOLDED_QUERIES, FOLDED_QUERIES + 2)
    new = [most, *(draw.number(1, most) for _ in range(draw.number(0, 2)))]
    return [count + draw.one_of(0, draw.number(0, 3)) for count in new], new


def _positions(totals: list[int], new: list[int]) -> torch.Tensor:
    """Of the last `new` tokens of each row, [num_rows, max(new)]."""
    return longs(
        [[total - own + min(t, own - 1) for t in range(max(new))] for total, own in zip(totals, new, strict=True)]
    )


CASES = (padded, varlen, latent)

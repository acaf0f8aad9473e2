"""Operands of paged attention, and its definition over their rows."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager
from typing import Any
from unittest.mock import patch

import torch

from hybrid_kv.kernels.paged_attention import launch as module
from hybrid_kv.kernels.paged_attention import (
    paged_attention_varlen,
)
from tests.kernels import definitions
from tests.kernels.harness import (
    FLOATS,
    Expected,
    Operation,
    Pool,
    Shape,
    flat_tokens,
)

TOLERANCE, TILED, FLOAT16_WEIGHTS = 5e-6, 1e-5, 2.0**-10


def attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    positions: Sequence[int],
    scale: float,
    **options: Any,
) -> torch.Tensor:
    operands = (part.cpu().double().numpy() for part in (query, key, value))
    given = options.pop("sinks", None)
    sinks = None if given is None else given.cpu().double().numpy()
    return torch.from_numpy(
        definitions.attention(*operands, positions, scale, sinks=sinks, **options)
    )


class Attention(Operation):
    """Rows of a shape: new tokens, tokens computed before, padding or not; stale blocks hold NaN.

    A shape's `max_rows` and `block_n` are those of a program; with few of them a row takes several
    tiles.
    """

    kernel = staticmethod(paged_attention_varlen)
    like = "query"
    share = dict.fromkeys(FLOATS, TILED + FLOAT16_WEIGHTS) | {torch.float32: TILED}

    def __init__(self, shape: Shape, device: str = "cpu") -> None:
        self.shape, g = shape, torch.Generator().manual_seed(shape.seed)
        self.window = 0 if shape.grid else shape.window  # never both
        size, heads = shape.head_size, shape.kv_heads * shape.per_kv
        # A row of padding is one token on the null block; one that has nothing to run has no tokens
        # either.
        self.lengths = [1 if padding else new for new, _, padding in shape.rows]
        self.totals = [1 if padding else new + before for new, before, padding in shape.rows]
        self.num_tokens, width = sum(self.lengths), -(-max(1, *self.totals) // shape.block_size)
        blocks = 2 + len(shape.rows) * width  # the null block first, a stale one last
        pool = Pool(
            blocks, (2, shape.block_size, shape.kv_heads, size), shape.gap, shape.dtype, device
        )
        caches = pool.blocks[:, int(shape.is_swapped)], pool.blocks[:, 1 - int(shape.is_swapped)]
        ids = 1 + torch.randperm(len(shape.rows) * width, generator=g).view(len(shape.rows), width)
        table = torch.full((len(shape.rows), width + shape.stale + 1), blocks - 1)[:, :-1]
        self.stored = []
        for row, (_, _, padding) in enumerate(shape.rows):
            total, used = self.totals[row], -(-self.totals[row] // shape.block_size)
            self.stored.append(
                torch.randn(2, total, shape.kv_heads, size, generator=g).to(shape.dtype)
            )
            table[row, :used] = 0 if padding else ids[row, :used]
            if not padding:
                # What no query sees of a window has been given back: its blocks are null, or
                # another row's.
                seen = max(0, total - self.lengths[row] - self.window + 1) if self.window else 0
                table[row, : seen // shape.block_size] = (blocks - 1) * (shape.stale > 0)
                place = torch.arange(seen, total)
                # hidden tokens have no slot, but that a step stores its last one wherever it lies
                if shape.grid:
                    place = place[(place % shape.grid != 0) | (place == total - 1)]
                at = (
                    table[row, place // shape.block_size].to(device),
                    (place % shape.block_size).to(device),
                )
                for cache, tokens in zip(caches, self.stored[-1], strict=True):
                    cache[at] = tokens[place].to(device)
        (query,) = flat_tokens(self.num_tokens + 2, [(heads, size)], shape.gap, shape.dtype, g)
        indices = {
            "block_table": table,
            "query_start_loc": torch.tensor([0, *self.lengths]).cumsum(0),
            "seq_lens": torch.tensor(self.totals),
        }
        self.pools = dict.fromkeys(("key_cache", "value_cache"), pool)
        self.arguments = {
            "query": query.to(device),
            "key_cache": caches[0],
            "value_cache": caches[1],
        }
        self.arguments |= {
            name: part.to(device, shape.index_dtype) for name, part in indices.items()
        }
        self.arguments |= {"max_query_len": max(1, *self.lengths), "scale": size**-0.5}
        self.arguments |= {"grid": shape.grid} if shape.grid else {}
        self.arguments |= {"window": self.window} if self.window else {}
        if shape.has_sinks:
            # From hardly there to larger than every score.
            sinks = (torch.randn(heads, generator=g) * 4).to(shape.dtype)
            self.arguments["sinks"] = sinks.to(device)

    @classmethod
    def patches(cls, shape: Shape) -> AbstractContextManager[object]:
        return patch.multiple(module, MAX_ROWS=shape.max_rows, BLOCK_N=shape.block_n)

    def expected(self) -> Iterator[Expected]:
        shape, share, first = self.shape, self.share[self.shape.dtype], 0
        for (_, _, padding), length, total, (key, value) in zip(
            shape.rows, self.lengths, self.totals, self.stored, strict=True
        ):
            span, first = slice(first, first + length), first + length
            if not padding and length:
                ends = range(total - length, total)
                y = attention(
                    self.arguments["query"][span],
                    key,
                    value,
                    ends,
                    self.arguments["scale"],
                    grid=shape.grid,
                    window=self.window,
                    sinks=self.arguments.get("sinks"),
                )
                yield Expected("y", span, y, share, max(1.0, float(value.abs().max())), shape.dtype)


MIXED = Shape(
    rows=((1, 0, False), (4, 37, False), (1, 0, True), (0, 5, False), (23, 10, False)),
    kv_heads=2,
    per_kv=3,
    head_size=16,
    block_size=5,
    gap=3,
    is_swapped=False,
    dtype=torch.float32,
    index_dtype=torch.int32,
    grid=0,
    window=0,
    has_sinks=False,
    stale=1,
    max_rows=16,
    block_n=16,
    seed=0,
)

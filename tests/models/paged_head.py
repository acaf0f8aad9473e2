"""A draft head on a paged cache of its own, without an engine."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import pairwise
from pathlib import Path

import torch

from hybrid_kv.attention.paged import build_paged_attention_metadata
from hybrid_kv.config import EngineConfig
from hybrid_kv.models.interface import DraftHead
from hybrid_kv.models.layers import ForwardContext
from hybrid_kv.models.loader import load_head, load_model
from hybrid_kv.models.mtp import NAME
from tests.models.parity import TOLERANCE
from tests.support.batches import common

Pairs = tuple[torch.Tensor, torch.Tensor]
Dense = Callable[[torch.Tensor, torch.Tensor, int], torch.Tensor]

CPU = torch.device("cpu")


class Paged:
    """A head's cache: poisoned pages in shuffled order, and what an engine does for each step."""

    def __init__(
        self,
        head: DraftHead,
        num_rows: int,
        block_size: int = 4,
        width: int = 32,
        dtype: torch.dtype = torch.float64,
    ) -> None:
        g = torch.Generator().manual_seed(num_rows)
        spec = head.layer_specs[NAME]
        blocks = 1 + torch.randperm(num_rows * width, generator=g)
        self.head, self.block_size = head, block_size
        self.table = blocks.view(num_rows, width).int()
        shape = (len(blocks) + 1, block_size, spec.num_kv_heads, spec.head_size)
        self.views = {
            NAME: (
                torch.full(shape, torch.nan, dtype=dtype),
                torch.full(shape, torch.nan, dtype=dtype),
            )
        }

    def step(
        self, chunks: Sequence[tuple[int, int, torch.Tensor, torch.Tensor]]
    ) -> list[torch.Tensor]:
        """Run chunks (row, first position, hidden [n, d], ids [n]); return their outputs."""
        order = sorted(range(len(chunks)), key=lambda i: len(chunks[i][3]) > 1)
        ordered = [chunks[i] for i in order]
        positions = [torch.arange(start, start + len(ids)) for _, start, _, ids in ordered]
        slots = [
            self.table[row, p // self.block_size] * self.block_size + p % self.block_size
            for (row, *_), p in zip(ordered, positions, strict=True)
        ]
        lengths = [len(p) for p in positions]
        batch = common([start for _, start, *_ in ordered], lengths, lengths.count(1))
        table = self.table[[row for row, *_ in ordered]]
        metadata = build_paged_attention_metadata(
            batch, table, torch.cat(slots).long(), self.block_size
        )
        hidden, ids = torch.cat([c[2] for c in ordered]), torch.cat([c[3] for c in ordered])
        with torch.no_grad():
            out = self.head(hidden, ids, ForwardContext({NAME: metadata}, self.views))
        outputs = dict(zip(order, out.split(lengths), strict=True))
        return [outputs[i] for i in range(len(chunks))]


def pairs(request: Pairs, start: int, stop: int) -> Pairs:
    """Hidden states and ids of the pairs at positions start … stop-1; that of token -1 is NaN."""
    ids, hidden = request
    before = torch.cat([torch.full_like(hidden[:1], torch.nan), hidden])
    return before[start:stop], ids[start:stop]


def dense_mask(count: int, grid: int) -> torch.Tensor:
    """Of attention over so many pairs, without the keys at multiples of the grid."""
    token = torch.arange(count)
    hides = (token[:, None] < token) | ((token + 1) % grid == 0)
    return torch.zeros(hides.shape).masked_fill(hides, torch.finfo(torch.float32).min)[None, None]


def check_head(folder: Path, dense: Dense, grid: int) -> None:
    """In chunks and token by token; `Paged` fills what no pair has written with NaN.

    Args: `dense` makes logits of tokens 2 … t+1 of hidden states of tokens 0 … t-1, ids of tokens 1
    … t and the grid.
    """
    target = load_model(folder, EngineConfig(dtype="float32"), CPU)
    head = load_head(folder, target)
    head.grid = grid
    g = torch.Generator().manual_seed(2)
    size = target.embed_tokens.embedding_dim
    request = (
        torch.randint(0, target.vocab_size, (21,), generator=g),
        torch.randn(21, size, generator=g),
    )
    expected = dense(request[1][:-1], request[0][1:], grid)
    paged = Paged(head, 1, dtype=torch.float32)
    cuts = pairwise((0, 1, 7, 8, 9, 20, 21))
    outputs = [paged.step([(0, start, *pairs(request, start, stop))])[0] for start, stop in cuts]
    logits = head.compute_logits(torch.cat(outputs)[1:])
    assert float((logits - expected).abs().max()) <= TOLERANCE * float(expected.abs().max())

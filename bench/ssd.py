"""The chunked scan of a Mamba-2 prefill: all tokens of a chunk, and the states at its block boundaries.

Quadratic and recurrent arithmetic differ by 2e-5 of the largest value in float32 (tests/kernels/test_ssd.py).
"""

from __future__ import annotations

import numpy as np
import torch

from bench._reference import Floats, near, recurrence
from bench._shapes import SHAPES
from bench.cases import Case, Cell, grid
from hybrid_kv.kernels.ssd import chunk_scan

TOLERANCE = 2e-5


def scan(seed: int, model: str, num_tokens: int) -> Case:
    """One request, in the model's chunks, from a state; the states after half of its tokens and after all."""
    shape = SHAPES[model]
    g = torch.Generator().manual_seed(seed)

    def normal(*size: int) -> torch.Tensor:
        return torch.randn(*size, generator=g)

    x, dt = normal(1, num_tokens, shape.heads, shape.head_dim), torch.rand(1, num_tokens, shape.heads, generator=g) / 8
    B, C = (normal(1, num_tokens, shape.groups, shape.state_size) for _ in range(2))
    A, D = -torch.rand(shape.heads, generator=g) - 0.5, normal(shape.heads)
    initial = normal(1, shape.heads, shape.head_dim, shape.state_size)
    rows, offsets = torch.zeros(2, dtype=torch.int64), torch.tensor([num_tokens // 2 + 1, num_tokens])
    expected: list[Floats] = []

    def run() -> tuple[torch.Tensor, torch.Tensor]:
        return chunk_scan(x, dt, A, B, C, D, initial, shape.chunk_size, rows, offsets)

    def check() -> float:
        if not expected:
            y, states = recurrence(*(np.asarray(part.double()) for part in (initial, x, dt, A, B, C, D)))
            expected.extend((y, states[0, offsets - 1]))
        return max(
            near(what, part, wanted, TOLERANCE)
            for what, part, wanted in zip(("y", "states"), run(), expected, strict=True)
        )

    return Case(run, check)


def cells() -> list[Cell]:
    """Chunks of a prompt."""
    values = {"model": ("nemotron-3-nano-tp8", "granite-4-h-small-tp8"), "num_tokens": (128, 256)}
    return [*grid("ssd", "chunk_scan", "cpu", scan, values, [("nemotron-3-nano-tp8", 128)])]

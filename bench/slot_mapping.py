"""Token positions to cache slots, as every attention group of a step needs them."""

from __future__ import annotations

import numpy as np
import torch

from bench._reference import equal
from bench.harness.cells import Case, Cell, grid
from hybrid_kv.kernels.slot_mapping import slot_mapping

NUM_REQS, BLOCK_SIZE, WIDTH = 64, 2096, 63  # Nemotron-3-Nano, 131,072 tokens


def tokens(seed: int, num_tokens: int, cp_size: int) -> Case:
    """Build the slots of `num_tokens` tokens, spread over 64 requests.

    With context parallelism they are as rank 1 sees them.
    """
    rng = np.random.default_rng(seed)
    table = rng.integers(1, 1 << 20, (NUM_REQS, WIDTH)).astype(np.int32)
    rows = np.sort(rng.integers(0, NUM_REQS, num_tokens))
    # Some lie behind the row's width, as those of drafts may.
    positions = rng.integers(0, (WIDTH + 1) * BLOCK_SIZE * cp_size, num_tokens)
    rank, interleave = cp_size - 1, 16
    expected = np.full(num_tokens, -1)
    for i, (row, position) in enumerate(zip(rows, positions, strict=True)):
        column, offset = divmod(int(position), BLOCK_SIZE * cp_size)
        run, place = divmod(offset, interleave)
        if column < WIDTH and (cp_size == 1 or run % cp_size == rank):
            own = offset if cp_size == 1 else run // cp_size * interleave + place
            expected[i] = int(table[row, column]) * BLOCK_SIZE + own
    arguments = (
        torch.from_numpy(table),
        torch.from_numpy(rows),
        torch.from_numpy(positions),
        BLOCK_SIZE,
    )

    def run() -> torch.Tensor:
        return slot_mapping(*arguments, cp_size, rank, interleave)

    return Case(run, lambda: equal("slots", run(), expected))


def cells() -> list[Cell]:
    """Return the cells of a decode step of 256 requests with 3 drafts, and of a prefill's worth.

    They are alone and one of two ranks.
    """
    values = {"num_tokens": (1024, 8192), "cp_size": (1, 2)}
    return [*grid("slot_mapping", "tokens", "cpu", tokens, values, [(1024, 1), (8192, 2)])]

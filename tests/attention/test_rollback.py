"""Rollback schemes: the memory each takes, and the host's count of written states.

`test_house` adds a third scheme.
"""

from __future__ import annotations

import numpy as np
import pytest
import torch

from hybrid_kv.attention.rollback import RecomputeSpec
from hybrid_kv.cache.spec import StateProgress
from hybrid_kv.kernels.recompute import RecomputeCursors, commit_reference


def test_a_layer_of_windows_alone_keeps_no_inputs() -> None:
    rollback = RecomputeSpec(3, ring_len=13)
    assert rollback.allocate((), 4, torch.device("cpu")) is None
    assert rollback.bytes_per_row(()) == 0


@pytest.mark.parametrize("block_size", [None, 8])
def test_the_host_counts_written_states_as_the_device_does(block_size: int | None) -> None:
    """`advance` counts `base_pos` for random accepted drafts, without reading it back."""
    rng = np.random.default_rng(0)
    rollback = RecomputeSpec(3, ring_len=13)
    cursors = RecomputeCursors.allocate(
        1, rollback.ring_len, rollback.max_query_len, torch.device("cpu")
    )
    computed = flushed = 5
    cursors.restart(torch.tensor([0]), torch.tensor([computed]))
    gained, seen = 0, set()
    table = torch.arange(100, dtype=torch.int32)[None]
    for _ in range(200):
        length = int(rng.integers(1, 5))
        cu_seqlens = torch.tensor([0, length])
        commit_reference(
            cursors, torch.tensor([0]), torch.tensor([gained]), cu_seqlens, table, block_size
        )
        gained = int(rng.integers(1, length + 1))
        start, computed = computed, computed + gained
        before, progress = flushed, StateProgress(start, flushed)
        rollback.advance(progress, start, length, computed, block_size)
        flushed = progress.flushed
        assert flushed == int(cursors.base_pos[0])
        seen.add((flushed > before, flushed == start))
    assert {(False, False), (True, True)} <= seen
    assert ((True, False) in seen) == (block_size is not None), (
        "only a boundary leaves a history behind it"
    )

"""The rules of each cache mode."""

from __future__ import annotations

import numpy as np
import pytest

from hybrid_kv.cache.modes import MODES, Mode


@pytest.mark.parametrize(
    "name, logical_blocks, current_blocks, held, needed, first_published, chunk_end, blocks",
    [
        # 10 tokens in blocks of 4; a chunk of tokens 1 … 13 of 20, hits in units of 8; three new
        # logical blocks.
        ("none", 1, [0, 0, 0], 1, 0, 1, 14, 3),
        ("align", 3, [0, 0, 2], 2, 2, 2, 8, 1),
        ("all", 3, [0, 0, 2], 3, 0, 1, 14, 3),
    ],
)
def test_each_mode_has_its_own_logical_blocks(
    name: str,
    logical_blocks: int,
    current_blocks: list[int],
    held: int,
    needed: int,
    first_published: int,
    chunk_end: int,
    blocks: int,
) -> None:
    mode = MODES[name]
    assert mode.num_logical_blocks(10, 4) == logical_blocks
    assert mode.current_block(np.array([0, 3, 8]), 4).tolist() == current_blocks
    assert mode.held_at_most(logical_blocks, 1) == held
    assert mode.first_needed(9, 4) == needed
    assert mode.first_published(1, 2, 10, 4, is_decode=False) == first_published
    assert mode.chunk_end(1, 14, 20, 4, 8) == chunk_end
    assert [mode.may_replace(8, chosen) for chosen in (4, 8, 16)] == [
        name != "align",
        True,
        name != "align",
    ]
    assert mode.num_blocks(3, is_decode=False) == blocks
    assert mode.num_blocks(3, is_decode=True) == 3


def test_an_aligned_chunk_on_a_boundary_publishes_that_one_alone() -> None:
    assert MODES["align"].first_published(0, 3, 12, 4, is_decode=False) == 2
    assert MODES["align"].first_published(0, 3, 12, 4, is_decode=True) == 0


def test_a_mode_has_a_name_of_its_own() -> None:
    assert all(name == mode.name for name, mode in MODES.items())
    assert all(isinstance(mode, Mode) for mode in MODES.values())

"""The rules of each cache mode."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import pytest

from hybrid_kv.cache.modes import MODES, Mode


class Expected(NamedTuple):
    """Of 10 tokens in blocks of 4, and a chunk of tokens 1 … 13 of 20 with hits in units of 8."""

    logical_blocks: int
    state_block_idx: list[int]
    held: int
    first_needed: int
    first_published: int
    chunk_end: int
    blocks: int  # of three new logical blocks


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("none", Expected(1, [0, 0, 0], 1, 0, 1, 14, 3)),
        ("align", Expected(3, [0, 0, 2], 2, 2, 2, 8, 1)),
        ("all", Expected(3, [0, 0, 2], 3, 0, 1, 14, 3)),
    ],
)
def test_each_mode_has_its_own_logical_blocks(name: str, expected: Expected) -> None:
    mode = MODES[name]
    assert expected == Expected(
        logical_blocks=mode.num_logical_blocks(10, 4),
        state_block_idx=mode.state_block_idx(np.array([0, 3, 8]), 4).tolist(),
        held=mode.held_at_most(expected.logical_blocks, 1),
        first_needed=mode.first_needed(9, 4),
        first_published=mode.first_published(1, 2, 10, 4, is_decode=False),
        chunk_end=mode.chunk_end(1, 14, 20, 4, 8, junction=0),
        blocks=mode.num_blocks(3, is_decode=False),
    )
    assert [mode.may_replace(8, chosen) for chosen in (4, 8, 16)] == [
        name != "align",
        True,
        name != "align",
    ]
    assert mode.num_blocks(3, is_decode=True) == 3


def test_an_aligned_chunk_on_a_boundary_publishes_that_one_alone() -> None:
    assert MODES["align"].first_published(0, 3, 12, 4, is_decode=False) == 2
    assert MODES["align"].first_published(0, 3, 12, 4, is_decode=True) == 0


def test_the_interface_of_modes_decides_nothing() -> None:
    assert {"none", "align", "all"} <= MODES.keys()
    with pytest.raises(TypeError, match="abstract"):
        Mode()  # type: ignore[abstract]

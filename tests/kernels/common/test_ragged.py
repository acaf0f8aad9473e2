"""Flat tokens and padded rows are the same tokens; states come back in the order asked for."""

from __future__ import annotations

import torch
from hypothesis import given
from hypothesis import strategies as st

from hybrid_kv.kernels.common.ragged import Ragged, WantedStates

CPU = torch.device("cpu")
LENGTHS = st.lists(st.integers(1, 9), min_size=1, max_size=6)


@given(LENGTHS, st.integers(1, 3))
def test_padded_holds_each_row_and_flat_undoes_it(lengths: list[int], channels: int) -> None:
    arrays, make = Ragged.stage(torch.tensor(lengths), CPU)
    assert bool(arrays) == (len(set(lengths)) > 1)
    ragged = make(*map(torch.from_numpy, arrays))
    tokens = torch.arange(1, 1 + sum(lengths) * channels, dtype=torch.float32).view(-1, channels)
    padded = ragged.padded(tokens)
    assert padded.shape == (len(lengths), max(lengths), channels)
    for row, part in enumerate(tokens.split(lengths)):
        assert torch.equal(padded[row, : len(part)], part)
    assert torch.equal(ragged.flat(padded), tokens)


@given(LENGTHS)
def test_padding_is_finite_and_of_the_same_row(lengths: list[int]) -> None:
    ragged = Ragged(torch.tensor(lengths), CPU)
    owner = torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(lengths))
    assert torch.equal(
        ragged.padded(owner), torch.arange(len(lengths))[:, None].expand(-1, max(lengths))
    )


@given(LENGTHS)
def test_rows_start_where_those_before_them_end(lengths: list[int]) -> None:
    starts = Ragged(torch.tensor(lengths), CPU).starts
    assert starts.tolist() == [sum(lengths[:row]) for row in range(len(lengths) + 1)]


@given(st.lists(st.tuples(st.integers(0, 3), st.integers(1, 20))), st.integers(1, 25))
def test_each_state_comes_from_its_own_chunk_into_its_own_place(
    places: list[tuple[int, int]], chunk_size: int
) -> None:
    rows, offsets = torch.tensor(places, dtype=torch.int64).view(-1, 2).unbind(1)
    # Of row r after n tokens the state is 100 * r + n.
    states = 100 * torch.arange(4.0)[:, None] + torch.arange(1.0, 21)
    wanted = WantedStates(rows, offsets, chunk_size)
    for start in range(0, 20, chunk_size):
        here = wanted.inside(start)
        expected = [(row, offset) for row, offset in places if start < offset <= start + chunk_size]
        assert (here is None) == (not expected)
        if here is not None:
            assert (
                list(zip(here[0].tolist(), (start + here[1] + 1).tolist(), strict=True)) == expected
            )
            wanted.add(states[:, start : start + chunk_size, None][here])
    got = wanted.gather(torch.zeros(4, 1))
    assert got.tolist() == [[100.0 * row + offset] for row, offset in places]

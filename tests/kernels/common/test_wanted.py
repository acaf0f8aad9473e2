"""Wanted states come back in the order in which they were asked for."""

import torch
from hypothesis import given
from hypothesis import strategies as st

from hybrid_kv.kernels.common.wanted import WantedStates


@given(st.lists(st.tuples(st.integers(0, 3), st.integers(1, 20))), st.integers(1, 25))
def test_each_state_is_asked_of_its_own_chunk_and_comes_back_in_its_place(places, chunk_size):
    rows, offsets = torch.tensor(places, dtype=torch.int64).view(-1, 2).unbind(1)
    # Of row r after n tokens the state is 100 * r + n.
    states = 100 * torch.arange(4.0)[:, None] + torch.arange(1.0, 21)
    wanted = WantedStates(rows, offsets, chunk_size)
    for start in range(0, 20, chunk_size):
        here = wanted.inside(start)
        expected = [(row, offset) for row, offset in places if start < offset <= start + chunk_size]
        assert (here is None) == (not expected)
        if here is not None:
            assert list(zip(here[0].tolist(), (start + here[1] + 1).tolist(), strict=True)) == expected
            wanted.add(states[:, start : start + chunk_size, None][here])
    got = wanted.gather(torch.zeros(4, 1))
    assert got.tolist() == [[100.0 * row + offset] for row, offset in places]

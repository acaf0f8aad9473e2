"""Flat tokens and padded rows are the same tokens."""

import torch
from hypothesis import given
from hypothesis import strategies as st

from hybrid_kv.kernels.common.ragged import Ragged

CPU = torch.device("cpu")
LENGTHS = st.lists(st.integers(1, 9), min_size=1, max_size=6)


@given(LENGTHS, st.integers(1, 3))
def test_padded_holds_each_row_and_flat_undoes_it(lengths, channels):
    ragged = Ragged(torch.tensor(lengths), CPU)
    tokens = torch.arange(1, 1 + sum(lengths) * channels, dtype=torch.float32).view(-1, channels)
    padded = ragged.padded(tokens)
    assert padded.shape == (len(lengths), max(lengths), channels)
    for row, part in enumerate(tokens.split(lengths)):
        assert torch.equal(padded[row, : len(part)], part)
    assert torch.equal(ragged.flat(padded), tokens)


@given(LENGTHS)
def test_padding_is_finite_and_of_the_same_row(lengths):
    ragged = Ragged(torch.tensor(lengths), CPU)
    owner = torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(lengths))
    assert torch.equal(ragged.padded(owner), torch.arange(len(lengths))[:, None].expand(-1, max(lengths)))


@given(LENGTHS)
def test_rows_start_where_those_before_them_end(lengths):
    starts = Ragged(torch.tensor(lengths), CPU).starts()
    assert starts.tolist() == [sum(lengths[:row]) for row in range(len(lengths) + 1)]

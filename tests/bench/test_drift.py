"""The drift of rounded states stays below its bounds, and rounding at random loses nothing."""

from __future__ import annotations

import pytest
import torch

from bench import drift
from bench.drift import FORMS, NOISE
from hybrid_kv.kernels.state_codec import StateCodec

NUM_TOKENS = 1500


@pytest.mark.parametrize("codec", FORMS, ids=str)
def test_no_error_is_above_its_bound(codec: StateCodec) -> None:
    for found in drift.drift(codec, NUM_TOKENS):
        assert 0.1 < found.worst <= 1, found
        # Signs of C and W differ, and errors of a row do: they seldom add up.
        assert 0.01 < found.logit_worst <= 1, found
        if found.decay <= 0.99:  # Others have not lived long enough to have variance 1.
            assert 0.7 < found.logit_error / found.error < 1.5, found
        if codec.rounding is not None:
            # The mean over dependent tokens, of 64 elements.
            assert found.error <= 1.5 * found.deviation, found


@pytest.mark.parametrize("name", ["worst", "logit_worst"])
def test_a_step_that_is_larger_than_it_may_be_is_seen(
    monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    monkeypatch.setattr(drift, "largest_error", lambda dtype, peaks, rounding: peaks / 3000)
    assert max(getattr(found, name) for found in drift.drift(StateCodec(torch.int8), 200)) > 1


def test_a_text_in_pieces_is_one_text(monkeypatch: pytest.MonkeyPatch) -> None:
    """The same updates and noise, of 60 tokens at once or one by one."""
    codec = StateCodec(torch.int8, NOISE)
    updates = torch.randn(60, drift.ROWS, drift.SIZE).double()
    state = torch.zeros(len(drift.DECAYS), drift.ROWS, drift.SIZE, dtype=torch.float64)
    row = state[..., :1]

    def in_pieces(size: int) -> list[torch.Tensor]:
        copies = drift.StateCopies(state, state, row, row)
        parts = [
            drift.follow(codec, copies, first, updates[first : first + size])
            for first in range(0, 60, size)
        ]
        return [torch.cat(values) for values in zip(*parts, strict=True)]

    for whole, pieces in zip(in_pieces(60), in_pieces(1), strict=True):
        assert torch.equal(whole, pieces)


def test_the_tables_have_a_row_for_each_form(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(drift, "FORMS", (StateCodec(torch.int8, NOISE),))
    for head, rule, row in drift.tables(20):
        assert row.startswith("| int8, stochastic | ") and row.count("|") == head.count("|")
        assert rule.count("|") == head.count("|")

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
        if codec.rounding is not None:
            # The mean over dependent tokens, of 64 elements.
            assert found.error <= 1.5 * found.deviation, found


def test_a_step_that_is_larger_than_it_may_be_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(drift, "largest_error", lambda dtype, peaks, rounding: peaks / 300)
    assert max(found.worst for found in drift.drift(StateCodec(torch.int8), 200)) > 1


def test_the_table_has_a_row_for_each_form(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(drift, "FORMS", (StateCodec(torch.int8, NOISE),))
    head, rule, row = drift.table(20)
    assert row.startswith("| int8, stochastic | ") and row.count("|") == head.count("|")
    assert rule.count("|") == head.count("|")

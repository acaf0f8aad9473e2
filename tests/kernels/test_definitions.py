"""The formulas against numbers that were worked out by hand."""

from __future__ import annotations

import numpy as np
import pytest

from hybrid_kv.kernels.slot_mapping import PAD_SLOT
from tests.kernels import definitions

LN2 = float(np.log(2))


def test_a_number_between_two_of_bfloat16_goes_away_from_0() -> None:
    step = 2.0**-7  # of bfloat16 between 1 and 2
    values = np.array([1 + step / 2, -1 - step / 2, 1 + step * 0.49, 0.0, 2 - step / 2])
    assert definitions.bfloat16(values).tolist() == [1 + step, -1 - step, 1.0, 0.0, 2.0]


def test_a_state_of_mamba_halves_and_takes_up_a_token() -> None:
    one = np.ones((1, 1, 1))
    y, states = definitions.mamba2(
        6 * one, 5 * one, one[0], np.array([-LN2]), 2 * one, 3 * one, np.array([4.0])
    )
    assert states == pytest.approx(6 / 2 + 5 * 2) and y == pytest.approx(3 * 13 + 4 * 5)
    y, states = definitions.mamba1(
        6 * one[0], 5 * one[0], one[0], -LN2 * one[0], 2 * one[0], 3 * one[0], np.array([4])
    )
    assert states == pytest.approx(13) and y == pytest.approx(59)


def test_a_delta_net_learns_what_it_got_wrong() -> None:
    """State 6 is halved and says 3 for key 1, not 7: with beta 0.5 it goes half of the way."""
    one = np.ones((1, 1, 1))
    out, states = definitions.gated_delta(
        6 * one, 2 * one, one, 7 * one, -LN2 * one[0], 0.5 * one[0]
    )
    assert states == pytest.approx(5) and out == pytest.approx(10)


def test_the_last_tap_of_a_convolution_is_the_tokens_own() -> None:
    window, x, weight = (
        np.array([[1.0], [10.0]]),
        np.array([[100.0], [1000.0]]),
        np.array([[1.0, 2.0, 3.0]]),
    )
    y, inputs = definitions.causal_conv1d(window, x, weight, np.array([0.5]), is_silu=False)
    assert y[:, 0].tolist() == [1 + 20 + 300 + 0.5, 10 + 200 + 3000 + 0.5]
    assert inputs[:, 0].tolist() == [1, 10, 100, 1000]


def test_a_query_sees_what_lies_before_it_and_off_the_grid() -> None:
    key, value = np.zeros((4, 1, 1)), np.array([1.0, 2.0, 4.0, 8.0])[:, None, None]
    query = np.zeros((3, 2, 1))
    assert definitions.attention(query, key, value, [0, 1, 3], 1.0)[:, 0, 0].tolist() == [
        1,
        1.5,
        3.75,
    ]
    assert definitions.attention(query, key, value, [0, 1, 3], 1.0, grid=2)[:, 1, 0].tolist() == [
        0,
        2,
        5,
    ]


def test_experts_of_the_best_groups_are_chosen_by_their_bias_and_weighed_without() -> None:
    # the choice: .77, .57 and 1.1, .1
    logits, bias = (np.array([LN2, LN2, 0.0, 0.0]), np.array([0.1, -0.1, 0.6, -0.4]))
    weights = definitions.route_sigmoid(
        logits, bias, 2, 2, 1, renormalise=True, scale=3.0, epsilon=0.0
    )
    assert weights == pytest.approx([1.5, 1.5, 0, 0])
    assert definitions.route_softmax(logits, 1, renormalise=False).sum() == pytest.approx(1 / 3)


def test_two_ranks_keep_every_other_pair_of_tokens() -> None:
    def slots(rank: int) -> list[int]:
        return [definitions.slot([3], position, 4, 2, rank, 2) for position in range(9)]

    assert slots(0) == [12, 13, PAD_SLOT, PAD_SLOT, 14, 15, PAD_SLOT, PAD_SLOT, PAD_SLOT]
    assert slots(1) == [PAD_SLOT, PAD_SLOT, 12, 13, PAD_SLOT, PAD_SLOT, 14, 15, PAD_SLOT]


@pytest.mark.parametrize(
    ("base_pos", "num_hist", "expected"),
    [(6, 2, 2), (6, 3, 2), (8, 3, 0), (8, 5, 5), (8, 4, 0), (8, 8, 8)],
    ids=["boundary", "beyond it", "room", "ring is full", "ring is just not full", "a whole block"],
)
def test_a_step_flushes_up_to_a_boundary_or_a_full_ring(
    base_pos: int, num_hist: int, expected: int
) -> None:
    assert definitions.num_flushed(base_pos, num_hist, 3, 4, 11, 8) == expected


def test_chunks_are_as_near_to_the_size_as_equal_ones_can_be() -> None:
    # 8 and 12 are as far from 10: three of 4, or two of 5
    assert definitions.chunks(10, 4) == {4, 5}
    assert definitions.chunks(3, 16) == {3}
    assert definitions.chunks(33, 16) == {17}


def test_drafts_follow_the_first_occurrence_of_the_longest_end() -> None:
    text = [1, 2, 7, 1, 2, 8, 5, 2, 9, 1, 2]
    assert definitions.ngram_drafts(text, 2, 3, 1) == [7, 1]
    assert definitions.ngram_drafts([1, 1, 1], 4, 4, 1) == [1]
    assert definitions.ngram_drafts([1, 2, 3], 4, 4, 1) == []

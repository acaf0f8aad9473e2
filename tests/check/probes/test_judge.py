from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import pytest

from hybrid_kv.check.probes.judge import MARGIN, Judge
from hybrid_kv.check.targets.target import Answer, Ask
from tests.check.probes.toy import Toy, ToyOracle


def answer(**fields: Any) -> Answer:
    (plain,) = Toy().ask([ASK])
    return Answer(**{**vars(plain), **fields})


ASK = Ask((1, 2, 3), max_tokens=4, logprobs=True)


def test_the_first_wrong_token_is_named_with_what_is_right_and_how_much_likelier_it_is() -> None:
    tokens = answer().token_ids
    found = Judge(ToyOracle()).judge(
        ASK, answer(token_ids=(*tokens[:2], (tokens[2] + 1) % 50, 1)), None
    )
    assert found.verdict == "wrong" and found.position == 2 and found.expected == tokens[:3]
    assert found.margin > 0 and f"the oracle has {tokens[2]}" in found.problem


def test_a_token_behind_by_no_more_than_rounding_is_right() -> None:
    judge, tokens = Judge(ToyOracle()), answer().token_ids
    turned = answer(token_ids=((tokens[0] + 1) % 50, *tokens[1:]), logprobs=())
    judge.repeated = 1e9
    assert judge.judge(ASK, turned, None).verdict == "right"


def test_what_a_search_chose_is_held_to_its_log_probabilities() -> None:
    judge, (other,) = (
        Judge(ToyOracle()),
        Toy().ask([ASK, Ask((4, 5), max_tokens=4, logprobs=True)])[1:],
    )
    rows = judge.oracle.logprobs((*ASK.prompt, *other.token_ids))[2:-1]
    given = tuple(
        {token: float(row[token])} for token, row in zip(other.token_ids, rows, strict=True)
    )
    found = answer(token_ids=other.token_ids, logprobs=given, is_greedy=False)
    assert (
        other.token_ids != answer().token_ids and judge.judge(ASK, found, None).verdict == "right"
    )
    off = ({key: value + 0.1 for key, value in given[0].items()}, *given[1:])
    wrong = judge.judge(ASK, answer(token_ids=other.token_ids, logprobs=off, is_greedy=False), None)
    assert (wrong.verdict, wrong.position) == ("wrong", 0)
    assert wrong.logprob == pytest.approx(float(given[0][other.token_ids[0]]))
    assert Judge(None).judge(ASK, found, answer()).verdict == "inconclusive"


class LongTexts(ToyOracle):
    """Texts of more than eight tokens are rounded more."""

    def __init__(self, rounding: float) -> None:
        self.long = rounding

    def rounding_of(self, token_ids: Sequence[int]) -> float:
        return self.long if len(token_ids) > 8 else 1e-9


@pytest.mark.parametrize(
    "length, rounding, verdict",
    [(3, 1e-5, "wrong"), (9, 1e-5, "right"), (9, 1e-6, "wrong"), (9, 1e3, "inconclusive")],
)
def test_what_is_beyond_the_limit_is_held_against_the_rounding_of_its_own_text(
    length: int, rounding: float, verdict: str
) -> None:
    ask = Ask(tuple(range(1, length + 1)), max_tokens=4, logprobs=True)
    (plain,) = Toy().ask([ask])
    off = [{token: value + 5e-5 for token, value in one.items()} for one in plain.logprobs]
    judge = Judge(LongTexts(rounding))
    assert (
        judge.judge(ask, Answer(**{**vars(plain), "logprobs": tuple(off)}), None).verdict == verdict
    )
    assert judge.limit == MARGIN * 1e-9  # of other texts nothing else is believed


def test_a_late_draw_that_turns_a_router_explains_a_difference_and_ends_the_drawing() -> None:
    oracle, moves = ToyOracle(), []
    oracle.moves = lambda text, roundings: (
        moves.append(moved) or moved for moved in (1e-9, 1e-9, 6e-5, 1.0)
    )
    ask = Ask((1, 2, 3), max_tokens=4, logprobs=True)
    (plain,) = Toy().ask([ask])
    off = [{token: value + 5e-5 for token, value in one.items()} for one in plain.logprobs]
    assert (
        Judge(oracle).judge(ask, Answer(**{**vars(plain), "logprobs": tuple(off)}), None).verdict
        == "right"
    )
    assert moves == [1e-9, 1e-9, 6e-5]


def test_nan_is_no_log_probability() -> None:
    one = answer()
    logprobs = ({**one.logprobs[0], one.token_ids[0]: float("nan")}, *one.logprobs[1:])
    assert Judge(ToyOracle()).judge(ASK, answer(logprobs=logprobs), None).verdict == "wrong"


def test_against_the_engine_alone_a_difference_needs_a_margin() -> None:
    judge, tokens = Judge(None), answer().token_ids
    other = answer(token_ids=((tokens[0] + 1) % 50, *tokens[1:]))
    assert judge.judge(ASK, other, answer()).verdict == "wrong"
    assert judge.judge(ASK, other, answer(logprobs=())).verdict == "inconclusive"
    judge.repeated = 1e9
    assert judge.judge(ASK, other, answer()).verdict == "inconclusive"


@pytest.mark.parametrize("repeated, verdict", [(0.0, "wrong"), (1.0, "inconclusive")])
def test_a_seeded_draw_is_wrong_unless_rounding_may_have_turned_it(
    repeated: float, verdict: str
) -> None:
    judge, ask = Judge(ToyOracle()), Ask((1,), max_tokens=4, temperature=1.0, seed=3)
    judge.repeated = repeated
    assert judge.judge(ask, Answer((1, 2, 3, 4)), Answer((1, 2, 9, 4))).verdict == verdict


def test_an_error_and_a_missing_answer_are_wrong() -> None:
    judge = Judge(ToyOracle())
    assert (
        judge.judge(ASK, Answer((), error="HTTP 500: oops"), None).problem
        == "error: HTTP 500: oops"
    )
    assert "1 answers for n=2" in judge.judge(Ask((1,), n=2), Answer((1,)), None).problem


def test_an_answer_that_was_cut_off_may_be_short() -> None:
    tokens = answer().token_ids
    cut = Ask((1, 2, 3), max_tokens=4, abort_after=2)
    assert Judge(ToyOracle()).judge(cut, Answer(tokens[:2]), None).verdict == "right"
    assert "ends after 1 of 2" in Judge(ToyOracle()).judge(cut, Answer(tokens[:1]), None).problem


def test_a_token_that_the_model_does_not_have_is_an_error() -> None:
    for odd in (Answer((1, 50)), Answer((1,), others=((2,), (-1,)))):
        assert Judge(ToyOracle()).possible(odd).error.endswith(": the model has 50, from 0 on")
    assert Judge(ToyOracle()).possible(answer()) == answer()


def test_a_reference_that_failed_shows_nothing_to_be_right() -> None:
    drawn = Ask((1,), max_tokens=1, temperature=1.0, n=2)
    for ask, found, alone in (
        (ASK, answer(), Answer((), error="no")),
        (drawn, Answer((1,), others=((1,),)), Answer((1,))),
    ):
        assert Judge(None).judge(ask, found, alone).verdict == "inconclusive"
    unbound = Judge(None)
    unbound.repeated = math.inf
    assert unbound.hides(12)

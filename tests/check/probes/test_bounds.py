"""Bounds from below: what a prefix cache must have kept of texts that came one at a time."""

from __future__ import annotations

from dataclasses import replace

import pytest

from hybrid_kv.check.probes.bounds import MOST_KNOWN, Kept, num_sure_drafts
from hybrid_kv.check.probes.registry import Round
from hybrid_kv.check.probes.reproducer import case_of
from hybrid_kv.check.probes.shrink import play
from hybrid_kv.check.targets.target import Answer, Ask, Inside
from tests.check.probes.toy import UNIT, ToyKind, run_probe, session

STEM = tuple(range(1, 41))


def alone(*tokens: int, **fields: object) -> Round:
    return Round((replace(Ask(tokens), **fields),))


def after(*rounds: Round) -> Kept:
    kept = Kept()
    for sent in rounds:
        kept.add(sent, [Answer((7, 8))] * len(sent.requests))
    return kept


def least(kept: Kept, sent: Round) -> int:
    return kept.least(sent, UNIT)


def test_the_last_boundary_of_a_prompt_is_kept_and_a_token_of_it_is_computed() -> None:
    kept = after(alone(*STEM))
    assert least(kept, alone(*STEM)) == 32
    assert least(kept, alone(*STEM[:33])) == 32 and least(kept, alone(*STEM[:32])) == 0
    assert least(after(alone(*STEM[:32])), alone(*STEM)) == 16


def test_a_third_prompt_finds_where_the_first_two_part() -> None:
    first, second, third = (alone(*STEM[:20], *(last,) * 30) for last in (50, 51, 52))
    assert least(after(first), second) == 0
    assert least(after(first, second), third) == 16


@pytest.mark.parametrize(("length", "most"), [(30, 16), (31, 32)])
def test_an_answer_counts_without_its_last_token(length: int, most: int) -> None:
    stem = STEM[:length]
    longer = alone(*stem, 7, 8, *STEM[:20])
    assert least(after(alone(*stem), longer), alone(*stem, 7, 8, 9)) == most


@pytest.mark.parametrize(
    "sent",
    [
        Round((Ask(STEM), Ask(STEM))),
        replace(alone(*STEM), preempt_every=4),
        replace(alone(*STEM), after_sleep=True),
        alone(*STEM, abort_after=2),
        alone(*STEM, salt="a"),
        alone(*STEM, n=2),
        alone(*STEM * (MOST_KNOWN // len(STEM) + 1)),
    ],
)
def test_nothing_is_sure_after_a_round_that_may_leave_less(sent: Round) -> None:
    assert least(after(alone(*STEM), sent), alone(*STEM)) == 0


@pytest.mark.parametrize(("bug", "verdict"), [("", "right"), ("forgets the end", "wrong")])
def test_an_engine_that_keeps_less_is_wrong(bug: str, verdict: str) -> None:
    kind = ToyKind(bug=bug)
    kind.inside = Inside({}, (), keeps=lambda settings: settings["prefix"] == "on")
    some = session(kind)
    outcome = run_probe(some, "a third with the same beginning")
    assert outcome.verdict == verdict
    for failure in outcome.failures:
        kept = failure.judgement.least_cached
        assert f"cached tokens, but {kept} of its prompt were kept" in failure.judgement.problem
        case = case_of(failure, "toy", "1.0", "toy", 0.0)
        assert case.is_wrong(failure.answer)
        assert not case.is_wrong(replace(failure.answer, cached_tokens=kept))
        fresh = session(kind)
        again = play(fresh, failure.rounds, failure)
        assert again is not None and again.judgement == failure.judgement
        assert fresh.unit == failure.unit  # or the bound is of other blocks


def test_a_token_is_sure_where_it_always_followed() -> None:
    ask = Ask((1, 2, 3, 1, 2, 4))
    # 2 after 1 is; 3 after 2 is not, since 4 followed, too; 1 after 3 is.
    assert num_sure_drafts(ask, Answer((1, 2, 3, 1))) == 2
    assert num_sure_drafts(ask, Answer((5, 6, 7))) == 0


@pytest.mark.parametrize(("accepted", "verdict"), [(1, "void"), (40, "right")])
def test_too_few_accepted_drafts_are_void(accepted: int, verdict: str) -> None:
    kind = ToyKind(accepted=accepted)
    kind.factors["spec"] = ("none", "ngram3")
    kind.inside = Inside({}, (), looks_up=lambda settings: settings["spec"] == "ngram3")
    outcome = run_probe(session(kind, spec="ngram3"), "many at once, all with drafts")
    assert (outcome.verdict, "had always followed" in outcome.detail) == (
        verdict,
        verdict == "void",
    )

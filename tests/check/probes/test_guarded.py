from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NoReturn

import pytest

from hybrid_kv.check.probes.guarded import MOST_DEATHS, Guarded, ask
from hybrid_kv.check.targets.target import Ask, TargetError
from tests.check.probes.toy import Toy, ToyKind


def test_references_have_the_dtype_of_what_they_are_held_against(
    guarded: Callable[..., Guarded],
) -> None:
    some = guarded()
    some.kind.factors["dtype"] = ("float32", "bfloat16")
    coarse = some.session({"prefix": "on", "dtype": "bfloat16"}).references
    assert coarse.alone(Ask((3,))) and coarse.target.settings == {"dtype": "bfloat16"}
    fine = some.session({"prefix": "on"}).references
    assert fine.alone(Ask((3,))) and fine.target.settings == {}


def test_the_plainest_setting_of_each_dtype_is_plain(guarded: Callable[..., Guarded]) -> None:
    some = guarded()
    some.kind.factors["dtype"] = ("float32", "bfloat16")
    assert isinstance(some.kind, ToyKind)
    assert [
        some.is_plain(one)
        for one in ({}, {"dtype": "bfloat16"}, {"prefix": "off"}, {"prefix": "on"})
    ] == [
        True,
        True,
        True,
        False,
    ]


def test_an_engine_that_dies_of_one_thing_again_and_again_is_let_be(
    guarded: Callable[..., Guarded], monkeypatch: pytest.MonkeyPatch
) -> None:
    some, found = guarded(), []
    some.session({})  # it lives as long as rounding is measured
    words = iter(["of 1", "of 22", "of something else", "of 333", "of 4", "of 5"])

    def die(self: Toy, requests: Sequence[Ask], preempt_every: int = 0) -> NoReturn:
        raise TargetError(f"toy died {next(words)}")

    monkeypatch.setattr(Toy, "ask", die)
    ask(some, {}, ["repeat", "entry", "batch", "identical", "boundaries"], found.append)
    verdicts = [one.verdict for one in found]
    assert verdicts[: MOST_DEATHS + 1] == ["wrong"] * (MOST_DEATHS + 1)
    assert set(verdicts[MOST_DEATHS + 1 :]) == {"inconclusive"} and "not sent" in found[-1].detail


@pytest.mark.parametrize(
    ("bug", "trusted"), [("dies of one token", True), ("others", True), ("ends early", False)]
)
def test_an_engine_that_dies_says_nothing_of_the_oracle(
    guarded: Callable[..., Guarded], bug: str, trusted: bool
) -> None:
    some, found = guarded(bug=bug), []
    ask(some, {}, ["alone"], found.append)
    assert (found[0].probe, found[0].verdict) == ("alone", "right" if bug == "others" else "wrong")
    assert some.judge_of({}).trusted == trusted


def test_a_prompt_that_kills_the_engine_is_not_sent_in_the_next_setting(
    guarded: Callable[..., Guarded],
) -> None:
    some, found = guarded(bug="dies of one token"), []
    for settings in ({}, {"prefix": "on"}):
        ask(some, settings, ["alone"], found.append)
    assert [one.verdict for one in found] == ["wrong", "right"] and some.shortest == 2


def test_an_engine_that_does_not_start_again_is_a_finding(
    guarded: Callable[..., Guarded], monkeypatch: pytest.MonkeyPatch
) -> None:
    some, found = guarded(bug="dies"), []
    session = some.session({})
    monkeypatch.setattr(some, "session", lambda settings: session)
    monkeypatch.setattr(
        some.kind, "start", lambda folder, settings: ToyKind().start(folder, {"chunk": "no"})
    )
    ask(some, {}, [""], found.append)
    assert [one.verdict for one in found] == ["right", "wrong"]
    assert found[1].detail.endswith("Error; then it does not start: toy, start: no chunks here")

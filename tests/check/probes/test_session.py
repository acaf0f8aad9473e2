from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, NoReturn

import pytest

from hybrid_kv.check.probes.judge import AnswerJudgement, Judge
from hybrid_kv.check.probes.registry import Round, load_probes
from hybrid_kv.check.probes.session import Outcome, References, Session, calibrate
from hybrid_kv.check.targets.target import CAPABILITIES, Answer, Ask, Known, TargetError
from hybrid_kv.config import ConfigError
from tests.check.probes.toy import UNIT, VOCAB, Toy, ToyKind, ToyOracle, run_probe, session

# Who finds what, first of all probes in their order.
FINDS = {
    "hit": "repeat",
    "hit of two blocks": "repeat",
    "long hit": "a tree of texts",
    "ends with the hit": "ends at a cached entry",
    "salts": "salts isolate",
    "abort": "abort, then the same prompt",
    "others": "batch",
    "preempted": "preempted",
    "asleep": "asleep",
    "n": "several answers",
    "other answers": "several answers",
    "logprobs": "alone",
    "ends early": "alone",
    "churn": "again after many",
    "limit": "up to the limit",
    "what a others leaves": "boundaries behind a batch",
    "rows": "many are cut off",
    "dies": "batch",
    "dies of one token": "alone",
}


def outcomes(
    prefix: str = "on", oracle: bool = True, only: str = "", **how: Any
) -> tuple[dict[str, Outcome], Session]:
    made = session(ToyKind(**how), prefix, Judge(ToyOracle() if oracle else None))
    calibrate(made, VOCAB)
    wanted = [probe for probe in load_probes() if only in ("", probe.name)]
    return {probe.name: made.run(probe, VOCAB) for probe in wanted}, made


@pytest.mark.parametrize("oracle", [True, False])
def test_a_sound_engine_is_right_everywhere(oracle: bool) -> None:
    found, some = outcomes(oracle=oracle)
    assert {name: one.detail for name, one in found.items() if one.verdict != "right"} == {}
    assert some.unit == UNIT
    assert found["repeat"].moved["cached"] > 0 and found["preempted"].moved["preemptions"] > 0


@pytest.mark.parametrize("bug", FINDS)
@pytest.mark.parametrize("oracle", [True, False])
def test_a_bug_is_found_by_the_probe_that_is_about_it(bug: str, oracle: bool) -> None:
    found, _ = outcomes(bug=bug, oracle=oracle, only=FINDS[bug])
    assert found[FINDS[bug]].verdict == "wrong"


def test_where_rounding_would_hide_a_wrong_answer_nothing_is_right(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Nothing is right if rounding would hide a wrong answer.

    The toy's log-probabilities lie between 0 and -12: a random token is mostly within 10 of the
    best.
    """
    monkeypatch.setattr(ToyOracle, "rounding", 10 / 8)
    found, some = outcomes()
    assert 0.7 < some.judge.hidden < 1
    assert {one.verdict for one in found.values()} == {"inconclusive"}
    assert found["batch"].detail.startswith("rounding goes to 10, which ")


@pytest.mark.parametrize(
    ("promised", "bug", "verdict"),
    [(True, "", "wrong"), (False, "", "right"), (False, "others", "wrong")],
)
def test_draws_are_held_against_those_of_other_settings_only_where_that_is_promised(
    promised: bool, bug: str, verdict: str
) -> None:
    kind = ToyKind(
        bug=bug, can=frozenset(CAPABILITIES) - (set() if promised else {"seed in all settings"})
    )
    kind.factors["spec"] = ("none", "ngram3")
    references = References(kind, "folder")
    drafting = session(kind, "off", references=references, spec="ngram3")
    calibrate(drafting, VOCAB)
    seeds = run_probe(drafting, "seeds")
    assert (seeds.verdict, seeds.num_answers > 0) == (verdict, True)
    assert (references.target is not None) == promised, (
        "another engine is started only where it is plain"
    )


def test_no_request_is_longer_than_the_target_lets_it_be(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Toy, "longest", 100)
    _, some = outcomes()
    requests = [ask for one in some.sent for ask in one.requests]
    traffic = some.traffic("batch", VOCAB)
    found = [
        traffic.ask(traffic.prompt(length), max_tokens=23).max_tokens for length in (50, 77, 78, 88)
    ]
    assert found == [23, 23, 22, 12]
    assert all(len(ask.prompt) + ask.max_tokens <= 100 for ask in requests)


def test_what_is_off_need_not_move() -> None:
    found, _ = outcomes(prefix="off")
    assert {one.verdict for one in found.values()} == {"right"}


def test_a_cache_that_never_hits_is_void() -> None:
    some = session(ToyKind())
    some.target.caches = False
    assert run_probe(some, "repeat").verdict == "void"


def test_what_the_target_does_not_offer_is_not_sent() -> None:
    found, _ = outcomes(can=frozenset(CAPABILITIES) - {"salt", "preempt", "batch"})
    for name in ("salts isolate", "preempted", "batch"):
        assert found[name].verdict == "not supported"
    assert found["salts isolate"].detail == "the target offers no salt"


def test_right_answers_without_a_counter_are_no_pass(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        ToyKind, "start", lambda *_: Silent({"prefix": "on"}, can=frozenset({"reset", "batch"}))
    )
    found, _ = outcomes(only="repeat")
    assert (
        found["repeat"].verdict == "inconclusive" and "no counter of hits" in found["repeat"].detail
    )


class Silent(Toy):
    def counters(self) -> dict[str, float]:
        return {}


def test_what_would_take_too_long_is_not_sent(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Toy, "longest", 5000)
    found, _ = outcomes()
    assert found["up to the limit"].verdict == "not supported"
    assert {one.verdict for name, one in found.items() if name != "up to the limit"} == {"right"}


def test_what_a_reset_leaves_in_a_further_tier_is_still_known() -> None:
    def known(**settings: str) -> int:
        some = session(ToyKind(), "off", **settings)
        some.kind.factors = {**some.kind.factors, "offload": ("none", "host")}
        some.play(Round((Ask((1, 2, 3)),)))
        some.reset()
        return some.seen.shared(Round((Ask((1, 2, 3, 4)),)), 0)

    assert (known(), known(offload="none"), known(offload="host")) == (0, 0, 3)


@pytest.mark.parametrize(("resumed", "verdict"), [(1, "right"), (0, "wrong")])
def test_a_request_that_was_preempted_may_find_itself(
    monkeypatch: pytest.MonkeyPatch, resumed: int, verdict: str
) -> None:
    def ask(
        toy: Toy,
        requests: Sequence[Ask],
        preempt_every: int = 0,
        ask: Callable[[Toy, Sequence[Ask]], list[Answer]] = Toy.ask,
    ) -> list[Answer]:
        toy.counts["preemptions"] += resumed
        return [replace(one, cached_tokens=UNIT) for one in ask(toy, requests)]

    monkeypatch.setattr(Toy, "ask", ask)
    some = session(ToyKind())
    some.target.counts["preemptions"] = 3
    some.reset()
    some.restart()  # whose counters begin at 0
    _, (judgement,) = some.play(Round((Ask(tuple(range(1, UNIT + 2))),)))
    assert judgement.verdict == verdict


def test_without_an_oracle_and_logprobs_nothing_can_be_judged() -> None:
    with pytest.raises(ConfigError, match="neither an oracle nor log-probabilities"):
        outcomes(oracle=False, can=frozenset({"reset"}))


def test_a_target_that_died_is_started_again() -> None:
    found, _ = outcomes(bug="dies")
    assert "toy died" in found["batch"].detail
    assert found["several answers"].verdict == "right"


def test_an_engine_that_dies_of_the_shortest_prompt_gets_longer_ones() -> None:
    found, _ = outcomes(bug="dies of one token")
    assert (
        found["alone"].detail.startswith("a prompt of length 1: toy died")
        and found["alone"].num_answers == 7
    )
    assert [name for name, one in found.items() if one.verdict != "right"] == ["alone"]


def test_after_a_known_death_a_probe_sends_longer_prompts() -> None:
    kind = ToyKind(bug="dies of one token")
    kind.known = (Known("1.0", "toy_script", words="toy died", shortest=2),)
    outcome = run_probe(session(kind), "alone")
    assert outcome.verdict == "known" and outcome.detail.startswith("toy_script: ")
    # 7 until it dies, and then all.
    assert outcome.num_answers == 7 + run_probe(session(ToyKind()), "alone").num_answers


def test_an_engine_that_dies_of_every_prompt_is_not_calibrated(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def die(*_: object) -> NoReturn:
        raise TargetError("toy died")

    monkeypatch.setattr(Toy, "ask", die)
    with pytest.raises(TargetError, match="toy died"):
        outcomes()


def test_an_engine_that_gives_references_is_started_again() -> None:
    references = References(ToyKind(bug="dies of one token"), "folder")
    with pytest.raises(TargetError):
        references.alone(Ask((3,)))
    assert references.alone(Ask((3, 4))).token_ids


def test_the_failure_has_all_rounds_since_the_cache_was_empty() -> None:
    found, _ = outcomes(bug="hit", only="repeat")
    (failure,) = found["repeat"].failures
    assert (
        failure.rounds[-1].requests[failure.index].prompt == failure.rounds[-2].requests[0].prompt
    )
    assert failure.judgement.margin > 0 and failure.judgement.expected != failure.answer.token_ids


def test_an_unclear_answer_is_counted_but_not_judged(monkeypatch: pytest.MonkeyPatch) -> None:
    found, some = outcomes(only="several answers")
    judged = found["several answers"]
    assert judged.num_answers == judged.num_judged == 18
    monkeypatch.setattr(
        Judge, "judge", lambda *_: AnswerJudgement("inconclusive", "a log-probability would decide")
    )
    unclear = run_probe(some, "several answers")
    assert (unclear.verdict, unclear.num_answers, unclear.num_judged) == ("inconclusive", 18, 0)
    assert unclear.num_tokens == judged.num_tokens


def test_rounding_is_measured_with_the_same_texts_whatever_a_block_is(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    texts: list[list[list[int]]] = []
    monkeypatch.setattr(ToyOracle, "rounds", lambda self, text: texts[-1].append(text))
    for unit in (UNIT, 4 * UNIT):
        texts.append([])
        measured = session(ToyKind(), "off", Judge(ToyOracle()))
        measured.unit = unit
        calibrate(measured, VOCAB)
    assert texts[0] == texts[1] and len(texts[0]) == 8

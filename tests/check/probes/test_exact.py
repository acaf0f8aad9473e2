"""The exact model in an engine: a toy answers as the oracle does, but for a bug."""

from __future__ import annotations

import ast
import json
import random
from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from hybrid_kv.check.probes.checks import exact
from hybrid_kv.check.probes.guarded import Guarded, runs_in
from hybrid_kv.check.probes.judge import ExactJudge
from hybrid_kv.check.probes.known import name_known
from hybrid_kv.check.probes.registry import Round, Traffic, load_probes
from hybrid_kv.check.probes.reproducer import ProbeCase, write_files
from hybrid_kv.check.probes.run import compare_with, default_matrix
from hybrid_kv.check.probes.script import script_of
from hybrid_kv.check.probes.session import Outcome
from hybrid_kv.check.targets import ours, vllm
from hybrid_kv.check.targets.exact import PATTERNS, ExactAnswers, write_exact_checkpoint
from hybrid_kv.check.targets.kinds import for_model
from hybrid_kv.check.targets.target import CAPABILITIES, Answer, Ask, Inside, Kind, Known
from hybrid_kv.config import ConfigError
from tests.check.probes.toy import Toy, guard

UNIT = 16


class ExactToy(Toy):
    def __init__(self, folder: str, settings: dict[str, str], bug: str) -> None:
        super().__init__(settings, bug, frozenset(CAPABILITIES) - {"logprobs", "cached", "salt"})
        self.cached, self._answers = {}, ExactAnswers(folder)

    def ask(self, requests: Sequence[Ask], preempt_every: int = 0) -> list[Answer]:
        return [self._answer(one, preempt_every) for one in requests]

    def _answer(self, ask: Ask, preempt_every: int) -> Answer:
        count = ask.max_tokens if ask.abort_after is None else min(ask.abort_after, ask.max_tokens)
        prompt = ask.prompt
        first, second = prompt[:UNIT], prompt[UNIT : 2 * UNIT]
        known = self.cached.setdefault(second, first) if len(second) == UNIT else first
        if self.bug == "no parent" and known != first:
            prompt = (*known, *prompt[UNIT:])
        if self.bug == "parent backwards" and known != first:
            prompt = (*known[::-1], *prompt[UNIT:])
        if "one token" in self.bug and ask.step and len(prompt) == 1:
            prompt = (*prompt, 0)
        if "preempted" in self.bug and preempt_every and len(prompt) > 20:
            prompt = prompt[1:]
        tokens = tuple(self._answers.tokens(prompt, count))
        return Answer(tokens, others=(tokens,) * (ask.n - 1))

    def counters(self) -> dict[str, float]:
        return {"preemptions": 1.0}


def kind(bug: str = "", known: tuple[Known, ...] = ()) -> Kind:
    inside = Inside({"prefix": ("off", "on")}, ("prefix=on",))
    start = lambda folder, settings: ExactToy(folder, settings, bug)  # noqa: E731
    return Kind("toy", {}, start, inside=inside, known=known)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("exact")
    write_exact_checkpoint("mixed", folder)
    return str(folder)


def found(some: Guarded, *select: str) -> dict[str, Outcome]:
    return {
        one.probe: one
        for one in guard(some, [{}], select)
        if one.verdict not in ("right", "not supported")
    }


def test_a_right_engine_is_right_in_the_settings_that_it_names(
    folder: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("hybrid_kv.check.probes.session.BATCH", 12)
    some = Guarded(kind(), folder)
    assert default_matrix(some.kind) == [{}, {"prefix": "on"}]
    assert not found(some, "traffic", "tiles", "token")


def test_what_its_traffic_covers_is_left_out_where_it_runs(folder: str) -> None:
    names = [
        one.probe
        for one in guard(
            Guarded(kind(), folder, thorough=False), [{}], ["alone", "tiles", "repeat"]
        )
    ]
    assert names == ["alone", "tiles"]


@pytest.mark.parametrize(
    ("bug", "probe"),
    [("no parent", "tiles"), ("one token", "one token beside others"), ("preempted", "traffic")],
)
def test_its_traffic_finds(folder: str, bug: str, probe: str) -> None:
    outcome = found(Guarded(kind(bug), folder), probe)[probe]
    assert outcome.verdict == "wrong" and len(outcome.failures) == 1


def test_a_known_failure_of_the_release_is_named_and_not_counted(folder: str) -> None:
    known = Known("1.0", "toy_script", probe="tiles", words="not")
    some = Guarded(kind("no parent", (known,)), folder)
    (outcome,) = found(some, "tiles").values()
    assert (outcome.verdict, outcome.failures) == ("known", [])
    assert outcome.detail.startswith("toy_script: token")
    for other in (
        replace(known, release="2.0"),
        replace(known, words="dies"),
        replace(known, factors=("prefix",)),
    ):
        again, some.kind.known = replace(outcome, verdict="wrong"), (other,)
        name_known(some.kind, some.version, again)
        assert again.verdict == "wrong"


def test_after_a_known_failure_a_probe_goes_on_with_longer_prompts(folder: str) -> None:
    first = found(Guarded(kind("one token"), folder), "traffic")["traffic"]
    known = Known(
        "1.0", "toy_script", probe="traffic", words=first.detail, setting="plain", shortest=2
    )
    again = found(Guarded(kind("one token", (known,)), folder), "traffic")["traffic"]
    assert (again.verdict, again.failures) == (
        "known",
        [],
    ) and again.num_answers > 2 * first.num_answers
    other = found(Guarded(kind("one token, preempted", (known,)), folder), "traffic")["traffic"]
    assert other.verdict == "wrong" and len(other.failures) == 1
    assert other.detail.endswith("(after toy_script)")
    elsewhere = replace(known, setting="prefix=on")
    assert (
        found(Guarded(kind("one token", (elsewhere,)), folder), "traffic")["traffic"].verdict
        == "wrong"
    )


@pytest.mark.parametrize(
    ("old", "verdict"), [("no parent", "as before"), ("parent backwards", "wrong"), ("", "wrong")]
)
def test_as_before_are_the_same_wrong_tokens_alone(folder: str, old: str, verdict: str) -> None:
    seen = guard(Guarded(kind("no parent"), folder), [{}], ["tiles"])
    compare_with(Guarded(kind(old), folder), seen)
    assert [(one.probe, one.verdict) for one in seen] == [("alone", "right"), ("tiles", verdict)]


def test_a_further_model_has_its_own_settings(folder: str, tmp_path: Path) -> None:
    some = kind()
    some.inside = replace(some.inside, further={"kda": ("prefix=off",)})
    write_exact_checkpoint("kda", tmp_path)
    assert default_matrix(Guarded(some, folder).kind) == [{}, {"prefix": "on"}]
    assert default_matrix(Guarded(some, str(tmp_path)).kind) == [{}]


def test_an_engine_that_cannot_run_it_says_so(folder: str) -> None:
    with pytest.raises(ConfigError, match="--exact: ours cannot run an exact model"):
        Guarded(ours.KIND, folder)


def test_an_answer_is_the_oracles_or_wrong(folder: str) -> None:
    judge, prompt = ExactJudge(folder), (1, 2, 3)
    right = tuple(ExactAnswers(folder).tokens(prompt, 9))

    def verdict(ask: Ask, *tokens: int, **more: Any) -> str:
        return judge.judge(ask, Answer(tuple(tokens), **more), None).verdict

    ask = Ask(prompt, max_tokens=9)
    assert verdict(ask, *right) == verdict(replace(ask, temperature=1.0, seed=1), *right) == "right"
    assert (
        verdict(ask, *right[:-1], right[-1] + 1)
        == verdict(ask, *right[:-1])
        == verdict(ask, error="no")
        == "wrong"
    )
    assert verdict(replace(ask, abort_after=4), *right[:5]) == "right"
    assert verdict(replace(ask, abort_after=4), *right[:3]) == "wrong"
    several = replace(ask, n=2)
    assert verdict(several, *right) == verdict(several, *right, others=((0,) * 9,)) == "wrong"
    assert verdict(several, *right, others=(right,)) == "right"


def test_answers_depend_on_every_token_and_mostly_follow(folder: str) -> None:
    answers, prompt = ExactAnswers(folder), tuple(range(40))
    tokens = answers.tokens(prompt, 60)
    assert answers.tokens(prompt, 20) == tokens[:20]
    for i in range(40):
        assert answers.tokens((*prompt[:i], prompt[i] + 1, *prompt[i + 1 :]), 60) != tokens
    follow = sum(b == a - a % 5 + (a + 1) % 5 for a, b in pairwise(tokens))
    assert 40 < follow < 59


def test_there_is_no_other_exact_model(tmp_path: Path) -> None:
    with pytest.raises(
        ConfigError,
        match=f"exact:mamba: there is no such exact model; use one of {', '.join(PATTERNS)}",
    ):
        write_exact_checkpoint("mamba", tmp_path)


@pytest.mark.parametrize(
    ("name", "windows"),
    [("window", [None, 18, 18, None, None]), ("window_drafter", [None] * 4 + [6])],
)
def test_windows_are_for_engines_that_have_them(
    name: str, windows: list[int | None], tmp_path: Path
) -> None:
    write_exact_checkpoint(name, tmp_path)
    written = json.loads((tmp_path / "config.json").read_text())["exact"]
    weights = [*(layer["weights"] for layer in written["layers"]), written["head"]]
    assert [each.get("window") for each in weights] == windows
    with pytest.raises(ConfigError, match=f"exact:{name}: toy runs no exact model with sliding"):
        for_model(kind(), str(tmp_path))
    assert for_model(vllm.KIND, str(tmp_path)).factors["runner"]


def test_a_failure_in_vllm_becomes_a_script(tmp_path: Path) -> None:
    rounds = (Round((Ask((5, 6), max_tokens=3), Ask((7,), max_tokens=2, step=4)), preempt_every=9),)
    settings = {"runner": "cpu", "prefix": "on", "blocks": "tight", "async": "on", "kernel": "4"}
    wrong = rounds, 1, (8, 9), (8, 1), 0.0, None, None, 0.0
    case = ProbeCase("vllm", "0.32.0", "exact:gdn", settings, "traffic", "token 0 is 1", *wrong)
    *_, script = write_files(case, tmp_path, script_of(case))
    names = {
        node.name
        for node in ast.parse(script.read_text()).body
        if isinstance(node, ast.FunctionDef | ast.ClassDef)
    }
    assert {
        "declare_vision",
        "register",
        "ExactHybridForCausalLM",
        "make_tight",
        "allow_async",
        "main",
    } <= names
    data = ast.literal_eval(script.read_text().split("\nCASE = ")[1].split('\nCASE["config"]')[0])
    assert data["kernel_block_size"] == 4 and data["changes"] == ["make_tight", "allow_async"]
    assert data["rounds"][0]["requests"][1] == {"prompt": (7,), "max_tokens": 2, "step": 4}
    assert data["options"]["enable_prefix_caching"] is True and data["expected"] == [8, 9]
    assert set(vllm.KIND.inside.factors) >= set(settings)


@pytest.mark.parametrize("unit", [16, 312, 341])
def test_traffic_keeps_within_the_limit_of_the_target(unit: int) -> None:
    """Blocks of 312 tokens, those of exact Granite weights, made prompts of 2,194 tokens."""
    source = Traffic(random.Random(0), 97, unit, longest=1560, limit=2048)
    rounds = exact.traffic(source)
    asked = next(rounds)
    while asked is not None:
        assert all(0 < len(ask.prompt) < 2048 for ask in asked.requests)
        answers = [Answer((1,) * ask.max_tokens) for ask in asked.requests]
        try:
            asked = rounds.send(answers)
        except StopIteration:
            asked = None


def test_a_crowd_begins_with_what_always_followed() -> None:
    """A token that was seen once, or with two followers, foretells nothing."""
    rounds = exact.all_drafting(Traffic(random.Random(0), 256, UNIT, 640, 640))
    first = next(rounds)
    texts = [(1, 2, 1, 2, 3), (4, 5, 4, 6, 4), *[(7,)] * (len(first.requests) - 2)]
    second = rounds.send([Answer(text) for text in texts])
    assert [ask.prompt[:2] for ask in second.requests] == [(1, 2)] * len(texts)
    assert [len(ask.prompt) for ask in second.requests] == [3 + i for i in range(len(texts))]


@pytest.mark.parametrize(
    ("settings", "thorough", "runs"),
    [
        ({}, False, False),
        ({"spec": "mtp3"}, False, True),
        ({"prefix": "on"}, True, False),
        ({}, True, True),
        ({"runner": "cpu"}, False, False),
    ],
)
def test_a_probe_of_drafts_runs_with_drafts_and_where_there_is_time(
    settings: dict[str, str], thorough: bool, runs: bool
) -> None:
    inside = vllm.KIND.inside
    assert inside is not None
    kind = replace(vllm.KIND, factors=inside.factors)
    for name in ("as long as a verify step", "many at once, all with drafts"):
        (probe,) = [probe for probe in load_probes() if probe.name == name]
        assert runs_in(probe, kind, settings, "exact", thorough) is runs

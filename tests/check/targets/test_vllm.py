"""vLLM in its own environment; what needs one is skipped where there is none."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from types import SimpleNamespace

import pytest

from hybrid_kv.check.guard_model import FOLDER
from hybrid_kv.check.probes.registry import Round
from hybrid_kv.check.probes.reproducer import ProbeCase, write_files
from hybrid_kv.check.probes.script import script_of
from hybrid_kv.check.targets import remote, vllm
from hybrid_kv.check.targets.exact import ExactAnswers, write_exact_checkpoint
from hybrid_kv.check.targets.kinds import for_model
from hybrid_kv.check.targets.remote import Remote
from hybrid_kv.check.targets.target import Ask
from hybrid_kv.check.targets.workers import vllm_case
from hybrid_kv.check.targets.workers.vllm import MAX_MODEL_LEN, ROOM, arguments
from hybrid_kv.config import ConfigError
from tests.check.targets.models import PROMPT, installed


def test_every_level_is_known_to_the_worker() -> None:
    plain, elsewhere = arguments({}), ("kernel", "sanitize", "runner", "graph", "copies")
    assert plain == arguments({factor: levels[0] for factor, levels in vllm.KIND.factors.items()})
    for factor, levels in [*vllm.KIND.factors.items(), *vllm.KIND.inside.factors.items()]:
        for level in levels[1:]:
            assert (arguments({factor: level}) != plain) == (factor not in elsewhere), (
                f"{factor}={level}"
            )


def test_what_the_exact_model_is_known_to_fail_has_words(tmp_path: Path) -> None:
    """A setting alone would excuse what nobody knows. Draws that differ each time have no words."""
    write_exact_checkpoint("mixed", tmp_path)
    known = for_model(vllm.KIND, str(tmp_path)).known
    assert known and [each for each in known if not (each.words or each.probe)] == []


def test_levels_become_arguments() -> None:
    found = arguments(
        {"prefix": "all", "spec": "mtp3", "chunk": "17", "match": "32", "retain": "all"}
    )
    assert found["mamba_cache_mode"] == "all" and found["enable_prefix_caching"] is True
    assert found["speculative_config"] == {"method": "mtp", "num_speculative_tokens": 3}
    assert (found["max_num_batched_tokens"], found["prefix_match_unit"]) == (17, 32)
    assert found["prefix_cache_retention_interval"] is None
    assert (arguments({})["max_model_len"], arguments({"blocks": "tight"})["max_model_len"]) == (
        MAX_MODEL_LEN,
        ROOM,
    )


@pytest.mark.parametrize(
    "setting", [("prefix", "off3"), ("chunk", "small"), ("spec", "mtp"), ("scheme", "slots")]
)
def test_an_unknown_setting_is_refused(setting: tuple[str, str]) -> None:
    with pytest.raises(ValueError, match="is not a setting of vLLM"):
        arguments(dict([setting]))


def started(**settings: str) -> Remote:
    installed()
    return vllm.KIND.start(str(FOLDER), settings)


@pytest.fixture(scope="module")
def target() -> Iterator[Remote]:
    target = started(prefix="on", blocks="tight")
    yield target
    target.close()


def test_a_request_is_answered_the_same_however_it_is_sent(target: Remote) -> None:
    (alone,) = target.ask([Ask(PROMPT, logprobs=True)])
    assert len(alone.token_ids) == 12
    assert all(
        max(one, key=one.__getitem__) == token
        for token, one in zip(alone.token_ids, alone.logprobs, strict=True)
    )
    requests = [
        Ask(PROMPT, max_tokens=30, abort_after=5),
        Ask(PROMPT, n=2),
        Ask(PROMPT, after=1),
        Ask((*PROMPT, *alone.token_ids), salt="a"),
        Ask((1,) * MAX_MODEL_LEN),
    ]
    aborted, several, late, _, too_long = target.ask(requests)
    assert aborted.token_ids == alone.token_ids[:5]
    assert (several.token_ids, several.others) == (alone.token_ids, (alone.token_ids,))
    assert late.token_ids == alone.token_ids
    assert too_long.error and not too_long.token_ids


def test_forced_preemptions_are_counted_and_change_nothing(target: Remote) -> None:
    before = target.counters()["preemptions"]
    (alone,) = target.ask([Ask(PROMPT, max_tokens=20)])
    (again,) = target.ask([Ask(PROMPT, max_tokens=20)], preempt_every=6)
    assert again.token_ids == alone.token_ids
    assert target.counters()["preemptions"] == before + 3


def test_sampling_is_reproducible_by_seed(target: Remote) -> None:
    ask = Ask(PROMPT, temperature=2.0, seed=7)
    (one,), (same,), (other,) = (
        target.ask([ask]),
        target.ask([ask]),
        target.ask([Ask(PROMPT, temperature=2.0, seed=8)]),
    )
    assert one.token_ids == same.token_ids != other.token_ids


def test_a_mode_that_this_vllm_does_not_have_is_not_supported() -> None:
    with pytest.raises(ConfigError, match="mamba_cache_mode"):
        started(prefix="all")


@pytest.fixture(scope="module")
def exact(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Remote, ExactAnswers]]:
    folder = str(tmp_path_factory.mktemp("exact"))
    write_exact_checkpoint("mixed", folder)
    installed()
    target = vllm.KIND.start(folder, {"runner": "cpu", "prefix": "on", "chunk": "40"})
    yield target, ExactAnswers(folder)
    target.close()


def test_the_exact_model_inside_gives_its_oracles_tokens(
    exact: tuple[Remote, ExactAnswers],
) -> None:
    target, answers = exact
    requests = [Ask(PROMPT[i % 3 :], max_tokens=20 + i, step=3 * i) for i in range(6)]
    requests += [
        Ask(PROMPT[:1], max_tokens=9, step=4),
        Ask((*PROMPT, *PROMPT), max_tokens=5, step=20),
    ]
    expected = [answers.tokens(ask.prompt, ask.max_tokens) for ask in requests]
    for _ in range(2):
        found = target.ask(requests, preempt_every=30)
        assert [list(one.token_ids) for one in found] == expected
    assert target.counters()["hits"] > 0 and target.counters()["preemptions"] > 0


@pytest.mark.parametrize(
    ("model", "settings"),
    [
        ("window", {"prefix": "on", "retain": "32", "chunk": "40"}),
        (
            "window_drafter",
            {"runner": "v2", "spec": "mtp3", "prefix": "align", "retain": "all"},
        ),
    ],
    ids=["model", "drafter"],
)
def test_sliding_windows_give_their_oracles_tokens(
    model: str, settings: dict[str, str], tmp_path: Path
) -> None:
    """Prompts are longer than the windows, so that blocks are freed, and hits lack the first."""
    write_exact_checkpoint(model, tmp_path)
    installed()
    answers = ExactAnswers(tmp_path)
    requests = [Ask((*PROMPT[i % 3 :], *PROMPT), max_tokens=20 + i, step=3 * i) for i in range(6)]
    with closing(vllm.KIND.start(str(tmp_path), {"runner": "cpu", **settings})) as target:
        for _ in range(2):
            found = [list(one.token_ids) for one in target.ask(requests)]
            assert found == [answers.tokens(ask.prompt, ask.max_tokens) for ask in requests]
        assert target.counters()["hits"] > 0


def test_drafts_of_its_head_are_right_at_times_and_change_no_token(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_exact_checkpoint("mixed", tmp_path)
    monkeypatch.setattr(remote, "_loaders", {})
    remote.renew_loader("vllm", installed())  # as `--watch` does
    settings = {"runner": "cpu", "spec": "mtp3", "async": "on"}
    target, answers = vllm.KIND.start(str(tmp_path), settings), ExactAnswers(tmp_path)
    try:
        requests = [Ask(PROMPT[i % 3 :], max_tokens=20 + i, step=3 * i) for i in range(6)]
        found, counters = target.ask(requests), target.counters()
    finally:
        target.close()
        remote.end_loaders()
    assert [list(one.token_ids) for one in found] == [
        answers.tokens(ask.prompt, ask.max_tokens) for ask in requests
    ]
    assert 0.4 < counters["accepted"] / counters["drafts"] < 0.8


@pytest.mark.parametrize(
    ("model", "graph"), [("linear", "decode"), ("mixed", "full")], ids=["linear", "padded"]
)
def test_graphs_are_captured_and_their_padding_has_no_keys(
    model: str, graph: str, tmp_path: Path
) -> None:
    """11 tokens are padded to 16; the last row's 8 keys fill its blocks."""
    write_exact_checkpoint(model, tmp_path)
    installed()
    settings = {"runner": "v2", "graph": graph, "kernel": "4"}
    target, answers = vllm.KIND.start(str(tmp_path), settings), ExactAnswers(tmp_path)
    requests = [Ask(PROMPT[:length], max_tokens=6) for length in (3, 8)]
    try:
        found = target.ask(requests)
        replays = target.counters()["replays"]
    finally:
        target.close()
    assert [list(one.token_ids) for one in found] == [
        answers.tokens(ask.prompt, ask.max_tokens) for ask in requests
    ]
    assert replays > 0


@pytest.mark.parametrize("wrong", [0, 1])
def test_a_script_exits_with_what_the_answer_is(
    exact: tuple[Remote, ExactAnswers], wrong: int, tmp_path: Path
) -> None:
    rounds = (Round((Ask(PROMPT, max_tokens=4), Ask(PROMPT[:1], max_tokens=3, step=2))),)
    expected = exact[1].tokens(PROMPT[:1], 3)
    expected[-1] += wrong
    settings = {"runner": "cpu", "blocks": "tight", "kernel": "8"}
    case = ProbeCase(
        "vllm",
        "0.32.0",
        "exact",
        settings,
        "p",
        "wrong",
        rounds,
        1,
        tuple(expected),
        (),
        0.0,
        None,
        None,
        0.0,
    )
    *_, script = write_files(case, tmp_path, script_of(case))
    done = subprocess.run([installed(), script], capture_output=True, text=True, check=False)
    assert done.returncode == wrong, done.stderr
    assert "  step 3: request 0 1 tokens; request 1 (new) 1 tokens" in done.stdout.splitlines()


@pytest.mark.parametrize(
    ("model", "kernel", "said"),
    [("mixed", "own", ""), ("mixed", "4", "stands for 0 tokens"), ("window", "own", "")],
)
def test_the_sanitizer_names_the_first_wrong_read(
    model: str, kernel: str, said: str, tmp_path: Path
) -> None:
    write_exact_checkpoint(model, tmp_path)
    installed()
    settings = {"runner": "cpu", "prefix": "on", "chunk": "40", "kernel": kernel, "sanitize": "on"}
    with closing(vllm.KIND.start(str(tmp_path), settings)) as target:
        target.ask([Ask(PROMPT[i % 3 :], max_tokens=20 + i, step=3 * i) for i in range(6)])
        found = target.wrong_read()
    assert said in found and bool(said) == bool(found)


def test_an_engine_that_brings_no_token_is_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(vllm_case, "send", lambda *_: None)
    monkeypatch.setattr(vllm_case, "MOST_IDLE", 3)
    with pytest.raises(RuntimeError, match="1 requests run, and 3 steps bring no token"):
        vllm_case.play(SimpleNamespace(step=list), [{"prompt": [1], "max_tokens": 1}], 0)

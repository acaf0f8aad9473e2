"""vLLM in its own environment; what needs one is skipped where there is none."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from hybrid_kv.accuracy.guard_model import FOLDER
from hybrid_kv.config import ConfigError
from hybrid_kv.probes.registry import Round
from hybrid_kv.probes.reproducer import Case
from hybrid_kv.targets import ours, vllm
from hybrid_kv.targets.kinds import kind_of
from hybrid_kv.targets.remote import Remote, python_of
from hybrid_kv.targets.target import Ask
from hybrid_kv.targets.workers.vllm import MAX_MODEL_LEN, ROOM, arguments

PROMPT = tuple(1 + i * i % 89 for i in range(40))


def test_every_level_is_known_to_the_worker() -> None:
    plain = arguments({})
    assert plain == arguments({factor: levels[0] for factor, levels in vllm.factors.items()})
    for factor, levels in vllm.factors.items():
        for level in levels[1:]:
            assert arguments({factor: level}) != plain, f"{factor}={level}"


def test_levels_become_arguments() -> None:
    found = arguments({"prefix": "all", "spec": "mtp3", "chunk": "17", "match": "32", "retain": "all"})
    assert found["mamba_cache_mode"] == "all" and found["enable_prefix_caching"] is True
    assert found["speculative_config"] == {"method": "mtp", "num_speculative_tokens": 3}
    assert (found["max_num_batched_tokens"], found["prefix_match_unit"]) == (17, 32)
    assert found["prefix_cache_retention_interval"] is None
    assert (arguments({})["max_model_len"], arguments({"blocks": "tight"})["max_model_len"]) == (MAX_MODEL_LEN, ROOM)


@pytest.mark.parametrize("setting", [("prefix", "off3"), ("chunk", "small"), ("spec", "mtp"), ("scheme", "slots")])
def test_an_unknown_setting_is_refused(setting: tuple[str, str]) -> None:
    with pytest.raises(ValueError, match="is not a setting of vLLM"):
        arguments(dict([setting]))


def test_a_script_says_how_it_is_run() -> None:
    text = vllm.script(replace(case(Ask((1,))), model="lfm2:small")) or ""
    assert "hybrid-kv checkpoint lfm2 FOLDER --size small; python SCRIPT FOLDER." in text


def case(*asks: Ask, preempt_every: int = 0, expected: tuple[int, ...] = (5,), **settings: str) -> Case:
    said = "token 0 is 4; the oracle has 5"
    rounds = (Round(asks, preempt_every),)
    return Case("vllm", "0.32.0", str(FOLDER), settings, "drafts", said, rounds, 0, expected, (), 0.5, None, None, 1e-4)


@pytest.mark.parametrize("found", sorted(Path("examples/found").glob("vllm_*.py")), ids=lambda path: path.stem)
def test_scripts_have_one_heading_and_are_short(found: Path) -> None:
    text = found.read_text()
    assert vllm.HEADING in text
    assert len(text.splitlines()) - len(vllm.HEADING.splitlines()) <= 30


def test_a_script_asks_what_the_worker_asks() -> None:
    asks = Ask((1, 2), n=2, salt="a"), Ask((3,), temperature=1.0, seed=7, logprobs=True)
    text = vllm.script(case(*asks, prefix="on")) or ""
    assert "{'prompt_token_ids': [1, 2], 'cache_salt': 'a'}, {'max_tokens': 12, 'temperature': 1.0, 'top_k': 1" in text
    assert "{'max_tokens': 12, 'temperature': 1.0, 'seed': 7, 'logprobs': 5}" in text
    assert "'enable_prefix_caching': True" in text and vllm.HEADING in text
    assert len(text.splitlines()) - len(vllm.HEADING.splitlines()) <= 30


@pytest.mark.parametrize(
    "steered",
    [
        case(Ask((1,)), preempt_every=3),
        case(Ask((1,)), Ask((2,), after=1)),
        case(Ask((1,), abort_after=2)),
        case(Ask((1,)), blocks="tight"),
    ],
)
def test_what_vllm_alone_cannot_be_told_has_no_script(steered: Case) -> None:
    assert vllm.script(steered) is None


def started(**settings: str) -> Remote:
    installed()
    return vllm.start(str(FOLDER), settings)


def installed() -> str:
    try:
        return python_of("vllm", "vllm")
    except ConfigError as error:
        pytest.skip(str(error))


def test_a_script_ends_with_1_while_the_bug_lives(tmp_path: Path) -> None:
    """Drafts of a Mamba-2 hybrid: `examples/found/vllm_drafts_of_a_hybrid.py`."""
    python, ask = installed(), Ask(tuple(3 + i % 7 * 11 for i in range(60)))
    (right,) = ours.start(str(FOLDER), {}).ask([ask])
    file = tmp_path / "script.py"
    for spec, code in (("ngram3", 1), ("none", 0)):
        file.write_text(vllm.script(case(ask, expected=right.token_ids, spec=spec)) or "")
        ran = subprocess.run([python, file, FOLDER], capture_output=True, text=True, timeout=300)
        assert ran.returncode == code and f"expected {list(right.token_ids)}" in ran.stdout, ran.stderr[-2000:]


@pytest.fixture(scope="module")
def target() -> Iterator[Remote]:
    target = started(prefix="on", blocks="tight")
    yield target
    target.close()


def test_it_is_an_engine_of_the_guard() -> None:
    assert kind_of("vllm") is vllm  # type: ignore[comparison-overlap]


def test_a_request_is_answered_the_same_however_it_is_asked(target: Remote) -> None:
    (alone,) = target.ask([Ask(PROMPT, logprobs=True)])
    assert len(alone.token_ids) == 12
    assert all(
        max(one, key=one.__getitem__) == token for token, one in zip(alone.token_ids, alone.logprobs, strict=True)
    )
    asks = [
        Ask(PROMPT, max_tokens=30, abort_after=5),
        Ask(PROMPT, n=2),
        Ask(PROMPT, after=1),
        Ask((*PROMPT, *alone.token_ids), salt="a"),
        Ask((1,) * MAX_MODEL_LEN),
    ]
    aborted, several, late, _, too_long = target.ask(asks)
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


def test_a_text_is_scored_as_it_was_answered(target: Remote) -> None:
    (answer,) = target.ask([Ask(PROMPT, logprobs=True)])
    scores = target.score([*PROMPT, *answer.token_ids])
    assert len(scores) == len(PROMPT) + len(answer.token_ids) - 1
    said = [one[token] for token, one in zip(answer.token_ids, answer.logprobs, strict=True)]
    assert scores[-len(said) :] == pytest.approx(said, abs=1e-4)
    target.reset()


def test_sampling_is_reproducible_by_seed(target: Remote) -> None:
    ask = Ask(PROMPT, temperature=2.0, seed=7)
    (one,), (same,), (other,) = target.ask([ask]), target.ask([ask]), target.ask([Ask(PROMPT, temperature=2.0, seed=8)])
    assert one.token_ids == same.token_ids != other.token_ids


def test_a_mode_that_this_vllm_does_not_have_cannot_be_asked() -> None:
    with pytest.raises(ConfigError, match="mamba_cache_mode"):
        started(prefix="all")

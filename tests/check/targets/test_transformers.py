"""transformers as an engine: its caches, batches and drafts, its refusals, its errors."""

from __future__ import annotations

from pathlib import Path

import pytest

from hybrid_kv.check.probes.judge import Judge
from hybrid_kv.check.probes.oracle import Oracle
from hybrid_kv.check.targets.target import Answer, Ask
from hybrid_kv.check.targets.transformers import Transformers
from hybrid_kv.config import ConfigError
from hybrid_kv.models.random_checkpoint import write_checkpoint
from tests.check.targets.models import PROMPTS, Hybrid, check_logprobs, continued


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"batch": "left"},
        {"cache": "static", "batch": "left"},
        {"chunk": "17"},
        {"spec": "lookup3"},
    ],
    ids=lambda settings: "-".join(settings.values()) or "plain",
)
def test_answers_are_those_of_the_whole_text(hybrid: Hybrid, settings: dict[str, str]) -> None:
    folder, model = hybrid
    answers = Transformers(folder, settings).ask([Ask(prompt) for prompt in PROMPTS])
    assert [answer.token_ids for answer in answers] == [
        continued(model, prompt) for prompt in PROMPTS
    ]


@pytest.mark.parametrize("cache", ["dynamic", "static"])
def test_a_second_turn_goes_on_with_the_cache_of_the_first(hybrid: Hybrid, cache: str) -> None:
    folder, model = hybrid
    target = Transformers(folder, {"prefix": "kept", "cache": cache})
    (first,) = target.ask([Ask(PROMPTS[0])])
    again = (*PROMPTS[0], *first.token_ids, 5, 6, 7)
    (second,) = target.ask([Ask(again)])
    assert second.token_ids == continued(model, again)
    # The answer's last token was drawn, not computed with.
    assert second.cached_tokens == target.counters()["hits"] == len(PROMPTS[0]) + 11
    target.reset()
    assert target.ask([Ask(again)])[0].cached_tokens == 0


def test_a_second_turn_of_a_model_without_attention(tmp_path: Path) -> None:
    """Its cache has another name."""
    model = write_checkpoint("mamba2", tmp_path)
    target = Transformers(str(tmp_path), {"prefix": "kept"})
    (first,) = target.ask([Ask(PROMPTS[1])])
    again = (*PROMPTS[1], *first.token_ids, 5, 6, 7)
    (second,) = target.ask([Ask(again)])
    assert (second.token_ids, second.cached_tokens) == (
        continued(model, again),
        len(PROMPTS[1]) + 11,
    )


def judged(folder: str, settings: dict[str, str]) -> tuple[list[Answer], list[str]]:
    judge = Judge(Oracle(folder))
    judge.oracle.rounds(PROMPTS[0])
    answers = Transformers(folder, settings).ask([Ask(prompt) for prompt in PROMPTS])
    return answers, [
        judge.judge(Ask(prompt), one, None).verdict
        for prompt, one in zip(PROMPTS, answers, strict=True)
    ]


def test_a_search_is_judged_by_its_log_probabilities(
    hybrid: Hybrid, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, model = hybrid
    answers, verdicts = judged(folder, {"beams": "4"})
    assert verdicts == ["right"] * 4 and all(len(answer.logprobs) == 12 for answer in answers)
    assert [answer.token_ids for answer in answers] != [
        continued(model, prompt) for prompt in PROMPTS
    ]
    # Beams that go on with the cache of another one.
    monkeypatch.setattr("transformers.Cache.reorder_cache", lambda self, beam_idx: None)
    assert "wrong" in judged(folder, {"beams": "4"})[1]


def test_log_probabilities_are_those_of_the_whole_text(hybrid: Hybrid) -> None:
    folder, model = hybrid
    target = Transformers(folder, {})
    (answer,) = target.ask([Ask(PROMPTS[0], logprobs=True)])
    check_logprobs(model, answer)


def test_a_seed_repeats_a_draw(hybrid: Hybrid) -> None:
    requests = [Ask(PROMPTS[0], temperature=1.0, seed=seed, n=2) for seed in (7, 7, 8)]
    first, again, other = Transformers(hybrid[0], {}).ask(requests)
    assert (first.token_ids, first.others) == (again.token_ids, again.others)
    assert first.token_ids not in (*first.others, other.token_ids)


def test_what_transformers_refuses_is_one_line(hybrid: Hybrid, tmp_path: Path) -> None:
    folder, _ = hybrid
    with pytest.raises(ConfigError, match="Invalid layer type: conv"):
        Transformers(folder, {"batch": "continuous"})
    with pytest.raises(ConfigError, match="use batch=one"):
        Transformers(folder, {"batch": "left", "prefix": "kept"})
    with pytest.raises(ConfigError, match="a search has no drafts"):
        Transformers(folder, {"beams": "4", "prefix": "kept"})
    with pytest.raises(ConfigError, match="does not load"):
        Transformers(str(tmp_path), {})


def test_an_error_of_one_request_is_its_answer(hybrid: Hybrid) -> None:
    bad, good = Transformers(hybrid[0], {}).ask([Ask((5, 100_000)), Ask(PROMPTS[1])])
    assert bad.error.startswith("IndexError") and not bad.token_ids
    assert good.token_ids == continued(hybrid[1], PROMPTS[1])

"""mlx-lm in its own environment: its caches, its batches, its drafts, and what it refuses."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from hybrid_kv.check.targets.mlx import KIND
from hybrid_kv.check.targets.target import Ask, Target
from hybrid_kv.check.targets.workers.mlx import KeptCaches, as_on_the_hub
from hybrid_kv.config import ConfigError
from hybrid_kv.models.random_checkpoint import write_checkpoint
from tests.check.targets.models import PROMPTS, Hybrid, check_logprobs, continued, installed

Prompt = tuple[int, ...]
Turns = tuple[list[Prompt], list[Prompt], dict[Prompt, Prompt]]
Start = Callable[..., Target]


@pytest.fixture(scope="module", autouse=True)
def mlx() -> None:
    installed("mlx", "mlx_lm")


@pytest.fixture
def started(request: pytest.FixtureRequest) -> Start:
    def start(folder: str | Path, **settings: str) -> Target:
        target = KIND.start(str(folder), settings)
        request.addfinalizer(target.close)
        return target

    return start


@pytest.fixture(scope="module")
def turns(hybrid: Hybrid) -> Turns:
    """Requests of two turns and their answers."""
    known = {prompt: continued(hybrid[1], prompt) for prompt in PROMPTS}
    second = [(*prompt, *answer, 5, 6, 7) for prompt, answer in known.items()]
    return PROMPTS, second, known | {prompt: continued(hybrid[1], prompt) for prompt in second}


@pytest.mark.parametrize(
    ("prefix", "batch"),
    [
        ("off", "together"),
        ("kept", "one"),
        ("saved", "together"),
        ("lru", "one"),
        ("lru", "together"),
    ],
)
def test_a_second_turn_goes_on_with_the_cache_of_the_first(
    hybrid: Hybrid, started: Start, turns: Turns, prefix: str, batch: str
) -> None:
    target = started(hybrid[0], prefix=prefix, batch=batch, chunk="17")
    first, second, expected = turns
    for prompts in (first, second):
        answers = target.ask([Ask(prompt) for prompt in prompts])
        assert [answer.token_ids for answer in answers] == [expected[prompt] for prompt in prompts]
    assert all((answer.cached_tokens > 0) == (prefix != "off") for answer in answers)
    assert (target.counters()["hits"] > 0) == (prefix != "off")
    target.reset()
    assert target.ask([Ask(second[0])])[0].cached_tokens == 0


@pytest.fixture(scope="module")
def plain(hybrid: Hybrid) -> Iterator[Target]:
    target = KIND.start(str(hybrid[0]), {})
    yield target
    target.close()


def test_log_probabilities_are_those_of_transformers(hybrid: Hybrid, plain: Target) -> None:
    model, target = hybrid[1], plain
    (answer,) = target.ask([Ask(PROMPTS[0], logprobs=True)])
    check_logprobs(model, answer)


@pytest.mark.parametrize("batch", ["one", "together"])
def test_an_aborted_request_ends_and_leaves_the_others_alone(
    hybrid: Hybrid, started: Start, turns: Turns, batch: str
) -> None:
    target = started(hybrid[0], prefix="lru", batch=batch)
    prompts, _, expected = turns
    requests = [Ask(prompts[0], abort_after=3), Ask(prompts[1]), Ask(prompts[0], after=2)]
    aborted, other, again = target.ask(requests)
    assert aborted.token_ids == expected[prompts[0]][:3]
    assert other.token_ids == expected[prompts[1]]
    assert again.token_ids == expected[prompts[0]] or again.error


def test_what_mlx_lm_refuses_is_one_line(hybrid: Hybrid, started: Start, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="can be trimmed, not with ArraysCache, KVCache"):
        started(hybrid[0], spec="draft2")
    write_checkpoint("zamba2", tmp_path)
    with pytest.raises(ConfigError, match="Model type zamba2 not supported"):
        started(tmp_path)


def test_a_seed_repeats_a_draw(plain: Target) -> None:
    answers = plain.ask([Ask(PROMPTS[0], temperature=1.0, seed=seed) for seed in (7, 7, 8)])
    assert answers[0].token_ids == answers[1].token_ids != answers[2].token_ids


def test_a_kept_cache_serves_only_what_begins_with_it() -> None:
    kept = KeptCaches()
    kept.give([1, 2, 3], "a")
    assert kept.take([1, 2, 4, 5]) == (None, 0)
    assert kept.take([1, 2, 3]) == (None, 0), "something must be left to compute"
    assert kept.take([1, 2, 3, 4]) == ("a", 3)
    assert kept.take([1, 2, 3, 4]) == (None, 0), "it has been gone on with"


def test_infinity_is_a_number_again() -> None:
    limit = [0.0, {"__float__": "Infinity"}]
    config = {"model_type": "mamba2", "expand": 2, "hidden_size": 8, "time_step_limit": limit}
    assert as_on_the_hub(config)["time_step_limit"] == [0.0, float("inf")]

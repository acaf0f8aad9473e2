"""`python -m bench.peers.hits`: this engine's prefix hits next to another engine's."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
import pytest

from bench.peers.hits import (
    LONGEST,
    SETTINGS,
    AnsweringModel,
    Prompts,
    compare_hits,
    options_of,
    settings_of,
)
from hybrid_kv.check.targets.exact import ExactAnswers, model_of
from hybrid_kv.check.targets.kinds import for_model, kind_of, model_folder
from hybrid_kv.check.targets.ours import Ours
from hybrid_kv.check.targets.remote import python_of
from hybrid_kv.check.targets.target import Answer, Ask
from hybrid_kv.config import ConfigError, HybridKVError
from hybrid_kv.engine.llm import LLM

PLAIN = {"retain": "last", "chunk": "40"}


@pytest.fixture(scope="module")
def folder() -> Iterator[str]:
    with model_folder("exact:mixed") as folder:
        yield folder


def engine(folder: str, **changes: str) -> Ours:
    settings = PLAIN | changes
    model = AnsweringModel(model_of(folder).config)
    return Ours(folder, settings, LLM(model, **options_of(settings)))


def test_prompts_of_a_seed_are_the_same_and_short_enough() -> None:
    drawn = []
    for _ in range(2):
        prompts = Prompts(np.random.default_rng(3))
        drawn.append([])
        for _ in range(60):
            text = prompts.draw()
            prompts.add((*text, 7, 8))
            drawn[-1].append(text)
    assert drawn[0] == drawn[1]
    assert all(2 <= len(text) <= LONGEST for text in drawn[0])
    continued = [text for text in drawn[0] if text[-2:] == (7, 8)]
    assert len({*drawn[0]}) < 60 and continued


def test_equal_engines_hit_the_same(folder: str) -> None:
    differences, num_cached = compare_hits(
        engine(folder), engine(folder), ExactAnswers(folder), num_prompts=25, seed=1
    )
    assert not differences and num_cached > 500


def test_an_engine_that_keeps_other_states_is_reported(folder: str) -> None:
    differences, _ = compare_hits(
        engine(folder, retain="last"),
        engine(folder, retain="all"),
        ExactAnswers(folder),
        num_prompts=25,
        seed=1,
    )
    first = differences[0]
    assert first.ours < first.theirs < first.num_tokens and first.theirs % 16 == 0
    assert str(first).endswith(f"{first.ours} here, {first.theirs} there")


def test_a_wrong_answer_ends_it(folder: str) -> None:
    class Wrong(Ours):
        name = "wrong"

        def ask(self, requests: Sequence[Ask], preempt_every: int = 0) -> list[Answer]:
            return [Answer((0,), 0)]

    right = engine(folder)
    with pytest.raises(HybridKVError, match="prompt 0 in wrong"):
        compare_hits(right, Wrong(folder, PLAIN, right.llm), ExactAnswers(folder), 3, 1)


def test_settings_are_factors_with_levels_that_this_engine_has() -> None:
    for settings in settings_of(SETTINGS):
        assert options_of(settings)["mamba_cache_mode"] == "align"
    assert options_of({"retain": "48"})["prefix_cache_retention_interval"] == 48
    assert options_of({"match": "8"})["prefix_match_unit"] == 8
    with pytest.raises(ConfigError, match="chunk"):
        next(settings_of(["chunk"]))
    with pytest.raises(ConfigError, match="spec=mtp9"):
        options_of({"spec": "mtp9"})


@pytest.mark.parametrize(
    "setting",
    ["retain=last chunk=40", "retain=48 chunk=whole", "retain=last chunk=whole match=8"],
)
def test_vllm_hits_the_same(folder: str, setting: str) -> None:
    try:
        python_of("vllm", "vllm")
    except ConfigError as error:
        pytest.skip(str(error))
    (settings,) = settings_of([setting])
    kind = for_model(kind_of("vllm"), folder)
    theirs = kind.start(folder, {"runner": "cpu", "prefix": "align", **settings})
    try:
        differences, num_cached = compare_hits(
            engine(folder, **settings), theirs, ExactAnswers(folder), num_prompts=40, seed=0
        )
    finally:
        theirs.close()
    assert not differences and num_cached > 1000

"""Scenarios are reproducible, and the settings of a run cover each other."""

from __future__ import annotations

from itertools import combinations, product

import numpy as np
import pytest
import torch

from hybrid_kv.check.guard.forced import FORCED, Draw
from hybrid_kv.check.guard.play import run_scenario
from hybrid_kv.check.guard.scenario import (
    Disturbance,
    ScriptedProposer,
    answer_book,
    drawn,
    num_states,
)
from hybrid_kv.check.guard.traffic import (
    CHANCES,
    FACTORS,
    SCENARIOS_PER_RUN,
    SEEDS_PER_BATCH,
    TRIPLES,
    allowed,
    combinations_of,
    design,
    draw_features,
    draw_scenario,
    draw_swarm_scenario,
    draw_trio,
    has_levels,
    required_combinations,
    rows_with,
)
from hybrid_kv.engine import runner
from hybrid_kv.sampling import SamplingParams, token_logprobs
from tests.draws import sampled


@pytest.mark.parametrize("seed", [0, 40, 500, 3 * SCENARIOS_PER_RUN + 77])
def test_a_seed_is_a_scenario(seed: int) -> None:
    assert draw_scenario(seed) == draw_scenario(seed)
    assert draw_scenario(seed) != draw_scenario(seed + SCENARIOS_PER_RUN)


def test_the_design_covers_what_is_required_and_nothing_else_is_left_out() -> None:
    covered = set().union(*map(combinations_of, design()))
    assert covered >= required_combinations()
    assert all(allowed(cell) and set(cell) == set(FACTORS) for cell in design())
    impossible = {
        chosen
        for names in [*combinations(FACTORS, 2), *combinations(TRIPLES, 3)]
        for levels in product(*(FACTORS[name] for name in names))
        if (chosen := tuple(zip(names, levels, strict=True))) not in required_combinations()
    }
    hybrid = [layers for layers in FACTORS["layers"] if num_states(layers)]
    lone = [layers for layers in FACTORS["layers"] if not num_states(layers)]
    assert impossible == {
        *((("mode", "attention"), ("layers", layers)) for layers in hybrid),
        *((("mode", mode), ("layers", layers)) for mode in ("align", "all") for layers in lone),
        *((("drafts", script), ("K", 0)) for script in FACTORS["drafts"] if script != "none"),
        (("mode", "none"), ("offload", "host")),
        (("layers", "MM"), ("split", "several")),
        (("backend", "TORCH"), ("split", "several")),
        (("backend", "FLASH_ATTN"), ("split", "several")),
        *(
            (*layers, ("scheme", "recompute"))
            for layers in [(("mode", "attention"),), *((("layers", name),) for name in lone)]
        ),
        *(
            (("mode", "attention"), (name, level), ("scheme", "recompute"))
            for name in set(TRIPLES) - {"mode", "scheme"}
            for level in FACTORS[name]
        ),
    }


def test_the_rows_with_a_level_try_all_that_goes_with_it() -> None:
    levels = {"mode": "align", "scheme": "recompute"}
    rows = rows_with(levels)
    cells = [draw_scenario(number).cell for number in rows]
    assert len(rows) > 5 and all(has_levels(cell, levels) for cell in cells)
    rest = [cell for number, cell in enumerate(design(), len(FORCED)) if number not in rows]
    assert not any(has_levels(cell, levels) for cell in rest)


def test_the_trio_differs_in_drafts_and_cache_only() -> None:
    both, undrafted, uncached = draw_trio(7)
    assert both.prompts == undrafted.prompts == uncached.prompts
    assert undrafted.options["num_speculative_tokens"] == 0 < both.options["num_speculative_tokens"]
    assert both.options["enable_prefix_caching"] and not uncached.options["enable_prefix_caching"]


@pytest.mark.parametrize(
    "script", ["right", "wrong", "mixed", "ragged", "boundary", "beyond", "rotate"]
)
def test_drafts_are_a_pure_function_and_right_as_far_as_scripted(script: str) -> None:
    sequence = np.random.default_rng(2).integers(0, 97, 60).tolist()
    proposer = ScriptedProposer(script, 5, [sequence] * 3, [9] * 3, 8, 97)
    for n in range(10, 50):
        drafts = proposer.drafts(2, n)
        assert drafts == proposer.drafts(2, n)
        right = next((j for j, token in enumerate(drafts) if token != sequence[n + j]), len(drafts))
        to_boundary = -n % 8
        due = {
            "right": 5,
            "wrong": 0,
            "boundary": to_boundary,
            "beyond": to_boundary + 1,
            "rotate": 2,
        }.get(script)
        if due is not None:
            assert (len(drafts), right) == (5, min(5, due))
        if script == "ragged":
            assert right == len(drafts)


def test_answers_are_computed_once_and_cut() -> None:
    book = answer_book("M*")
    whole = book.without_stop([1, 2, 3], SamplingParams(max_tokens=9), 64)
    assert book.without_stop([1, 2, 3], SamplingParams(max_tokens=4), 64) == whole[:4]
    assert (
        book.answer([1, 2, 3], SamplingParams(max_tokens=9, stop_token_ids=(whole[2],)), 64)[-1]
        == whole[2]
    )
    assert book.answer([1, 2, 3], SamplingParams(max_tokens=9), 5) == whole[:2]
    assert book.answer([1] * 5, SamplingParams(max_tokens=9), 5) == []
    sampled = SamplingParams(max_tokens=9, temperature=2e8, seed=3)
    assert book.without_stop([1, 2, 3], sampled, 64) != whole


@pytest.mark.parametrize(("top_k", "top_p"), [(0, 1.0), (5, 1.0), (0, 0.6), (5, 0.6)])
def test_the_oracle_draws_as_the_engine_does(top_k: int, top_p: float) -> None:
    logits = np.random.default_rng(top_k).integers(0, 2**31 - 1, size=(40, 97))
    params = SamplingParams(temperature=2e8, top_k=top_k, top_p=top_p, seed=-7)
    own = [drawn(row, params, place) for place, row in enumerate(logits)]
    assert own == sampled(torch.from_numpy(logits), [params] * 40, [-7] * 40, range(40))


def test_wrong_log_probabilities_break_a_rule(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        runner, "token_logprobs", lambda logits, *rest: token_logprobs(logits / 2e8, *rest)
    )
    scenario = FORCED["mixed_sampling, top_k_beside_top_p, logprobs_of_sampled, prompt_logprobs"]
    assert {one.rule for one in run_scenario(scenario(Draw(3))).wrong} == {"logprobs"}


def test_events_are_due_once_or_again() -> None:
    assert [step for step in range(12) if Disturbance("evict", 3).is_due(step)] == [3]
    assert [step for step in range(12) if Disturbance("preempt", 3, 4).is_due(step)] == [3, 7, 11]


def test_a_batch_of_a_swarm_has_half_of_the_features() -> None:
    features = [draw_features(batch) for batch in range(200)]
    for name, levels in FACTORS.items():
        kept = np.mean([len(one.levels[name]) / len(levels) for one in features])
        assert 0.4 < kept < 0.8, name  # above half, since a factor keeps a level at least
    for name in CHANCES:
        assert {one.chances[name] for one in features} == {0.0, min(1.0, 2 * CHANCES[name])}
    assert draw_features(7) == features[7] != features[8]


def test_a_seed_of_a_swarm_has_the_features_of_its_batch() -> None:
    for seed in range(0, 16 * SEEDS_PER_BATCH, 5):
        scenario, features = draw_swarm_scenario(seed), draw_features(seed // SEEDS_PER_BATCH)
        assert scenario == draw_swarm_scenario(seed) and allowed(scenario.cell)
        assert all(scenario.cell[name] in features.levels[name] for name in FACTORS)
        assert features.chances["stop"] or not any(
            params.stop_token_ids for params in scenario.params
        )
        happened = {event.what for event in scenario.events}
        assert features.chances["reset"] or "reset" not in happened
        assert features.chances["abort"] or not happened & {"abort", "drop"}

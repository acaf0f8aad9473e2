"""A plan that wastes or lacks something is seen; none is wrong as they are."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise
from typing import Any

import numpy as np
import pytest

from hybrid_kv.cache import capacity as counting
from hybrid_kv.cache import plan as planning
from hybrid_kv.cache.capacity import block_steps, capacity
from hybrid_kv.cache.modes import MODES
from hybrid_kv.cache.plan import _num_blocks, describe
from hybrid_kv.cache.ranks import Ranks
from hybrid_kv.cache.spec import group_layers
from hybrid_kv.guard import plan_figures
from hybrid_kv.guard.checks import plan as checked
from hybrid_kv.guard.checks.plan import check_plan
from hybrid_kv.guard.registry import Run
from hybrid_kv.kernels.common.integers import cdiv


@pytest.mark.parametrize("seed", [0, 1])
def test_plans_are_the_shortest_and_fill_their_memory(seed: int) -> None:
    (result,) = check_plan(Run(60, seed))
    assert result.passed, result.detail
    assert result.n == 60


@pytest.mark.parametrize(
    ("name", "broken", "detail"),
    [
        (
            "_num_blocks",
            lambda rank, cache, rows: cache.num_blocks or cache.memory_bytes // 2 // rank.block_bytes,
            "take",
        ),
        ("group_layers", lambda specs: group_layers(dict([*specs.items()][:-1]) or specs), "groups"),
        ("cdiv", lambda a, b: 2 * -(-a // b), "they are multiples of"),
        ("DEFAULT_BLOCK_SIZE", 17, "they are multiples of"),
        ("smallest", lambda size: 1, "it must be refused because 'block size"),
    ],
)
def test_a_plan_that_is_off_is_seen(monkeypatch: pytest.MonkeyPatch, name: str, broken: Any, detail: str) -> None:
    monkeypatch.setattr(planning, name, broken)
    (result,) = check_plan(Run(60))
    assert not result.passed
    assert detail in result.detail


def test_a_capacity_that_no_manager_has_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(planning.CachePlan, "token_capacity", property(lambda plan: 2 * plan.longest_request))
    (result,) = check_plan(Run(60))
    assert "requests of" in result.detail


@pytest.mark.parametrize(
    ("name", "broken", "detail"),
    [
        ("block_steps", lambda *given: block_steps(*given) + 1, "tokens hold"),
        ("capacity", lambda *given: replace(found := capacity(*given), num_fit=found.num_fit + 1), "blocks take"),
    ],
)
def test_requests_that_are_counted_wrong_are_seen(
    monkeypatch: pytest.MonkeyPatch, name: str, broken: Any, detail: str
) -> None:
    monkeypatch.setattr(checked, name, broken)
    (result,) = check_plan(Run(10))
    assert detail in result.detail


def test_requests_that_are_not_cut_at_the_limit_are_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checked, "capacity", lambda config, *lengths: capacity(config, *lengths[:2], 10**6, lengths[3]))
    (result,) = check_plan(Run(10))
    assert "num_refused=0" in result.detail


def test_ranks_that_divide_by_nothing_are_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Ranks, "__post_init__", lambda ranks: None)
    (result,) = check_plan(Run(10))
    assert "tensor_parallel=0" in result.detail and "is not refused" in result.detail


def test_a_figure_that_is_not_the_plans_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plan_figures, "describe", lambda plan: describe(plan) | {"ring_rows": 9})
    (result,) = check_plan(Run(10))
    assert "ring_rows 9, not" in result.detail


@pytest.mark.parametrize(
    ("name", "broken", "detail"),
    [
        ("MUCH_PADDING", 2.0, "it says ["),
        ("over_context", lambda config, ranks: config, "blocks_per_request"),
        ("_notes", lambda plan, cache: [], "it says ["),
        ("_num_blocks", lambda rank, cache, rows: _num_blocks(rank, cache, 0), "is not refused"),
        ("_num_blocks", lambda rank, cache, rows: _num_blocks(rank, cache, rows) - 1, "one of them the null block"),
    ],
)
def test_notes_and_refusals_that_are_not_due_are_seen(
    monkeypatch: pytest.MonkeyPatch, name: str, broken: Any, detail: str
) -> None:
    monkeypatch.setattr(planning, name, broken)
    wrong = [error for seed in range(60) for error in plan_figures.figures(np.random.default_rng(seed))]
    assert any(detail in error for error in wrong)


def test_layers_that_are_dealt_from_the_front_are_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    def stages(ranks: Ranks, num_layers: int) -> list[range]:
        ends = [cdiv(num_layers * i, ranks.pipeline_parallel) for i in range(ranks.pipeline_parallel + 1)]
        return [range(*both) for both in pairwise(ends)]

    monkeypatch.setattr(Ranks, "stages", stages)
    (result,) = check_plan(Run(10))
    assert "stages: [range" in result.detail


def test_states_that_are_given_back_sooner_than_counted_are_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        counting, "_given_back", lambda spec, computed: spec.mode.first_needed(computed, spec.block_size)
    )
    (result,) = check_plan(Run(10))
    assert "replay, " in result.detail


def test_delta_nets_on_an_xpu_that_lack_their_64_tokens_are_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(planning, "GDNBackend", None)
    (result,) = check_plan(Run(60))
    assert "on xpu" in result.detail and "they are multiples of" in result.detail


def test_states_alone_in_blocks_of_another_size_are_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(type(MODES["none"]), "lone_block_size", lambda mode, given, chunk, longest: longest)
    (result,) = check_plan(Run(60))
    assert "states alone" in result.detail

"""A plan that wastes or lacks something is seen; none is wrong as they are."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from hybrid_kv.cache import plan as planning
from hybrid_kv.cache.capacity import block_steps, capacity
from hybrid_kv.cache.spec import group_layers
from hybrid_kv.guard.checks import plan as checked
from hybrid_kv.guard.checks.plan import check_plan
from hybrid_kv.guard.registry import Run


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
        ("group_layers", lambda specs: group_layers(dict(list(specs.items())[:-1])), "groups"),
        ("cdiv", lambda a, b: 2 * -(-a // b), "they are multiples of"),
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

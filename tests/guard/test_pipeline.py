"""A pipeline whose schedule is broken on purpose."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from hybrid_kv.config import SchedulerConfig
from hybrid_kv.engine.scheduler import Scheduler
from hybrid_kv.guard.play import run_scenario
from hybrid_kv.guard.scenario import Scenario
from hybrid_kv.request import Request
from tests.guard.test_observer import scenario


def pipeline(num_stages: int) -> Scenario:
    """Three prompts in four rows, all of them in one step if it were free to; twice."""
    return scenario("none", max_num_batched_tokens=80, pipeline_parallel_size=num_stages)


def broken(num_stages: int) -> str:
    (failure,) = run_scenario(pipeline(num_stages)).wrong
    return str(failure)


@pytest.mark.parametrize("num_stages", [2, 3, 4])
def test_one_that_is_right_has_steps_beside_each_other_and_empty_ones(num_stages: int) -> None:
    result = run_scenario(pipeline(num_stages))
    assert result.wrong == []
    assert result.seen["several_under_way"]
    assert result.seen["bubble"]  # at the latest when one request is left


def test_a_request_in_two_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    next_of: Callable[..., Any] = Scheduler._next

    def again(self: Scheduler, request: Request, *arguments: Any) -> Any:
        flight, request.in_flight = request.in_flight, None
        item = next_of(self, request, *arguments)
        request.in_flight = flight
        return item

    monkeypatch.setattr(Scheduler, "_next", again)
    assert "of another step" in broken(2)


def test_a_step_with_more_than_its_share(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(SchedulerConfig, "max_num_seqs_per_step", property(lambda config: config.max_num_seqs))
    assert "a step of 3 requests, 2 at most" in broken(2)


def test_a_request_that_waits_though_a_stage_is_empty(monkeypatch: pytest.MonkeyPatch) -> None:
    admit: Callable[..., Any] = Scheduler._admit

    def in_turn(self: Scheduler, *arguments: Any) -> Any:
        return None if any(one.in_flight is not None for one in self.running) else admit(self, *arguments)

    monkeypatch.setattr(Scheduler, "_admit", in_turn)
    assert "left-waiting" in broken(2)


def test_an_empty_step_that_somebody_could_run_in(monkeypatch: pytest.MonkeyPatch) -> None:
    next_of: Callable[..., Any] = Scheduler._next

    def together(self: Scheduler, *arguments: Any) -> Any:
        return None if any(one.in_flight is not None for one in self.running) else next_of(self, *arguments)

    monkeypatch.setattr(Scheduler, "_next", together)
    assert "were left out of a step that is empty" in broken(3)

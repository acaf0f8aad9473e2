"""The section ends at the first failure, counts what it ran, and is void if too little ran."""

from __future__ import annotations

import pytest

from hybrid_kv.check.guard.checks.exact_model import check_exact_model
from hybrid_kv.check.guard.forced import FORCED
from hybrid_kv.check.guard.registry import Run
from hybrid_kv.check.guard.run import amounts
from hybrid_kv.check.guard.traffic import SCENARIOS_PER_RUN, draw_scenario, rows_with
from hybrid_kv.engine import runner


def test_the_first_failure_is_counted_and_can_end_the_section(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(runner, "postprocess_mamba", lambda *_: None)
    unlike, *others = check_exact_model(Run(60))
    requests = unlike.metrics["requests_to_failure"]
    assert len(others) == 2 and 0 < requests < unlike.n and 0 < unlike.failed_after < unlike.seconds
    (first,) = check_exact_model(Run(60, fail_fast=True))
    assert first.n == requests == first.metrics["requests_to_failure"] and not first.passed


def test_settings_that_exclude_each_other_are_void() -> None:
    unlike, settings = check_exact_model(Run(20, only={"mode": "attention", "scheme": "recompute"}))
    assert unlike.n == 0 and not settings.passed and settings.detail.startswith("void: no row")


def test_a_run_without_a_pattern_is_void() -> None:
    _, patterns, settings = check_exact_model(Run(20))
    assert not patterns.passed and patterns.detail.startswith("void: never happened: ")
    assert not settings.passed and settings.detail.startswith("void: ")


@pytest.mark.parametrize("seed", [0, 2, 7302])
def test_every_guard_has_room_for_all_rows_of_the_design(seed: int) -> None:
    """Else it is void with that seed, though nothing is wrong."""
    first = seed * SCENARIOS_PER_RUN
    numbers = range(len(rows_with({})) + len(FORCED))
    needed = sum(draw_scenario(first + number).num_requests for number in numbers)
    assert needed <= min(amounts("quick")["exact model"], amounts("full")["exact model"])

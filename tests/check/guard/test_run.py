"""Sections side by side, in turn, and no further than the first failure."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace
from multiprocessing import active_children

import pytest

import hybrid_kv.measure.guard_checks  # noqa: F401  (registers them)
from hybrid_kv.check.guard import run as module
from hybrid_kv.check.guard.registry import CHECKS, CheckResult, Run, load_checks
from hybrid_kv.check.guard.report import document, first_failure, print_closing
from hybrid_kv.check.guard.run import GuardRunOptions, run_guard

FEW = {"exact model": 2, "costs": 1, "eviction": 1}


def test_processes_change_when_a_section_runs_and_nothing_else() -> None:
    one, two = (
        [
            replace(line, seconds=0.0, failed_after=None)
            for line in run_guard(FEW, GuardRunOptions(3, progress=False, jobs=jobs))
        ]
        for jobs in (1, 2)
    )
    assert one == two and [line.section for line in one].count("exact model") == 4


def result(name: str, failed_after: float | None = None) -> Callable[[Run], list[CheckResult]]:
    detail = "" if failed_after is None else "it is wrong"
    return lambda run: [
        CheckResult("toy", 0, "settings", "0", 1, detail, section=name, failed_after=failed_after)
    ]


@pytest.fixture
def toys(monkeypatch: pytest.MonkeyPatch) -> dict[str, int]:
    """Three sections; the second one fails, and knew it after a quarter of a second."""
    load_checks()
    functions = {"exact model": result("exact model"), "costs": result("costs", failed_after=0.25)}
    functions["accuracy"] = result("accuracy", failed_after=9.0)
    for section, function in functions.items():
        monkeypatch.setitem(CHECKS, section, replace(CHECKS[section], function=function))
    return dict.fromkeys(functions, 1)


def test_the_first_failure_is_a_metric(
    toys: dict[str, int], capsys: pytest.CaptureFixture[str]
) -> None:
    results = run_guard(toys, GuardRunOptions(seed=0, progress=False, jobs=1))
    first = first_failure(results)
    assert first is not None and first["section"] == "costs" and 0.25 <= first["seconds"] < 0.5
    assert document(results, 0, {})["first_failure"] == first
    print_closing(results)
    assert f"first failure: costs, after {first['seconds']:.1f} s\n" in capsys.readouterr().out
    assert first_failure(results[:1]) is None


def test_a_guard_that_fails_fast_runs_no_section_behind_the_failure(toys: dict[str, int]) -> None:
    assert [one.section for one in run_guard(toys, GuardRunOptions(0, progress=False, jobs=1))] == [
        "exact model",
        "costs",
        "accuracy",
    ]
    found = run_guard(toys, GuardRunOptions(0, progress=False, jobs=1, fail_fast=True))
    assert [one.section for one in found] == ["exact model", "costs"]


def test_workers_end_at_once_after_an_interrupt() -> None:
    before = set(active_children())
    with pytest.raises(KeyboardInterrupt), module.worker_pool(2, load_checks()) as pool:
        assert pool is not None
        pool.submit(time.sleep, 600)
        started = set(active_children()) - before
        raise KeyboardInterrupt
    for child in started:
        child.join(60)
    assert started and all(child.exitcode not in (None, 0) for child in started)

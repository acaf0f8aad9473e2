"""A check is one file: it is found by being there, and runs, prints and counts like the others."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path

import pytest

import hybrid_kv.measure.guard_checks  # noqa: F401  (registers them)
from hybrid_kv.check.guard import checks, registry
from hybrid_kv.check.guard.registry import load_checks
from hybrid_kv.check.guard.run import GuardRunOptions, amounts, run_guard
from hybrid_kv.config import ConfigError

TOY = """
from collections.abc import Iterator

from hybrid_kv.check.guard.registry import CheckResult, Run, check


@check("toy", quick=3, full=30, seconds=0.001)
def check_toy(run: Run) -> Iterator[CheckResult]:
    run.progress(run.amount)
    wrong = run.seed == 13
    reason = "it is 13" if wrong else ""
    yield CheckResult("unlucky seeds", int(wrong), "settings", "0", run.amount, reason)
"""


@pytest.fixture
def toy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A folder of checks with one file in it."""
    (tmp_path / "toy.py").write_text(TOY)
    load_checks()
    monkeypatch.setattr(checks, "__path__", [*checks.__path__, str(tmp_path)])
    monkeypatch.setattr(registry, "CHECKS", dict(registry.CHECKS))
    monkeypatch.delitem(sys.modules, "hybrid_kv.check.guard.checks.toy", raising=False)


def test_a_check_is_one_file(toy: None) -> None:
    assert amounts("quick")["toy"] == 3 and amounts("full")["toy"] == amounts("long")["toy"] == 30
    assert amounts("long")["exact model"] == 100_000
    assert load_checks()[-1].section == "toy"  # behind those that say where they stand
    (result,) = run_guard(
        amounts("quick"), GuardRunOptions(seed=0, progress=False, jobs=1, select=["toy"])
    )
    assert (result.section, result.passed, result.n) == ("toy", True, 3)
    (result,) = run_guard(
        amounts("full"), GuardRunOptions(seed=13, progress=False, jobs=1, select=["toy"])
    )
    assert not result.passed and result.n == 30


@pytest.mark.parametrize(
    ("only", "message"),
    [
        (
            {"colour": "red"},
            "--only colour=red: there is no such factor; use one of mode, drafts, K",
        ),
        ({"mode": "sparse"}, "--only mode=sparse: use one of none, align, all, attention"),
    ],
)
def test_levels_that_no_section_has_are_refused(only: dict[str, str], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        run_guard(amounts("quick"), GuardRunOptions(seed=0, progress=False, jobs=1, only=only))


def test_levels_leave_the_sections_that_have_them() -> None:
    with pytest.raises(ConfigError, match="no section of this guard has 'costs or mode'"):
        run_guard(
            amounts("quick"),
            GuardRunOptions(seed=0, progress=False, jobs=1, select=["costs"], only={"mode": "all"}),
        )
    results = run_guard(
        amounts("quick"),
        GuardRunOptions(seed=0, progress=False, jobs=1, only={"layers": "MM", "mode": "none"}),
    )
    assert {result.section for result in results} == {"exact model"}
    assert results[0].passed and results[0].params == {"seed": 0, "layers": "MM", "mode": "none"}


def test_a_package_that_is_missing_is_named_before_anything_runs(
    toy: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "scipy", None)
    ran: list[float] = []
    load_checks()
    toy_check = replace(registry.CHECKS["toy"], function=lambda run: ran.append(1) or [])
    monkeypatch.setitem(registry.CHECKS, "toy", toy_check)
    with pytest.raises(ModuleNotFoundError, match="scipy"):
        run_guard({"toy": 1, "accuracy": 8}, GuardRunOptions(seed=0, progress=False, jobs=1))
    assert not ran
    assert (
        run_guard(
            {"toy": 1, "accuracy": 8},
            GuardRunOptions(seed=0, progress=False, jobs=1, select=["toy"]),
        )
        == []
        and ran
    )

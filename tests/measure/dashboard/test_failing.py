"""What is failing, since when, and which of it is new."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from hybrid_kv.measure.dashboard.failing import Failing, counted, find_failing, new_failures
from hybrid_kv.measure.dashboard.series import histories
from tests.measure.dashboard.rows import history, results, row


def failing(folder: Path, *rows: dict[str, Any]) -> list[Failing]:
    found = results(folder, *rows).rows
    return find_failing(found, histories(found))


def checks(words: str) -> list[dict[str, Any]]:
    """A run for each letter: pass, fail, void."""
    names = {"p": "pass", "f": "fail", "v": "void"}
    return [
        row(run, suite="guard", unit="B", verdict=names[word], better="equal")
        for run, word in enumerate(words)
    ]


def span(one: Failing) -> tuple[str, str]:
    return one.first.commit[:5], one.passed.commit[:5] if one.passed else ""


@pytest.mark.parametrize(
    ("words", "word", "first", "passed"),
    [
        ("pff", "fail", 1, 0),
        ("fpf", "fail", 2, 1),
        ("ff", "fail", 0, None),
        ("pfv", "void", 1, 0),
        ("pfp", "", 0, None),
    ],
)
def test_a_check_fails_since_the_first_of_its_last_runs_that_did_not_pass(
    tmp_path: Path, words: str, word: str, first: int, passed: int | None
) -> None:
    found = failing(tmp_path, *checks(words))
    assert [one.word for one in found] == [word] * bool(word)
    assert [span(one) for one in found] == [
        (f"{first:05}", "" if passed is None else f"{passed:05}")
    ] * bool(word)


@pytest.mark.parametrize(
    ("values", "better", "first"),
    [
        ([1, 1, 2, 2], "lower", 2),
        ([1, 1, 2, 1], "lower", None),
        ([1, 2, 3, 3], "lower", 2),
        ([1, 3, 2, 2], "lower", 1),
        ([5, 4, 4, 6], "higher", None),
        ([5, 4, 4, 4], "higher", 1),
        ([1, 1, 2, 2], "equal", None),
    ],
)
def test_a_level_fails_since_its_newest_step_for_the_worse_that_stands(
    tmp_path: Path, values: list[float], better: str, first: int | None
) -> None:
    found = failing(tmp_path, *history(map(float, values), unit="blocks", better=better))
    assert [one.word for one in found] == ["worse"] * (first is not None)
    assert [span(one)[0] for one in found] == ([] if first is None else [f"{first:05}"])


@pytest.mark.parametrize(("unit", "fails"), [("ns", False), ("blocks", True)])
def test_a_time_is_mended_where_its_level_is_nearly_what_it_was(
    tmp_path: Path, unit: str, fails: bool
) -> None:
    values = [1000.0] * 6 + [1120.0] * 6 + [1009.0] * 6
    assert bool(failing(tmp_path, *history(values, unit=unit, better="lower"))) == fails


def test_what_a_check_judges_fails_if_the_check_does(tmp_path: Path) -> None:
    assert failing(tmp_path / "a", *history([1.0, 2.0], unit="B", verdict="pass")) == []
    (found,) = failing(tmp_path / "b", *history([1.0, 2.0], unit="B", verdict="fail"))
    assert found.word == "fail"


def test_a_check_that_passed_at_the_same_time_in_another_run_stays_failing(tmp_path: Path) -> None:
    rows = [*checks("pf"), {**checks("p")[0], "run_id": "other", "time_utc": row(1)["time_utc"]}]
    # the failed run is the newest
    last = row(1, suite="guard", unit="B", metric="m", verdict="pass")
    (found,) = failing(tmp_path, *rows, last)
    assert (found.word, found.newest.run_id) == ("fail", "run00001")


def test_failures_come_first_then_void_then_levels(tmp_path: Path) -> None:
    rows = history([1.0, 2.0], unit="B", metric="level")
    rows += [
        {**one, "metric": name}
        for name, words in (("a", "pv"), ("b", "pf"))
        for one in checks(words)
    ]
    found = failing(tmp_path, *rows)
    assert [one.word for one in found] == ["fail", "void", "worse"]
    assert counted(found) == "1 check failed, 1 check was void, 1 level is worse"
    assert counted(found * 2) == "2 checks failed, 2 checks were void, 2 levels are worse"
    assert counted([]) == "Nothing is failing"


def test_only_what_did_not_fail_before_is_new(tmp_path: Path) -> None:
    level = history([1.0, 2.0, 2.0], unit="B", metric="level")
    before = failing(tmp_path / "before", *checks("pf"), *level)
    now = failing(tmp_path / "now", *checks("pff"), *level)
    assert new_failures(now, before) == []
    assert new_failures(now, []) == now
    down = failing(
        tmp_path / "down", *checks("pff"), *level, row(3, value=3.0, unit="B", metric="level")
    )
    (new,) = new_failures(down, before)
    assert (new.word, new.depth, span(new)) == ("worse", 2, ("00003", "00002"))

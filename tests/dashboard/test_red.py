"""What is red, since when, and which of it is new."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from hybrid_kv.dashboard.data import histories
from hybrid_kv.dashboard.red import Red, counted, find_red, new_red
from tests.dashboard.rows import history, results, row


def red(folder: Path, *rows: dict[str, Any]) -> list[Red]:
    found = results(folder, *rows).rows
    return find_red(found, histories(found))


def checks(words: str) -> list[dict[str, Any]]:
    """A run for each letter: pass, fail, void."""
    names = {"p": "pass", "f": "fail", "v": "void"}
    return [row(run, suite="guard", unit="B", verdict=names[word], better="equal") for run, word in enumerate(words)]


def span(one: Red) -> tuple[str, str]:
    return one.first.commit[:5], one.green.commit[:5] if one.green else ""


@pytest.mark.parametrize(
    ("words", "word", "first", "green"),
    [
        ("pff", "fail", 1, 0),
        ("fpf", "fail", 2, 1),
        ("ff", "fail", 0, None),
        ("pfv", "void", 1, 0),
        ("pfp", "", 0, None),
    ],
)
def test_a_check_is_red_since_the_first_of_its_last_runs_that_did_not_pass(
    tmp_path: Path, words: str, word: str, first: int, green: int | None
) -> None:
    found = red(tmp_path, *checks(words))
    assert [one.word for one in found] == [word] * bool(word)
    assert [span(one) for one in found] == [(f"{first:05}", "" if green is None else f"{green:05}")] * bool(word)


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
def test_a_level_is_red_since_its_newest_step_for_the_worse_that_stands(
    tmp_path: Path, values: list[float], better: str, first: int | None
) -> None:
    found = red(tmp_path, *history(map(float, values), unit="blocks", better=better))
    assert [one.word for one in found] == ["worse"] * (first is not None)
    assert [span(one)[0] for one in found] == ([] if first is None else [f"{first:05}"])


def test_what_a_check_judges_is_red_if_the_check_is(tmp_path: Path) -> None:
    assert red(tmp_path / "a", *history([1.0, 2.0], unit="B", verdict="pass")) == []
    (found,) = red(tmp_path / "b", *history([1.0, 2.0], unit="B", verdict="fail"))
    assert found.word == "fail"


def test_a_check_that_passed_at_the_same_time_in_another_run_stays_red(tmp_path: Path) -> None:
    rows = [*checks("pf"), {**checks("p")[0], "run_id": "other", "time_utc": row(1)["time_utc"]}]
    last = row(1, suite="guard", unit="B", metric="m", verdict="pass")  # the failed run is the newest
    (found,) = red(tmp_path, *rows, last)
    assert (found.word, found.newest.run_id) == ("fail", "run00001")


def test_failures_come_first_then_void_then_levels(tmp_path: Path) -> None:
    rows = history([1.0, 2.0], unit="B", metric="level")
    rows += [{**one, "metric": name} for name, words in (("a", "pv"), ("b", "pf")) for one in checks(words)]
    found = red(tmp_path, *rows)
    assert [one.word for one in found] == ["fail", "void", "worse"]
    assert counted(found) == "1 check failed, 1 check was void, 1 level is worse"
    assert counted(found * 2) == "2 checks failed, 2 checks were void, 2 levels are worse"
    assert counted([]) == "Nothing is red"


def test_only_what_was_not_red_before_is_new(tmp_path: Path) -> None:
    level = history([1.0, 2.0, 2.0], unit="B", metric="level")
    before = red(tmp_path / "before", *checks("pf"), *level)
    now = red(tmp_path / "now", *checks("pff"), *level)
    assert new_red(now, before) == []
    assert new_red(now, []) == now
    down = red(tmp_path / "down", *checks("pff"), *level, row(3, value=3.0, unit="B", metric="level"))
    (new,) = new_red(down, before)
    assert (new.word, new.depth, span(new)) == ("worse", 2, ("00003", "00002"))

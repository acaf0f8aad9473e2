"""Whose word counts, and of which code it is."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from hybrid_kv.dashboard.verdicts import headline, overall, verdicts
from hybrid_kv.results import NO_HEAD, Head
from tests.dashboard.rows import results, row


class Checkout(Head):
    """HEAD is commit 9 of ten in a line; row 3's commit is six behind it."""

    def distance(self, commit: str) -> int | None:
        return 9 - int(commit[:5]) if commit[:5].isdigit() and int(commit[:5]) < 10 else None


HEAD = Checkout("0000900009" * 4)


def test_only_the_newest_run_judges(tmp_path: Path) -> None:
    old = row(0, {"i": 1}, verdict="fail", suite="guard", benchmark="a", metric="m")
    new = [row(1, verdict="pass", suite="guard", benchmark="a", metric=f"n{i}") for i in range(3)]
    (verdict,) = verdicts(results(tmp_path, old, *new).rows)
    assert (verdict.word, verdict.count("pass"), len(verdict.rows)) == ("pass", 3, 3)
    assert verdict.newest.commit == "00001" * 8


def test_a_static_metric_stands_until_it_is_replaced(tmp_path: Path) -> None:
    static = {"suite": "kernels", "benchmark": "k", "unit": "", "metric": "registers"}
    rows = [
        row(0, {"target": "sm_80"}, verdict="fail", **static),
        row(0, {"target": "sm_90"}, verdict="fail", **static),
        row(1, {"target": "sm_90"}, verdict="pass", **static),
    ]
    (verdict,) = verdicts(results(tmp_path, *rows).rows)
    assert (verdict.word, verdict.count("pass"), verdict.count("fail")) == ("fail", 1, 1)
    assert verdict.machine == ""


def test_each_machine_has_a_verdict_of_its_own(tmp_path: Path) -> None:
    found = results(tmp_path, row(0, verdict="fail"), row(1, machine="b", verdict="pass"), row(2))
    assert [(v.machine, v.word) for v in verdicts(found.rows)] == [("b", "pass"), ("box", "fail")]


def test_void_is_not_passed(tmp_path: Path) -> None:
    rows = [row(0, {"i": i}, verdict=word) for i, word in enumerate(["pass", "void", "pass"])]
    (verdict,) = verdicts(results(tmp_path, *rows).rows)
    assert verdict.word == "void"
    assert overall(["pass", "void"]) == "void"
    assert overall(["void", "fail", "pass"]) == "fail"
    assert overall([]) == "none"


def test_a_level_that_is_worse_is_in_the_headline(tmp_path: Path) -> None:
    found = verdicts(results(tmp_path, row(9, verdict="pass")).rows)
    assert headline(found, HEAD, 2).word == headline(found, NO_HEAD, 2).word == "worse"
    assert headline(found, HEAD, 2).finding == "✕ worse: 1 of 1 checks of the newest runs, 2 levels are worse"
    assert headline(verdicts(results(tmp_path, row(9, verdict="fail")).rows), HEAD, 1).word == "fail"


# ---- of which code ----


def word_and_age(folder: Path, *rows: dict[str, Any]) -> tuple[str, str]:
    found = headline(verdicts(results(folder, *rows).rows), HEAD)
    return found.word, found.age


def test_rows_of_head_are_current(tmp_path: Path) -> None:
    assert word_and_age(tmp_path, row(9, verdict="pass")) == ("pass", "Every row is of the code of HEAD (0000900).")


OTHER = [row(9), row(3, suite="guard"), row(7, machine="b")]


@pytest.mark.parametrize(
    ("rows", "day", "age"),
    [
        ([row(8)], "2026-01-09", "Rows are up to 1 commit from HEAD (0000900)."),
        (OTHER, "2026-01-04", "Rows are up to 6 commits from HEAD (0000900)."),
        ([row(9, {"i": i}, dirty=i < 2) for i in range(3)], "2026-01-10", "Of a changed tree: 2 rows."),
        ([row(20)], "2026-01-21", "Of a commit that this checkout does not have: 1 rows."),
    ],
)
def test_rows_of_other_code_turn_the_verdict_amber(
    tmp_path: Path, rows: list[dict[str, Any]], day: str, age: str
) -> None:
    passed = [one | {"verdict": "pass"} for one in rows]
    assert word_and_age(tmp_path, *passed) == ("stale", f"The oldest row is of {day}. {age}")


def test_a_failure_stays_a_failure_however_old(tmp_path: Path) -> None:
    assert word_and_age(tmp_path, row(3, verdict="fail"))[0] == "fail"
    assert word_and_age(tmp_path, row(3, verdict="void"))[0] == "void"


def test_without_a_checkout_nothing_is_current(tmp_path: Path) -> None:
    found = headline(verdicts(results(tmp_path, row(9, verdict="pass")).rows), NO_HEAD)
    assert found.word == "stale"
    assert found.age == "The oldest row is of 2026-01-10. There is no checkout to compare them with."

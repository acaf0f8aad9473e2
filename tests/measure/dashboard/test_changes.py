"""What a commit changed: with which rows its own are compared, and what counts as a change."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from hybrid_kv.measure.dashboard.changes import Measured, newest_commits
from hybrid_kv.measure.dashboard.series import histories
from tests.measure.dashboard.rows import history, results, row


def commits(folder: Path, *rows: dict[str, Any], limit: int = 50) -> dict[str, Measured]:
    """By the first five letters."""
    found = results(folder, *rows).rows
    return {
        commit[:5]: one for commit, one in newest_commits(found, histories(found), limit).items()
    }


def test_a_row_is_compared_with_the_commit_that_was_measured_before(tmp_path: Path) -> None:
    rows = history([1.0, 2.0, 2.0], unit="B")
    rows += [
        row(3, value=9.0, unit="B", dirty=True),
        row(4, value=3.0, unit="B"),
        row(4, metric="new", unit="B"),
    ]
    found = commits(tmp_path, *rows)
    assert list(found) == ["00000", "00001", "00002", "00004"]
    assert [len(one.changes) for one in found.values()] == [0, 1, 1, 1]
    (change,) = found["00004"].changes.itertuples()
    assert (change.value, change.was_value, change.was_commit[:5], change.change) == (
        3.0,
        2.0,
        "00002",
        "worse",
    )
    assert [one.count("same") for one in found.values()] == [0, 0, 1, 0]


def test_a_commit_that_is_measured_again_keeps_its_place_and_gets_its_newest_figure(
    tmp_path: Path,
) -> None:
    again = {**row(5, value=7.0, unit="B"), "commit": row(0)["commit"]}
    found = commits(tmp_path, *history([1.0, 2.0], unit="B"), again)
    assert list(found) == ["00000", "00001"]
    (change,) = found["00001"].changes.itertuples()
    assert (change.value, change.was_value) == (2.0, 7.0)


@pytest.mark.parametrize(
    ("was", "now", "same", "word"),
    [
        ((10, 9, 11), (12, 11.5, 13), {}, "worse"),
        ((10, 9, 11), (12, 10.5, 13), {}, "same"),
        ((12, 11.5, 13), (10, 9, 11), {}, "better"),
        ((10, None, None), (12, None, None), {}, "same"),
        ((10, None, None), (12, None, None), {"unit": "B"}, "worse"),
        ((10, None, None), (12, None, None), {"unit": "B", "better": "higher"}, "better"),
        ((10, None, None), (12, None, None), {"unit": "B", "better": "equal"}, "changed"),
        ((10, None, None), (10, None, None), {"unit": "B"}, "same"),
        ((1e-13, None, None), (2e-13, None, None), {"unit": "logit"}, "same"),  # rounding
        ((1.5, None, None), (2.5, None, None), {"unit": "1/B", "suite": "kernels"}, "worse"),
    ],
)
def test_what_counts_as_a_change(
    tmp_path: Path, was: tuple[Any, ...], now: tuple[Any, ...], same: dict[str, Any], word: str
) -> None:
    rows = [
        row(run, value=float(value), ci_low=low, ci_high=high, **same)
        for run, (value, low, high) in enumerate((was, now))
    ]
    (change,) = commits(tmp_path, *rows)["00001"].changes.itertuples()
    assert change.change == word


def test_void_rows_comparisons_and_other_machines_are_not_compared(tmp_path: Path) -> None:
    rows = [
        row(0, unit="B", verdict="void"),
        row(0, unit="B", machine="other"),
        row(0, unit="B", suite="compare"),
    ]
    assert commits(tmp_path, *rows, row(1, unit="B"), row(1, unit="B", suite="compare"))[
        "00001"
    ].changes.empty


def test_a_step_belongs_to_the_commit_that_begins_the_new_level(tmp_path: Path) -> None:
    found = commits(tmp_path, *history([1.0, 1.0, 2.0, 2.0], unit="B"))
    assert [len(one.steps) for one in found.values()] == [0, 0, 1, 0]


def test_only_the_newest_commits_have_a_page(tmp_path: Path) -> None:
    found = commits(
        tmp_path, *history(map(float, range(9)), unit="B"), row(9, commit="x" * 40), limit=3
    )
    assert list(found) == ["00006", "00007", "00008"]
    assert found["00006"].changes["was_value"].tolist() == [5.0]  # of a commit without one
    assert found["00008"].file == "000080000800.html"


def test_a_check_with_other_settings_is_another_series(tmp_path: Path) -> None:
    """The seed is none: it may be another one every night."""
    cells = [{"blocks": 8, "seed": 1}, {"blocks": 4, "seed": 1}, {"blocks": 4, "seed": 2}]
    same: dict[str, Any] = {"suite": "guard", "benchmark": "ids", "unit": "B", "verdict": "pass"}
    found = commits(
        tmp_path,
        *(row(run, cell, value=200.0 / (1 + run), **same) for run, cell in enumerate(cells)),
    )
    assert [len(one.changes) for one in found.values()] == [0, 0, 1]

"""Levels, steps and the commits on both sides."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.dashboard.html import data, page_of, section
from tests.dashboard.rows import history, results

pytest.importorskip("plotly", reason="the report needs plotly: pip install -e '.[report]'")


def test_the_history_has_levels_steps_and_both_commits(full: str) -> None:
    document = data(full)
    (series,) = [s for s in document["series"] if s["steps"]]
    assert series["machine"] == "rack, H200"
    assert [level["value"] for level in series["levels"]] == [101, 121]
    assert [(step["word"], step["time"]) for step in series["steps"]] == [("worse", series["time"][20])]
    assert document["series"][document["start"]] == series
    assert sum(series["dirty"]) == 1
    assert [document["commits"][c][:5] for c in series["commit"]][:3] == ["00000", "00001", "00002"]
    listed = section(full, "history")
    assert "0001900…" in re.sub(r"<[^>]*>|\s", "", listed)
    assert "101 ns → 121 ns" in listed and "+19.8 %" in listed
    assert "95 % interval" in listed


def test_series_without_a_level_are_not_in_the_history(full: str) -> None:
    assert {s["name"].split(":")[0] for s in data(full)["series"]} == {
        "guard",
        "state_update",
        "kernel_blocks",
        "kernels",
        "gpu",
        "accuracy",
    }


@pytest.mark.parametrize(("count", "folded"), [(5, False), (6, True)])
def test_many_steps_are_folded_so_that_the_chart_is_seen(tmp_path: Path, count: int, folded: bool) -> None:
    rows = [one for i in range(count) for one in history([1.0, 2.0], unit="B", metric=f"m{i}")]
    own = section(page_of(results(tmp_path, *rows)), "history")
    assert (f"<details><summary>{count} steps, newest first</summary>" in own) == folded
    assert own.count("data-series=") == count

"""Shares of right answers, and paired tests."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from hybrid_kv.dashboard.sections.accuracy import axis_ends
from tests.dashboard.html import figures, page_of, section
from tests.dashboard.rows import results, row

pytest.importorskip("plotly", reason="the report needs plotly: pip install -e '.[report]'")


def test_rounding_makes_no_negative_interval(tmp_path: Path) -> None:
    same = {"suite": "accuracy", "benchmark": "t", "metric": "exact_match_strict", "unit": "", "n": 250}
    page = page_of(results(tmp_path, row(0, value=1.0, ci_low=0.98, ci_high=0.9999999999999999, **same)))
    bars = [trace["error_x"] for figure in figures(page) for trace in figure["data"] if trace["x"]]
    assert bars[0]["array"] == [0]
    assert bars[0]["arrayminus"] == pytest.approx([2])


def test_each_task_has_an_axis_on_which_its_runs_differ_and_says_so(tmp_path: Path) -> None:
    same = {"suite": "accuracy", "unit": "", "n": 250}
    rows = [
        row(run, {"model": model, "seed": run}, benchmark=task, metric=metric, value=value + run / 100, **same)
        for run in (0, 1)
        for task, model, metric, value in (
            ("near", "a", "exact_match_strict", 0.85),
            ("near", "b", "exact_match_strict", 0.89),
            ("near", "a", "invalid_rate", 0.0),
            ("far", "a", "exact_match_strict", 0.0),
            ("far", "a", "exact_match_flexible", 0.99),
        )
    ]
    own = section(page_of(results(tmp_path, *rows)), "accuracy")
    near, _, far = figures(own)
    assert near["layout"]["xaxis"]["range"] == pytest.approx([84.5, 90.5])
    assert far["layout"]["xaxis"]["range"] == pytest.approx([-4, 104])
    assert re.findall("<figcaption>(.*?)</figcaption>", own) == [
        "near, right answers; the axis is cut: 84.5 to 90.5 %",
        "near, answers without a number; the axis is cut: 0 to 2 %",
        "far, right answers",
    ]
    labels = [label.replace("<br>", " ") for label in near["layout"]["yaxis"]["ticktext"]]
    assert labels == ["model=a, strict, 2 runs of\u00a0250", "model=b, strict, 2 runs of\u00a0250"]


@pytest.mark.parametrize("ends", [(85, 90), (0, 0.5), (99.9, 100), (0, 100), (50, 50), (100, 100), (0, 0), (3, 98)])
def test_an_axis_is_a_fifth_wider_than_its_figures(ends: tuple[float, float]) -> None:
    low, high = axis_ends(*ends)
    assert (low < ends[0] and ends[1] < high) or ends[0] == ends[1]
    assert low <= ends[0] <= ends[1] <= high
    assert 2 <= high - low <= 1.3 * max(2, ends[1] - ends[0])


def test_paired_tests_have_their_figures(full: str) -> None:
    text = re.sub(r"<[^>]*>", " ", section(full, "accuracy"))
    for figure in (
        "-5.2 points",
        "(-8.4 to -2.0)",
        " 15 ",
        " 2 ",
        "0.0004",
        "3.8 points",
        " 250 ",
        "bbbbbbb to ccccccc",
    ):
        assert figure in text

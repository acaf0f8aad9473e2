"""Shares of right answers, and paired tests."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.dashboard.html import figures, page_of, section
from tests.dashboard.rows import results, row

pytest.importorskip("plotly", reason="the report needs plotly: pip install -e '.[report]'")


def test_rounding_makes_no_negative_interval(tmp_path: Path) -> None:
    same = {"suite": "accuracy", "benchmark": "t", "metric": "exact_match_strict", "unit": "", "n": 250}
    page = page_of(results(tmp_path, row(0, value=1.0, ci_low=0.98, ci_high=0.9999999999999999, **same)))
    bars = [trace["error_x"] for figure in figures(page) for trace in figure["data"] if trace["x"]]
    assert bars[0]["array"] == [0]
    assert bars[0]["arrayminus"] == pytest.approx([2])


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

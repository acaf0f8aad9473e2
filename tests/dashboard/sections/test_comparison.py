"""The newest comparison of two versions."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.dashboard.html import figures, page_of, section, titles
from tests.dashboard.kinds import everything
from tests.dashboard.rows import results

pytest.importorskip("plotly", reason="the report needs plotly: pip install -e '.[report]'")


def test_a_comparison_lists_changed_counts_and_marks_the_quarantined(full: str) -> None:
    own = section(full, "comparison")
    assert "memory/held, mamba" in own and "<td>12</td>" in own and "14 blocks" in own
    assert "<td>16</td>" in own and "17 blocks" in own
    (figure,) = figures(own)
    symbols = [symbol for trace in figure["data"] for symbol in trace["marker"]["symbol"]]
    assert sum(symbol.endswith("-open") for symbol in symbols) == 1
    shown = {trace["hovertemplate"].split(":")[0]: trace["x"] for trace in figure["data"]}
    assert shown == {
        "slower": pytest.approx([8]),
        "faster": pytest.approx([-10]),
        "same": pytest.approx([1, 0]),
        "inconclusive": pytest.approx([50]),
    }


def test_only_the_newest_comparison_counts(tmp_path: Path) -> None:
    old = [one | {"run_id": "old", "time_utc": "2025-01-01T00:00:00Z", "value": 3.0} for one in everything()]
    page = page_of(results(tmp_path, *[one for one in old if one["suite"] == "compare"], *everything()))
    assert titles(page)["comparison"] == "1 of 5 benchmarks is slower than fffffff"


def test_a_comparison_on_an_unfit_machine_says_so(tmp_path: Path) -> None:
    rows = [one for one in everything() if one["suite"] == "compare"]
    assert "not fit for times" not in page_of(results(tmp_path / "fit", *rows))
    marked = [
        one | {"params": json.dumps({**json.loads(one["params"]), "unfit": "others took 33% <b>"})} for one in rows
    ]
    page = page_of(results(tmp_path / "unfit", *marked))
    assert "Measured on a machine that was not fit for times: others took 33% &lt;b&gt;." in page

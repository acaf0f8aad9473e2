"""Block ids on their way to the device."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.dashboard.html import figures, page_of, section, titles
from tests.dashboard.kinds import everything
from tests.dashboard.rows import results

pytest.importorskip("plotly", reason="the report needs plotly: pip install -e '.[report]'")


def test_every_interval_is_drawn_where_the_rows_have_one(full: str, tmp_path: Path) -> None:
    axes = [trace.get("error_y") or trace.get("error_x") for figure in figures(full) for trace in figure["data"]]
    assert axes and all(axes)
    (engine,) = [t for f in figures(section(full, "block-ids")) for t in f["data"] if t["name"] == "engine"]
    assert engine["y"] == [401, 416, 656]
    assert engine["error_y"]["array"] == pytest.approx([40.1, 41.6, 65.6])
    assert engine["error_y"]["arrayminus"] == pytest.approx([40.1, 41.6, 65.6])


def test_a_beaten_engine_is_said_so(tmp_path: Path) -> None:
    rows = [
        one | {"value": 0.5} if one["metric"] == "ratio_to_engine" and '"list"' in one["params"] else one
        for one in everything()
    ]
    title = titles(page_of(results(tmp_path, *rows)))["block-ids"]
    assert title == "The engine is beaten in 3 of 9 comparisons of one append"

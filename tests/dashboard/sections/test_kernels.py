"""Static metrics."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.dashboard.html import page_of, section, titles
from tests.dashboard.kinds import everything
from tests.dashboard.rows import results

pytest.importorskip("plotly", reason="the report needs plotly: pip install -e '.[report]'")


def test_a_spill_is_said_so(tmp_path: Path) -> None:
    rows = [one | {"value": 8} if one["metric"] == "spill_bytes" else one for one in everything()]
    assert titles(page_of(results(tmp_path, *rows)))["kernels"] == "4 of 4 compiled cases spill registers"


def test_the_table_is_folded(full: str) -> None:
    own = section(full, "kernels")
    assert own.index("<details><summary>4 compiled cases") < own.index("<table>") < own.index("</details>")

"""Error rates of the harness itself."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.dashboard.html import figures, page_of, titles
from tests.dashboard.kinds import everything
from tests.dashboard.rows import results

pytest.importorskip("plotly", reason="the report needs plotly: pip install -e '.[report]'")


def test_a_quarantined_benchmark_fails_nothing(tmp_path: Path) -> None:
    rows = [one for one in everything() if one["suite"] == "operating_curve"]
    page = page_of(results(tmp_path, *rows))
    assert titles(page)["verdict"] == "No check has said pass or fail yet"
    assert "wild/step [K=3] (quarantined)" in json.dumps(figures(page)).replace("<br>", " ")

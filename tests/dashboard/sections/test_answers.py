"""Hits and drafts by cache mode."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.dashboard.html import page_of, titles
from tests.dashboard.kinds import everything
from tests.dashboard.rows import results

pytest.importorskip("plotly", reason="the report needs plotly: pip install -e '.[report]'")


def test_drafts_that_caching_costs_are_said_so(tmp_path: Path) -> None:
    rows = [one | {"params": one["params"].replace('"accepted": 92', '"accepted": 91')} for one in everything()[:9]]
    assert titles(page_of(results(tmp_path, *rows, *everything()[9:])))["hits-and-drafts"].startswith("Caching changes")

"""A section is a file with one function."""

from __future__ import annotations

from pathlib import Path

import pytest

from hybrid_kv.dashboard import sections
from tests.dashboard.html import page_of, titles
from tests.dashboard.kinds import everything
from tests.dashboard.rows import results

pytest.importorskip("plotly", reason="the report needs plotly: pip install -e '.[report]'")

TOY = """
from hybrid_kv.dashboard.report import Report, Section

PLACE = 25


def section(report: Report) -> Section:
    return Section("Toy section", f"{len(report.results.rows)} rows", "")
"""


def test_a_new_section_is_one_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "toy.py").write_text(TOY)
    monkeypatch.setattr(sections, "__path__", [*sections.__path__, str(tmp_path)])
    rows = everything()
    found = titles(page_of(results(tmp_path / "rows", *rows)))
    assert list(found)[2:6] == ["history", "commits", "toy-section", "comparison"]
    assert found["toy-section"] == f"{len(rows)} rows"

"""The data dictionary says what the schema holds."""

from __future__ import annotations

import re
from pathlib import Path

from hybrid_kv.measure.results import COLUMNS, UNITS

DOCS = Path(__file__).resolve().parents[3] / "docs" / "results.md"


def test_the_page_has_every_column_and_unit_of_the_schema() -> None:
    text = DOCS.read_text(encoding="utf-8")
    assert re.findall(r"^\| `(\w+)` \|", text, re.MULTILINE)[: len(COLUMNS)] == list(COLUMNS)
    assert [unit for unit in UNITS - {""} if f"`{unit}`" not in text] == []

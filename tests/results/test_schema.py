"""The data dictionary says what the schema holds."""

from pathlib import Path

import pytest

from hybrid_kv.dashboard.readme import columns_table, units_text
from hybrid_kv.results import COLUMNS, UNITS, read_rows
from hybrid_kv.results.schema import HEADER, SCHEMA_COLUMNS

DOCS = Path(__file__).resolve().parents[2] / "docs" / "results.md"


@pytest.mark.parametrize("column", SCHEMA_COLUMNS, ids=COLUMNS)
def test_each_column_says_what_it_is_with_an_example_that_fits(column):
    assert column.meaning.endswith(".") and column.kind.takes and column.kind.name
    column.kind.parse(column.example)


def test_the_examples_make_a_row(tmp_path):
    file = tmp_path / "r.csv"
    cells = ['"' + column.example.replace('"', '""') + '"' for column in SCHEMA_COLUMNS]
    file.write_bytes(HEADER + (",".join(cells) + "\n").encode())
    (row,) = read_rows(file).to_dict("records")
    assert (row["suite"], row["value"], row["n"], row["dirty"]) == ("state_update", 6790.4, 25, False)


def test_the_page_has_every_column_and_unit_of_the_schema():
    text = DOCS.read_text(encoding="utf-8")
    assert columns_table(None) in text and units_text(None) in text, "docs/results.md is behind; run: make figures"
    assert [line.split("`")[1] for line in columns_table(None).splitlines()[2:]] == list(COLUMNS)
    assert all(f"`{unit}`" in units_text(None) for unit in UNITS - {""})

"""What cannot be read names its line, and what breaks the schema is found."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from hybrid_kv.config import HybridKVError
from hybrid_kv.measure.results import (
    COLUMNS,
    append_rows,
    check_file,
    check_writable,
    read,
    read_rows,
)
from tests.cli.run import run
from tests.measure.results.rows import GOOD, RECEIPT, ROW, damaged


@pytest.mark.parametrize("column", [0, 7, len(COLUMNS) - 1])
def test_a_wrong_header_is_refused_by_file_and_column(tmp_path: Path, column: int) -> None:
    names = list(COLUMNS)
    names[column] = "other"
    path = tmp_path / "old.csv"
    path.write_text(",".join(names) + "\n")
    for use in (read_rows, check_writable, lambda path: append_rows(path, [ROW])):
        with pytest.raises(
            HybridKVError, match=f"old.csv: column {column + 1} must be '{COLUMNS[column]}'"
        ):
            use(path)
    assert path.read_text() == ",".join(names) + "\n"


@pytest.mark.parametrize("names", [[*COLUMNS, "more"], COLUMNS[:-1]])
def test_missing_and_additional_columns_are_refused(tmp_path: Path, names: Sequence[str]) -> None:
    path = tmp_path / "r.csv"
    path.write_text(",".join(names) + "\n")
    with pytest.raises(HybridKVError, match="column 2"):
        read_rows(path)


@pytest.mark.parametrize(
    ("line", "changes", "message"),
    [
        (3, {"params": "{}"}, "is a timing without a receipt"),
        (3, {"params": RECEIPT.replace("true", "false")}, "before and after"),
        (3, {"params": '{"receipt":{"checked_after":true}}'}, "missing"),
        (2, {"value": "nan"}, "'value' holds 'nan'"),
        (3, {"ci_low": "4"}, "4.0 to 3.0 is not an interval"),
        (3, {"ci_low": ""}, "nan to 3.0 is not an interval"),
        (2, {"n": "-1"}, "'n' holds '-1'; it takes a whole number from 0 to 9223372036854775807"),
        (2, {"params": "[]"}, "'params' holds '[]'"),
        (2, {"params": "{"}, "'params' holds '{'"),
        (2, {"params": '{"b": 1}'}, "not compact JSON with sorted keys"),
        (2, {"params": '{"b":1,"a":2}'}, "not compact JSON with sorted keys"),
        (
            2,
            {"params": '{"a":[{"model":"/home/me/model"}]}'},
            "names a place on a machine: '/home/me/model'",
        ),
        (2, {"params": '{"a":"~/model"}'}, "names a place on a machine"),
        (2, {"commit": "8a89dd6"}, "commit holds '8a89dd6'"),
        (2, {"baseline_commit": "main"}, "baseline_commit holds 'main'"),
        (2, {"run_id": "1"}, "run_id holds '1'"),
        (2, {"time_utc": "2026-11-21 06:02"}, "'time_utc' holds"),
        (2, {"time_utc": "2026-13-21T06:02:00Z"}, "'time_utc' holds"),
        (2, {"suite": ""}, "suite holds ''"),
        (2, {"machine": " "}, "machine holds ' '"),
        (2, {"device": ""}, "device holds ''"),
    ],
)
def test_a_row_that_breaks_the_schema_is_found(
    tmp_path: Path, line: int, changes: dict[str, str], message: str
) -> None:
    path = damaged(tmp_path / "r.csv", line, **changes)
    (problem,) = check_file(path)
    assert problem.startswith(f"{path} line {line}: ") and message in problem


BROKEN = [
    ({"value": ""}, "line 2: column 'value' holds ''"),
    ({"dirty": "no"}, "line 2: column 'dirty' holds 'no'"),
    ({"ci_low": "inf"}, "line 2: column 'ci_low' holds 'inf'"),
    ({"schema": "2"}, "line 2: column 'schema' holds '2'; it takes 1, which this version reads"),
    ({"n": "nan"}, "line 2: column 'n' holds 'nan'"),
    (
        {"n": "9" * 19},
        "line 2: column 'n' holds '9999999999999999999'; it takes a whole number from 0 to",
    ),
    ({"n": "9" * 5000}, "line 2: column 'n' holds '999"),
    ({"value": "1e999"}, "line 2: column 'value' holds '1e999'; it takes a finite number"),
    ({"value": "1_000"}, "line 2: column 'value' holds '1_000'"),
    ({"time_utc": "0001-01-01T00:00:00Z"}, "it takes a UTC time of the years 2000 to 2199"),
    ({"time_utc": "9999-12-31T23:59:59Z"}, "it takes a UTC time of the years 2000 to 2199"),
    ({"verdict": "inconclusive?"}, "it takes pass, fail, void or nothing"),
    ({"better": "LOWER"}, "it takes lower, higher or equal"),
    ({"unit": "parsecs"}, "it takes a unit of hybrid_kv.measure.results.UNITS"),
    (
        {"params": '{"a":' + "[" * 50_000 + "]" * 50_000 + "}"},
        "it takes a JSON object at most 20 levels deep",
    ),
    (
        {"params": '{"a":' + "[" * 20 + "]" * 20 + "}"},
        "it takes a JSON object at most 20 levels deep",
    ),
    ({"params": '{"a":NaN}'}, "its numbers finite"),
    ({"params": '{"a":1e999}'}, "its numbers finite"),
    ({"params": '{"a":' + "9" * 400 + "}"}, "of 64 bits"),
    ({"params": '{"a":"\\ud800"}'}, "it takes a JSON object"),
    ({"machine": "\x1b[2Jbox"}, "it takes printable text"),
    ({"commit": "\u202eabc"}, "it takes printable text"),
    ({"benchmark": "a\x00b"}, "it takes printable text"),
]


@pytest.mark.parametrize(("changes", "message"), BROKEN)
def test_a_row_that_cannot_be_read_names_its_line(
    tmp_path: Path, changes: dict[str, str], message: str
) -> None:
    path = damaged(tmp_path / "r.csv", 2, **changes)
    (problem,) = check_file(path)
    assert message in problem
    assert len(problem) < 300 + len(str(path))
    with pytest.raises(HybridKVError, match=re.escape(message)):
        read_rows(path)


def test_the_deepest_params_can_be_read(tmp_path: Path) -> None:
    path = damaged(tmp_path / "r.csv", 2, params='{"a":' + "[" * 19 + "]" * 19 + "}")
    assert len(read_rows(path)) == 2 and check_file(path) == []


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("1,2", "line 4: a row has 22 fields"),
        ("", "line 4: a row has 22 fields"),
        ('"open' + "," * 21, "line 4: a row has 22 fields"),
        ("," * 22, "line 4: a row has 22 fields"),
        ('"' + "," * 22 + '"', "line 4: a row has 22 fields"),
        ("\udcff", "is not UTF-8"),
    ],
)
def test_lines_that_are_no_rows(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], line: str, message: str
) -> None:
    path = tmp_path / "r.csv"
    append_rows(path, GOOD)
    path.write_bytes(path.read_bytes() + line.encode(errors="surrogateescape") + b"\n")
    with pytest.raises(HybridKVError, match=message):
        read_rows(path)
    assert run(capsys, "results", path, "--check")[0] in (1, 2)


def test_a_row_that_is_there_twice_is_found(tmp_path: Path) -> None:
    path = tmp_path / "r.csv"
    append_rows(path, GOOD)
    path.write_bytes(path.read_bytes() + path.read_bytes().splitlines(keepends=True)[1])
    assert check_file(path) == [f"{path} line 4: the same row as line 2"]


def test_the_repositorys_own_rows(capsys: pytest.CaptureFixture[str]) -> None:
    folder = Path(__file__).resolve().parents[3] / "results"
    assert [problem for file in sorted(folder.glob("*.csv")) for problem in check_file(file)] == []
    assert len(list(folder.glob("*.csv"))) >= 4


FIELDS = {
    '"a"b': "ab",
    'a"b': 'a"b',
    '"a""b"': 'a"b',
    "a\rb": None,
    '"a\nb"': None,
    "NULL": "NULL",
    "é": "é",
}


@pytest.mark.parametrize(("field", "value"), FIELDS.items())
def test_an_odd_field_is_read_as_csv_has_it_or_rejected(
    tmp_path: Path, field: str, value: str | None
) -> None:
    path = damaged(tmp_path / "r.csv", 2, machine="PLACE")
    path.write_bytes(path.read_bytes().replace(b"PLACE", field.encode()))
    if value is None:
        with pytest.raises(HybridKVError, match="line 2: "):
            read_rows(path)
    else:
        assert read_rows(path)["machine"][0] == value


def test_a_file_of_several_parts_is_read_in_order_and_counts_its_lines(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "r.csv"
    for number in range(9):
        append_rows(path, [replace(ROW, value=float(number))])
    monkeypatch.setattr(read, "_PART", 300)
    assert read_rows(path)["value"].tolist() == list(range(9))
    lines = path.read_text().splitlines(keepends=True)
    path.write_text("".join([*lines[:8], lines[8].replace("guard", "\x07"), *lines[9:]]))
    with pytest.raises(HybridKVError, match="line 9: column 'suite' holds"):
        read_rows(path)

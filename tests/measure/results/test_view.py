"""`hybrid-kv results`: what it chooses, prints and refuses."""

from __future__ import annotations

import csv
import io
import json
from pathlib import Path

import pytest

from hybrid_kv.measure.results import read_rows
from tests.cli.run import printed, refused
from tests.measure.dashboard.rows import row, write
from tests.measure.results.rows import RECEIPT, damaged


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Two files, four rows: three days, two commits, a row without a commit."""
    guard = {"suite": "guard", "benchmark": "b", "unit": "", "commit": "a" * 40}
    h200 = {
        "device": "NVIDIA H200",
        "dirty": True,
        "commit": "b" * 40,
        "suite": "s",
        "benchmark": "b",
        "n": 1,
    }
    interval = {"ci_low": 6, "ci_high": 8, "n": 5, "verdict": "fail"}
    made = [
        row(2, **guard, metric="held_blocks", value=3),
        row(0, **h200, metric="t", value=2.0, unit="us", ci_low=1.0, ci_high=3.0)
        | {"params": RECEIPT},
        row(
            1,
            **{**guard, "benchmark": "Other", "commit": ""},
            metric="blocks held",
            value=7,
            **interval,
        ),
        row(1, **guard, metric="μ", value=1),
    ]
    made = [one | {"run_id": f"{i:012x}", "machine": f"box {i}"} for i, one in enumerate(made)]
    write(tmp_path / "rows", made[1::2], "x.csv")
    return write(tmp_path / "rows", made[::2], "y.csv")


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ([], [1, 3, 2, 0]),  # by time; among equals in the order of the files
        (["--suite", "guard"], [3, 2, 0]),
        (["--suite", "guar"], []),
        (["-k", "OTH"], [2]),
        (["-k", "guard/b"], [3, 0]),
        (["-k", "oth", "-k", "s/"], [1, 2]),
        (["--metric", "HELD"], [2, 0]),
        (["--metric", "."], []),
        (["--commit", "aaaa"], [3, 0]),
        (["--commit", "BBBB"], [1]),
        (["--machine", "box 2"], [2]),
        (["--device", "h200"], [1]),
        (["--since", "2026-01-02"], [3, 2, 0]),
        (["--since", "2026-01-02T00:00:01Z"], [0]),
        (["--since", "2026-01-02T01:00:00+01:00"], [3, 2, 0]),
        (["--last", "2"], [2, 0]),
        (["--last", "9" * 30], [1, 3, 2, 0]),
        (["--suite", "guard", "-k", "b", "--last", "1"], [0]),
    ],
)
def test_filters(
    folder: Path, capsys: pytest.CaptureFixture[str], options: list[str], expected: list[int]
) -> None:
    rows = json.loads(printed(capsys, "results", folder, "--json", *options))
    assert [int(row["run_id"], 16) for row in rows] == expected


def test_what_is_printed(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert printed(capsys, "results", folder, "--device", "h200").endswith("\n1 row\n")
    assert printed(capsys, "results", folder, "--since", "2026-01-02").endswith("\n3 rows\n")
    rows = csv.DictReader(
        io.StringIO(printed(capsys, "results", folder, "--csv", "--since", "2026-01-02"))
    )
    assert [int(row["run_id"], 16) for row in rows] == [3, 2, 0]
    (row,) = json.loads(printed(capsys, "results", folder, "--json", "--device", "h200"))
    assert row["params"]["receipt"]["checked_before"] is True and row["dirty"] is True
    assert (row["value"], row["ci_low"], row["n"], row["schema"]) == (2.0, 1.0, 1, 1)
    assert (
        json.loads(printed(capsys, "results", folder, "--json", "--metric", "μ"))[0]["ci_low"]
        is None
    )
    (folder / "z.csv").write_text(printed(capsys, "results", folder / "x.csv", "--csv"))
    assert read_rows(folder / "z.csv").equals(read_rows(folder / "x.csv"))


def test_check_on_the_command_line(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert "0 problems in 2 files" in printed(capsys, "results", folder, "--check")
    damaged(folder / "w.csv", 2, commit="main", baseline_commit="main")
    out = printed(capsys, "results", folder, "--check", code=1)
    assert "w.csv line 2: commit holds 'main'\n" in out and "baseline_commit holds 'main'" in out
    assert "2 problems in 3 files" in out


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["{folder}/none.csv"], "none.csv does not exist; name a CSV"),
        (["{folder}/.."], "no .csv in"),
        (["{folder}", "--since", "yesterday"], "--since yesterday is not a moment"),
        (["{folder}", "--since", "0001-01-01T00:00:00+14:00"], "is not a moment"),
        (["{folder}", "--last", "0"], "--last 0 must be at least 1"),
        (["{folder}", "--json", "--csv"], "exclude each other"),
        (["{folder}", "--check", "--json"], "--check looks at every row"),
        (["{folder}", "--check", "--suite", "s"], "--check looks at every row"),
        (["{folder}", "{other}"], "column 1 must be 'schema', found 'question'"),
        (["{empty}"], "is empty: column 1 must be 'schema'"),
        (["{empty}", "--check"], "is empty"),
    ],
)
def test_bad_questions_are_one_line_and_exit_code_2(
    folder: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    arguments: list[str],
    message: str,
) -> None:
    (tmp_path / "other.txt").write_text("question,answer\n")
    (tmp_path / "empty.txt").touch()
    places = {"folder": folder, "other": tmp_path / "other.txt", "empty": tmp_path / "empty.txt"}
    assert message in refused(
        capsys, "results", *(argument.format(**places) for argument in arguments)
    )

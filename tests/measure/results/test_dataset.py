"""A data set has each row once, in any order of merging; CSV and Parquet answer alike."""

from __future__ import annotations

import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pandas as pd
import pytest

from hybrid_kv.measure.results import append_rows, check_file, dataset, read_rows
from hybrid_kv.measure.results.dataset import export_file, export_rows, merge_rows
from hybrid_kv.measure.results.schema import COLUMNS
from hybrid_kv.measure.results.store import AS_PARQUET
from tests.cli.run import printed, refused, run
from tests.measure.dashboard.kinds import everything
from tests.measure.dashboard.rows import row, write
from tests.measure.results.rows import GOOD, damaged

ROWS = 36  # of days, so of two months


def shards(folder: Path, count: int) -> list[Path]:
    """CSVs of as many machines; neighbours share their last and first row."""
    rows = [
        row(run, {"K": run}, machine=f"box {run % count}", suite=f"s{run % 2}")
        for run in range(ROWS)
    ]
    size = len(rows) // count
    for i in range(count):
        write(folder, rows[max(0, i * size - 1) : (i + 1) * size], f"{i}.csv")
    return sorted(folder.glob("*.csv"))


def cells(path: Path) -> list[tuple[object, ...]]:
    return sorted(read_rows(path).fillna(-1).itertuples(index=False, name=None))


def test_csv_and_parquet_give_the_same_answers(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    files, whole = write(tmp_path / "rows", everything()), tmp_path / "all.parquet"
    out = printed(capsys, "results", "export", files, "--to", whole)
    assert out == f"{whole}: {len(everything())} rows\n"
    for options in (
        [],
        ["--last", "3"],
        ["--suite", "guard", "--json"],
        ["--metric", "time", "--csv"],
    ):
        shown = [
            sorted(printed(capsys, "results", place, *options).splitlines())
            for place in (files, whole)
        ]
        assert shown[0] == shown[1]
    problems = check_file(files / "made.csv")
    assert problems and len(check_file(whole)) == len(problems)


def test_rows_of_one_moment_keep_their_order(tmp_path: Path) -> None:
    names = [f"b{i * 7 % 50}" for i in range(50)]
    files = write(tmp_path / "rows", [row(0, benchmark=name) for name in names])
    export_rows([files / "made.csv"], tmp_path / "all.parquet")
    assert read_rows(tmp_path / "all.parquet")["benchmark"].tolist() == names


@pytest.mark.parametrize("order", [1, -1])
def test_shards_merge_without_loss_or_doubles(tmp_path: Path, order: int) -> None:
    files = shards(tmp_path / "rows", 4)[::order]
    whole = tmp_path / "whole.parquet"
    assert (
        export_rows(files[:1], whole) + sum(merge_rows([file], whole) for file in files[1:]) == ROWS
    )
    assert merge_rows(files, whole) == 0
    assert export_rows([whole, *files], tmp_path / "again.parquet") == ROWS
    assert cells(whole) == cells(tmp_path / "again.parquet")
    assert read_rows(whole).groupby("suite")["time_utc"].is_monotonic_increasing.all()


def test_writers_at_once_lose_and_double_nothing(tmp_path: Path) -> None:
    first, *files = shards(tmp_path / "rows", 6)
    whole = tmp_path / "whole.parquet"
    export_rows([first], whole)
    with ThreadPoolExecutor(5) as pool:
        added = list(pool.map(lambda file: merge_rows([file], whole), files))
    assert sum(added) == ROWS - ROWS // 6
    assert len(set(cells(whole))) == len(cells(whole)) == ROWS


def test_a_merge_that_is_killed_is_repeated(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first, *files = shards(tmp_path / "rows", 3)
    whole, replace, calls = tmp_path / "whole.parquet", os.replace, []
    export_rows([first], whole)

    def dies(*places: Path) -> None:
        calls.append(places)
        if len(calls) == 3:
            raise KeyboardInterrupt
        replace(*places)

    monkeypatch.setattr(dataset.os, "replace", dies)
    with pytest.raises(KeyboardInterrupt):
        merge_rows(files, whole)
    assert ROWS // 3 < len(cells(whole)) < ROWS
    monkeypatch.undo()
    merge_rows(files, whole)
    assert len(set(cells(whole))) == len(cells(whole)) == ROWS


def test_names_that_mean_something_to_a_query_or_a_folder(tmp_path: Path) -> None:
    folder = tmp_path / "it's [a] *place? é"
    suites = ["../up", "a=b/c", "it's", "*", "é", "%2e"]
    write(folder, [row(i, suite=suite) for i, suite in enumerate(suites)])
    export_rows([folder / "made.csv"], folder / "all.parquet")
    merge_rows([folder / "made.csv"], folder / "all.parquet")
    assert sorted(read_rows(folder / "all.parquet")["suite"]) == sorted(suites)
    assert sorted(path.name for path in folder.iterdir()) == ["all.parquet", "made.csv"]


def test_a_folder_may_hold_both_kinds(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    append_rows(tmp_path / "rows" / "a.csv", GOOD)
    append_rows(tmp_path / "b.csv", GOOD[:1])
    export_rows([tmp_path / "b.csv"], tmp_path / "rows" / "b.parquet")
    assert printed(capsys, "results", tmp_path / "rows").endswith("3 rows\n")


def foreign(path: Path) -> None:
    import duckdb

    duckdb.sql("SELECT 1 AS a").write_parquet(str(path))


@pytest.mark.parametrize(
    ("name", "break_it", "said"),
    [
        ("rows.parquet", lambda path: path.write_bytes(path.read_bytes()[:-9]), "rows.parquet'"),
        (
            "schema=1",
            lambda path: path.rename(path.with_name("schema=2")),
            "schema=2; this version reads schema=1",
        ),
        (
            "rows.parquet",
            foreign,
            "rows.parquet holds no rows of `hybrid-kv results export`; this version reads schema 1",
        ),
        (
            "rows.parquet",
            lambda path: path.write_bytes(b""),
            "rows.parquet' too small to be a Parquet file",
        ),
    ],
)
def test_a_damaged_data_set_is_one_line(
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    name: str,
    break_it: Callable[[Path], object],
    said: str,
) -> None:
    place = tmp_path / "all.parquet"
    # enough files for several threads
    write(tmp_path, [row(0, suite=f"s{i}") for i in range(40)], "a.csv")
    export_rows([tmp_path / "a.csv"], place)
    break_it(max(place.rglob(name)))
    for words in (["--last", "1"], ["--check"]):
        error = refused(capsys, "results", place, *words)
        assert len(error) < 600 and str(place) in error and said in error


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ("NULL::BOOLEAN AS dirty", "row 2: column 'dirty' holds None; it takes True or False"),
        ("'[]' AS params", "row 2: column 'params' holds '[]'; it takes a JSON object"),
        ("['a'] AS params", "column 'params' as VARCHAR is missing or not in the schema"),
        (
            "chr(27) || '[2J' AS machine",
            "row 2: column 'machine' holds '\\x1b[2J'; it takes printable text",
        ),
        ("1.5 AS n", "column 'n' as "),
        ("'nan'::DOUBLE AS value", "row 2: column 'value' holds 'nan'"),
        ("'inf'::DOUBLE AS ci_low", "row 2: column 'ci_low' holds 'inf'"),
        ("NULL::DOUBLE AS value", "row 2: column 'value' holds ''"),
    ],
)
def test_a_parquet_file_is_not_believed_for_its_footer(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], change: str, said: str
) -> None:
    import duckdb

    value, _, name = change.partition(" AS ")
    append_rows(tmp_path / "a.csv", GOOD)
    export_file([tmp_path / "a.csv"], tmp_path / "a.parquet")
    rows = f"SELECT * FROM '{tmp_path}/a.parquet'"
    odd = (
        f"CASE WHEN metric = 't' THEN {value} ELSE {name} END AS {name}"
        if "row 2" in said
        else change
    )
    duckdb.sql(
        f"COPY (SELECT * REPLACE ({odd}) FROM ({rows})) TO '{tmp_path}/b.parquet' ({AS_PARQUET})"
    )
    for words in (["--last", "1"], ["export", "--to", tmp_path / "c.parquet"]):
        error = refused(capsys, "results", *words, tmp_path / "b.parquet")
        assert said in error and "b.parquet" in error
    assert run(capsys, "results", "--check", tmp_path / "b.parquet")[0] in (1, 2)


@pytest.mark.parametrize(
    ("place", "target"), [("all", "all"), ("all", "all.parquet/new"), ("all.parquet/in", "all")]
)
def test_a_data_set_is_not_made_of_itself(
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    place: str,
    target: str,
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "all.parquet" / "in.parquet").mkdir(parents=True)
    place, target = f"{place}.parquet", f"{target}.parquet"
    error = refused(capsys, "results", "export", place, "--to", target)
    assert "are one data set, or one is in the other; choose another place" in error
    assert [path.name for path in tmp_path.rglob("*")] == ["all.parquet", "in.parquet"]


def test_what_cannot_be_written_leaves_nothing(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    append_rows(tmp_path / "a.csv", GOOD)
    damaged(tmp_path / "bad.csv", 2, value="fast")
    append_rows(tmp_path / "none.csv", [])
    for words, said in (
        (["export", "--to", tmp_path / "x"], "must end in .parquet"),
        (
            ["merge", "--to", tmp_path / "x.parquet"],
            "is not a data set; `hybrid-kv results export` makes one",
        ),
        (
            ["export", tmp_path / "bad.csv", "--to", tmp_path / "x.parquet"],
            "line 2: column 'value' holds 'fast'",
        ),
        (["export", "--to", "/dev/null/x.parquet"], "/dev/null/x.parquet"),
        (["export", tmp_path / "none.csv", "--to", tmp_path / "x.parquet"], "there are no rows in"),
    ):
        place = [] if len(words) == 4 else [tmp_path / "a.csv"]
        assert said in refused(capsys, "results", *words, *place)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a.csv", "bad.csv", "none.csv"]


def test_pandas_reads_a_data_set_as_the_docs_say(tmp_path: Path) -> None:
    files, whole = write(tmp_path / "rows", everything()), tmp_path / "all.parquet"
    export_rows([files / "made.csv"], whole)
    frame = pd.read_parquet(whole, partitioning=None)
    assert list(frame) == list(COLUMNS)
    assert sorted(frame["run_id"]) == sorted(read_rows(whole)["run_id"])

import csv
import multiprocessing
import os

import pytest

from hybrid_kv import results
from hybrid_kv.config import HybridKVError
from hybrid_kv.results import COLUMNS, Receipt, Row, append_rows, check_writable, read_rows, timing_row

ROW = Row(suite="guard", benchmark="b", metric="held_blocks", value=3, params={"b": 1, "a": [2, 3]})
PROOF = Receipt(checked_before=True, checked_after=True, max_error=0.0)


def test_rows_come_back_as_written(tmp_path):
    path = tmp_path / "new" / "r.csv"
    append_rows(path, [ROW])
    append_rows(
        path, [timing_row(suite="s", benchmark="b", metric="t", value=0.1 + 0.2, unit="ns", ci_low=0.1, receipt=PROOF)]
    )
    frame = read_rows(path)
    assert tuple(frame.columns) == COLUMNS
    assert frame["value"].tolist() == [3, 0.1 + 0.2]
    assert frame["params"][0] == '{"a":[2,3],"b":1}'
    assert '"receipt":{"checked_after":true' in frame["params"][1]
    assert frame["ci_low"].isna().tolist() == [True, False]
    assert frame["baseline_commit"].tolist() == ["", ""]
    assert path.read_text().count("schema") == 1


def _append(path, worker):
    for i in range(500):
        append_rows(
            path, [Row(suite="s", benchmark=f"{worker}-{i}", metric="m", value=i, params={"pad": "x" * (i % 97)})]
        )


def test_concurrent_writers_lose_and_double_nothing(tmp_path, monkeypatch):
    write = os.write
    # Short writes make a missing lock show; 2,000 real fsyncs would take minutes on a busy disk.
    monkeypatch.setattr(results.os, "write", lambda descriptor, data: write(descriptor, data[:100]))
    monkeypatch.setattr(results.os, "fsync", lambda descriptor: None)  # 2,000 real ones take minutes on a busy disk
    path = tmp_path / "r.csv"
    fork = multiprocessing.get_context("fork")
    workers = [fork.Process(target=_append, args=(path, worker)) for worker in range(4)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    assert [worker.exitcode for worker in workers] == [0] * 4
    with path.open() as file:
        rows = list(csv.reader(file))
    assert rows[0] == list(COLUMNS)
    names = [row[COLUMNS.index("benchmark")] for row in rows[1:]]
    assert sorted(names) == sorted(f"{worker}-{i}" for worker in range(4) for i in range(500))


@pytest.mark.parametrize("column", [0, 7, len(COLUMNS) - 1])
def test_a_wrong_header_is_refused_by_file_and_column(tmp_path, column):
    names = list(COLUMNS)
    names[column] = "other"
    path = tmp_path / "old.csv"
    path.write_text(",".join(names) + "\n")
    for use in (read_rows, check_writable, lambda path: append_rows(path, [ROW])):
        with pytest.raises(HybridKVError, match=f"old.csv: column {column + 1} must be '{COLUMNS[column]}'"):
            use(path)
    assert path.read_text() == ",".join(names) + "\n"


@pytest.mark.parametrize("names", [[*COLUMNS, "more"], COLUMNS[:-1]])
def test_missing_and_additional_columns_are_refused(tmp_path, names):
    path = tmp_path / "r.csv"
    path.write_text(",".join(names) + "\n")
    with pytest.raises(HybridKVError, match="column 2"):
        read_rows(path)


def test_another_schema_is_refused(tmp_path, monkeypatch):
    path = tmp_path / "r.csv"
    append_rows(path, [ROW])
    monkeypatch.setattr(results, "SCHEMA", 2)
    with pytest.raises(HybridKVError, match="'schema' holds 1, this version reads 2"):
        read_rows(path)


def test_an_unwritable_place_is_known_before_the_work(tmp_path):
    (tmp_path / "file").write_text("")
    for check in (check_writable, lambda path: append_rows(path, [ROW])):
        with pytest.raises(HybridKVError, match=r"cannot be written to .*choose another file") as error:
            check(tmp_path / "file" / "r.csv")
        assert "\n" not in str(error.value)


def test_checking_leaves_no_file(tmp_path):
    check_writable(tmp_path / "r.csv")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("unit", results.TIME_UNITS)
def test_a_timing_needs_a_receipt(unit):
    values = {"suite": "s", "benchmark": "b", "metric": "m", "value": 1.0, "unit": unit}
    with pytest.raises(ValueError, match="without a receipt"):
        Row(**values)
    with pytest.raises(ValueError, match="before and after"):
        Row(**values, params={"receipt": {"checked_before": True, "checked_after": False, "max_error": 0.0}})
    assert timing_row(**values, receipt=PROOF).params["receipt"]["checked_after"] is True


@pytest.mark.parametrize("error", [float("nan"), float("inf"), -1.0])
def test_a_receipt_proves_something(error):
    with pytest.raises(ValueError, match="proves nothing"):
        Receipt(True, True, error)


@pytest.mark.parametrize("wrong", [{"value": float("nan")}, {"better": "up"}, {"verdict": "ok"}])
def test_rows_refuse_nonsense(wrong):
    with pytest.raises(ValueError, match=next(iter(wrong))):
        Row(**{"suite": "s", "benchmark": "b", "metric": "value", "value": 1.0, **wrong})


def test_provenance_does_not_name_the_host(monkeypatch):
    monkeypatch.delenv("HYBRID_KV_MACHINE", raising=False)
    assert os.uname().nodename not in results._machine()
    monkeypatch.setenv("HYBRID_KV_MACHINE", "h200-a")
    assert results._machine() == "h200-a"


def test_no_git_gives_an_empty_commit(monkeypatch):
    monkeypatch.setenv("PATH", "")
    assert results._commit() == ""

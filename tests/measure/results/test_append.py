"""No row is lost, doubled, mixed or torn, whatever happens to the writers."""

from __future__ import annotations

import csv
import errno
import fcntl
import itertools
import multiprocessing
import os
import signal
from collections.abc import Iterable
from pathlib import Path
from typing import IO

import pytest

from hybrid_kv.config import HybridKVError
from hybrid_kv.measure.results import (
    COLUMNS,
    Row,
    append,
    append_rows,
    check_file,
    check_writable,
    read,
    read_rows,
    timing_row,
)
from hybrid_kv.measure.results.schema import HEADER
from tests.measure.results.rows import PROOF, ROW


def test_rows_come_back_as_written(tmp_path: Path) -> None:
    path = tmp_path / "new" / "r.csv"
    append_rows(path, [ROW])
    append_rows(
        path,
        [
            timing_row(
                suite="s",
                benchmark="b",
                metric="t",
                value=0.1 + 0.2,
                unit="ns",
                ci_low=0.1,
                receipt=PROOF,
            )
        ],
    )
    frame = read_rows(path)
    assert tuple(frame.columns) == COLUMNS
    assert frame["value"].tolist() == [3, 0.1 + 0.2]
    assert frame["params"][0] == '{"a":[2,3],"b":1}'
    assert '"receipt":{"checked_after":true' in frame["params"][1]
    assert frame["ci_low"].isna().tolist() == [True, False]
    assert frame["baseline_commit"].tolist() == ["", ""]
    assert path.read_text().count("schema") == 1


def _rows(worker: int | str, numbers: Iterable[int]) -> list[Row]:
    return [Row("s", f"{worker}-{i}", "m", i, params={"pad": "x" * (i % 97)}) for i in numbers]


def _append(path: Path, worker: int, singles: int, batches: int) -> None:
    for i in range(singles):
        append_rows(path, _rows(worker, [i]))
    for batch in range(batches):
        append_rows(path, _rows(worker, range(singles + 250 * batch, singles + 250 * (batch + 1))))


def _write_at_once(path: Path, writers: int, singles: int, batches: int) -> list[str]:
    """Fork writers that append side by side; return the names of all rows that are in the file."""
    fork = multiprocessing.get_context("fork")
    workers = [
        fork.Process(target=_append, args=(path, worker, singles, batches))
        for worker in range(writers)
    ]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    assert [worker.exitcode for worker in workers] == [0] * writers
    with path.open(newline="") as file:
        rows = list(csv.reader(file))
    assert rows[0] == list(COLUMNS)
    assert {len(row) for row in rows} == {len(COLUMNS)}
    return [row[COLUMNS.index("benchmark")] for row in rows[1:]]


def test_eight_writers_lose_and_double_nothing(tmp_path: Path) -> None:
    names = _write_at_once(tmp_path / "r.csv", writers=8, singles=100, batches=4)
    assert len(names) == 8_800
    assert set(names) == {f"{worker}-{i}" for worker in range(8) for i in range(1_100)}
    # A batch stays together: the rows of a writer are in its order, and its neighbours are its own.
    changes = sum(
        before.split("-")[0] != after.split("-")[0] for before, after in itertools.pairwise(names)
    )
    assert changes < 8 * (100 + 4)
    for worker in range(8):
        own = [int(name.split("-")[1]) for name in names if name.startswith(f"{worker}-")]
        assert own == sorted(own)
    frame = read_rows(tmp_path / "r.csv")
    assert frame["benchmark"].tolist() == names


def test_split_writes_do_not_mix(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write = os.write
    # The kernel may take a part of a write only; without a lock, another process would get in
    # between.
    monkeypatch.setattr(append.os, "write", lambda descriptor, data: write(descriptor, data[:100]))
    names = _write_at_once(tmp_path / "r.csv", writers=4, singles=250, batches=0)
    assert sorted(names) == sorted(f"{worker}-{i}" for worker in range(4) for i in range(250))


def _killed_while_appending(path: Path, rows: list[Row], size: int) -> None:
    """Let another process append and die by SIGKILL when `size` bytes are written."""

    def work() -> None:
        write = os.write

        def torn(descriptor: int, data: bytes) -> None:
            write(descriptor, bytes(data[:size]))
            os.kill(os.getpid(), signal.SIGKILL)

        append.os.write = torn
        append_rows(path, rows)

    child = multiprocessing.get_context("fork").Process(target=work)
    child.start()
    child.join()
    assert child.exitcode == -signal.SIGKILL


@pytest.mark.parametrize("share", [0.0, 0.002, 0.01, 0.4, 0.999])
@pytest.mark.parametrize("before", [0, 3])
def test_a_killed_writer_leaves_a_file_that_reads_and_grows(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, before: int, share: float
) -> None:
    path = tmp_path / "r.csv"
    if before:
        append_rows(path, _rows("old", range(before)))
    batch = _rows("killed", range(100))
    data = append.encode_rows(batch, {}) if before else HEADER + append.encode_rows(batch, {})
    size = int(share * len(data))
    _killed_while_appending(path, batch, size)

    whole = data[:size].count(b"\n") - (0 if before else 1)
    expected = [f"old-{i}" for i in range(before)] + [f"killed-{i}" for i in range(whole)]
    torn = bool(size) and data[:size][-1:] != b"\n"
    if whole >= 0:
        assert read_rows(path)["benchmark"].tolist() == expected
        assert ("a last line without an end is left out" in caplog.text) == torn
    else:
        with pytest.raises(HybridKVError, match="is empty"):
            read_rows(path)
    check_writable(path)
    caplog.clear()
    append_rows(path, _rows("next", range(2)))
    assert ("a last line without an end was cut off" in caplog.text) == torn
    caplog.clear()
    assert read_rows(path)["benchmark"].tolist() == [*expected, "next-0", "next-1"]
    assert check_file(path) == [] and not caplog.text


def test_a_torn_line_longer_than_a_read_is_cut_off(tmp_path: Path) -> None:
    path = tmp_path / "r.csv"
    append_rows(path, [ROW])
    whole = path.read_bytes()
    for length in (65535, 65536, 65537, 200_000):
        path.write_bytes(whole + b"x" * length)
        append_rows(path, [])
        assert path.read_bytes() == whole


def test_a_reader_waits_for_a_writer_at_work(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "r.csv"
    append_rows(path, [ROW])
    half = append.encode_rows([ROW], {})
    released, release = multiprocessing.Pipe(duplex=False)
    ready, report = multiprocessing.Pipe(duplex=False)

    def work() -> None:
        with path.open("ab", buffering=0) as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            file.write(half[:50])
            report.send("locked")
            released.recv()
            file.write(half[50:])

    child = multiprocessing.get_context("fork").Process(target=work)
    child.start()
    ready.recv()
    flock = fcntl.flock

    def locked(file: IO[bytes], kind: int) -> None:
        release.send("go on")
        flock(file, kind)

    monkeypatch.setattr(read.fcntl, "flock", locked)
    try:
        assert len(read_rows(path)) == 2
        assert not caplog.text
    finally:
        release.send("go on")
        child.join()


@pytest.mark.parametrize(
    "failure", [OSError(errno.ENOSPC, "No space left on device"), KeyboardInterrupt()]
)
@pytest.mark.parametrize("before", [0, 1])
def test_a_write_that_fails_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, failure: BaseException, before: int
) -> None:
    path = tmp_path / "r.csv"
    if before:
        append_rows(path, [ROW])
    content = path.read_bytes() if before else b""
    write, calls = os.write, []

    def fails(descriptor: int, data: bytes) -> int:
        calls.append(data)
        if len(calls) > 1:
            raise failure
        return write(descriptor, data[:700])

    monkeypatch.setattr(append.os, "write", fails)
    with pytest.raises((HybridKVError, KeyboardInterrupt)) as raised:
        append_rows(path, [ROW] * 9)
    assert path.read_bytes() == content
    if isinstance(failure, OSError):
        assert "cannot be written" in str(raised.value) and "No space left" in str(raised.value)


def test_an_unwritable_place_is_known_before_the_work(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    for check in (check_writable, lambda path: append_rows(path, [ROW])):
        with pytest.raises(
            HybridKVError, match=r"cannot be written to .*choose another file"
        ) as error:
            check(tmp_path / "file" / "r.csv")
        assert "\n" not in str(error.value)


def test_checking_leaves_no_file(tmp_path: Path) -> None:
    check_writable(tmp_path / "r.csv")
    assert list(tmp_path.iterdir()) == []

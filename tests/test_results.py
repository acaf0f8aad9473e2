import csv
import errno
import fcntl
import io
import itertools
import json
import multiprocessing
import os
import signal
from pathlib import Path

import pytest

from hybrid_kv import results
from hybrid_kv.cli import main
from hybrid_kv.config import HybridKVError
from hybrid_kv.results import COLUMNS, Receipt, Row, append_rows, check_file, check_writable, read_rows, timing_row

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


def _rows(worker, numbers):
    return [Row("s", f"{worker}-{i}", "m", i, params={"pad": "x" * (i % 97)}) for i in numbers]


def _append(path, worker, singles, batches):
    for i in range(singles):
        append_rows(path, _rows(worker, [i]))
    for batch in range(batches):
        append_rows(path, _rows(worker, range(singles + 250 * batch, singles + 250 * (batch + 1))))


def _write_at_once(path, writers, singles, batches):
    """Fork writers that append side by side; return the names of all rows that are in the file."""
    fork = multiprocessing.get_context("fork")
    workers = [fork.Process(target=_append, args=(path, worker, singles, batches)) for worker in range(writers)]
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


def test_eight_writers_of_10000_rows_lose_and_double_nothing(tmp_path):
    names = _write_at_once(tmp_path / "r.csv", writers=8, singles=500, batches=38)
    assert len(names) == 80_000
    assert set(names) == {f"{worker}-{i}" for worker in range(8) for i in range(10_000)}
    # A batch stays together: the rows of a writer are in its order, and its neighbours are its own.
    changes = sum(before.split("-")[0] != after.split("-")[0] for before, after in itertools.pairwise(names))
    assert changes < 8 * (500 + 38)
    for worker in range(8):
        own = [int(name.split("-")[1]) for name in names if name.startswith(f"{worker}-")]
        assert own == sorted(own)
    frame = read_rows(tmp_path / "r.csv")
    assert frame["benchmark"].tolist() == names


def test_split_writes_do_not_mix(tmp_path, monkeypatch):
    write = os.write
    # The kernel may take a part of a write only; without a lock, another process would get in between.
    monkeypatch.setattr(results.os, "write", lambda descriptor, data: write(descriptor, data[:100]))
    names = _write_at_once(tmp_path / "r.csv", writers=4, singles=250, batches=0)
    assert sorted(names) == sorted(f"{worker}-{i}" for worker in range(4) for i in range(250))


def _killed_while_appending(path, rows, size):
    """Let another process append and die by SIGKILL when `size` bytes are written."""

    def work():
        write = os.write

        def torn(descriptor, data):
            write(descriptor, bytes(data[:size]))
            os.kill(os.getpid(), signal.SIGKILL)

        results.os.write = torn
        append_rows(path, rows)

    child = multiprocessing.get_context("fork").Process(target=work)
    child.start()
    child.join()
    assert child.exitcode == -signal.SIGKILL


@pytest.mark.parametrize("share", [0.0, 0.002, 0.01, 0.4, 0.999])
@pytest.mark.parametrize("before", [0, 3])
def test_a_killed_writer_leaves_a_file_that_reads_and_grows(tmp_path, caplog, before, share):
    path = tmp_path / "r.csv"
    if before:
        append_rows(path, _rows("old", range(before)))
    batch = _rows("killed", range(100))
    data = results._encoded(batch, {}) if before else results._HEADER + results._encoded(batch, {})
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


def test_a_torn_line_longer_than_a_read_is_cut_off(tmp_path):
    path = tmp_path / "r.csv"
    append_rows(path, [ROW])
    whole = path.read_bytes()
    for length in (65535, 65536, 65537, 200_000):
        path.write_bytes(whole + b"x" * length)
        append_rows(path, [])
        assert path.read_bytes() == whole


def test_a_reader_waits_for_a_writer_at_work(tmp_path, monkeypatch, caplog):
    path = tmp_path / "r.csv"
    append_rows(path, [ROW])
    half = results._encoded([ROW], {})
    told, tell = multiprocessing.Pipe(duplex=False)
    ready, report = multiprocessing.Pipe(duplex=False)

    def work():
        with path.open("ab", buffering=0) as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            file.write(half[:50])
            report.send(True)
            told.recv()
            file.write(half[50:])

    child = multiprocessing.get_context("fork").Process(target=work)
    child.start()
    ready.recv()
    flock = fcntl.flock

    def asked(file, kind):
        tell.send(True)
        flock(file, kind)

    monkeypatch.setattr(results.fcntl, "flock", asked)
    try:
        assert len(read_rows(path)) == 2
        assert not caplog.text
    finally:
        tell.send(True)
        child.join()


@pytest.mark.parametrize("failure", [OSError(errno.ENOSPC, "No space left on device"), KeyboardInterrupt()])
@pytest.mark.parametrize("before", [0, 1])
def test_a_write_that_fails_leaves_nothing(tmp_path, monkeypatch, failure, before):
    path = tmp_path / "r.csv"
    if before:
        append_rows(path, [ROW])
    content = path.read_bytes() if before else b""
    write, calls = os.write, []

    def fails(descriptor, data):
        calls.append(data)
        if len(calls) > 1:
            raise failure
        return write(descriptor, data[:700])

    monkeypatch.setattr(results.os, "write", fails)
    with pytest.raises((HybridKVError, KeyboardInterrupt)) as raised:
        append_rows(path, [ROW] * 9)
    assert path.read_bytes() == content
    if isinstance(failure, OSError):
        assert "cannot be written" in str(raised.value) and "No space left" in str(raised.value)


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
    with pytest.raises(HybridKVError, match="line 2: column 'schema' holds 1, this version reads 2"):
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


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        ({"value": float("nan")}, "value"),
        ({"better": "up"}, "better"),
        ({"verdict": "ok"}, "verdict"),
        ({"metric": "a\nb"}, "metric"),
        ({"benchmark": "a\r"}, "benchmark"),
        ({"ci_low": 0.0, "ci_high": float("inf")}, "0.0 to inf is no interval"),
        ({"params": {"limit": float("nan")}}, "JSON"),
    ],
)
def test_rows_refuse_nonsense(wrong, said):
    with pytest.raises(ValueError, match=said):
        Row(**{"suite": "s", "benchmark": "b", "metric": "value", "value": 1.0, **wrong})


def test_provenance_does_not_name_the_host(monkeypatch):
    monkeypatch.delenv("HYBRID_KV_MACHINE", raising=False)
    assert os.uname().nodename not in results._machine()
    monkeypatch.setenv("HYBRID_KV_MACHINE", "h200-a\n b ")
    assert results._machine() == "h200-a b"


def test_no_git_gives_an_empty_commit(monkeypatch):
    monkeypatch.setenv("PATH", "")
    assert results._commit() == ""


# ------------------------------------------------------------------------------------- checks of whole files

GOOD = [
    ROW,
    timing_row(suite="s", benchmark="b", metric="t", value=2.0, unit="us", ci_low=1.0, ci_high=3.0, receipt=PROOF),
]
RECEIPT = '{"receipt":{"checked_after":true,"checked_before":true,"max_error":0.0}}'


def _damaged(path, line, **changes):
    """A good file in which fields of a line are others."""
    append_rows(path, GOOD)
    with path.open(newline="") as file:
        rows = list(csv.DictReader(file))
    rows[line - 2] |= changes
    text = io.StringIO()
    writer = csv.DictWriter(text, COLUMNS, lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    path.write_text(text.getvalue())
    return path


@pytest.mark.parametrize(
    ("line", "changes", "message"),
    [
        (3, {"params": "{}"}, "is a timing without a receipt"),
        (3, {"params": RECEIPT.replace("0.0", "-1.0")}, "proves nothing"),
        (3, {"params": RECEIPT.replace("true", "false")}, "before and after"),
        (3, {"params": '{"receipt":{"checked_after":true}}'}, "missing"),
        (2, {"unit": "usec"}, "unit 'usec' is unknown; add it to"),
        (2, {"unit": "ns"}, "without a receipt"),
        (2, {"verdict": "passed"}, "verdict='passed'"),
        (2, {"better": "more"}, "better='more'"),
        (2, {"value": "nan"}, "'value' holds 'nan'"),
        (2, {"value": "inf"}, "'value' holds 'inf'"),
        (3, {"ci_low": "4"}, "4.0 to 3.0 is no interval"),
        (3, {"ci_low": ""}, "nan to 3.0 is no interval"),
        (3, {"ci_high": "inf"}, "'ci_high' holds 'inf'"),
        (2, {"n": "-1"}, "n is -1"),
        (2, {"params": "[]"}, "'params' holds '[]'"),
        (2, {"params": "{"}, "'params' holds '{'"),
        (2, {"params": ""}, "'params' holds ''"),
        (2, {"params": '{"b": 1}'}, "not compact JSON with sorted keys"),
        (2, {"params": '{"b":1,"a":2}'}, "not compact JSON with sorted keys"),
        (2, {"params": '{"a":[{"model":"/home/me/model"}]}'}, "names a place on a machine: '/home/me/model'"),
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
def test_a_row_that_breaks_the_schema_is_found(tmp_path, line, changes, message):
    path = _damaged(tmp_path / "r.csv", line, **changes)
    (problem,) = check_file(path)
    assert problem.startswith(f"{path} line {line}: ") and message in problem


BROKEN = [
    ({"value": "fast"}, "line 2: column 'value' holds 'fast'"),
    ({"value": ""}, "line 2: column 'value' holds ''"),
    ({"dirty": "no"}, "line 2: column 'dirty' holds 'no'"),
    ({"n": "2.5"}, "line 2: column 'n' holds '2.5'"),
    ({"ci_low": "?"}, "line 2: column 'ci_low' holds '?'"),
    ({"schema": "2"}, "line 2: column 'schema' holds 2, this version reads 1"),
]


@pytest.mark.parametrize(("changes", "message"), BROKEN)
def test_a_row_that_cannot_be_read_names_its_line(tmp_path, changes, message):
    path = _damaged(tmp_path / "r.csv", 2, **changes)
    (problem,) = check_file(path)
    assert message in problem
    with pytest.raises(HybridKVError, match=message.replace("?", r"\?")):
        read_rows(path)


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("1,2", "line 4: 2 fields instead of 22"),
        ("", "line 4: 0 fields"),
        ('"open' + "," * 21, "line 4: unexpected end of data"),
        ("," * 22, "line 4: 23 fields"),
        ("\udcff", "is not UTF-8"),
    ],
)
def test_lines_that_are_no_rows(tmp_path, line, message):
    path = tmp_path / "r.csv"
    append_rows(path, GOOD)
    path.write_bytes(path.read_bytes() + line.encode(errors="surrogateescape") + b"\n")
    with pytest.raises(HybridKVError, match=message):
        read_rows(path)
    assert _run("results", path, "--check")[0] in (1, 2)


def test_a_row_that_is_there_twice_is_found(tmp_path):
    path = tmp_path / "r.csv"
    append_rows(path, GOOD)
    path.write_bytes(path.read_bytes() + path.read_bytes().splitlines(keepends=True)[1])
    assert check_file(path) == [f"{path} line 4: the same row as line 2"]


def test_the_repositorys_own_rows(capsys):
    folder = Path(__file__).resolve().parents[1] / "results"
    assert [problem for file in sorted(folder.glob("*.csv")) for problem in check_file(file)] == []
    assert len(list(folder.glob("*.csv"))) >= 4


# --------------------------------------------------------------------------------------- hybrid-kv results


def _run(*arguments):
    with pytest.raises(SystemExit) as stop:
        main([str(argument) for argument in arguments])
    return stop.value.code or 0, stop


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """Two files, four rows: three days, two commits, a row without a commit."""
    times = iter(["2026-11-03", "2026-11-01", "2026-11-02", "2026-11-02"])
    made = [
        (ROW, "a" * 40, "cpu"),
        (GOOD[1], "b" * 40, "NVIDIA H200"),
        (Row("guard", "Other", "blocks held", 7, ci_low=6, ci_high=8, n=5, verdict="fail"), "", "cpu"),
        (Row("guard", "b", "μ", 1), "a" * 40, "cpu"),
    ]
    for i, (row, commit, device) in enumerate(made):
        changed = results.Provenance(f"{i:012x}", commit, bool(i == 1), device, f"box {i}", "3.11", "2.13", "")
        monkeypatch.setattr(results, "provenance", lambda changed=changed: changed)
        file = tmp_path / "rows" / ("x.csv" if i % 2 else "y.csv")
        append_rows(file, [row])
        day = next(times)
        lines = file.read_text().splitlines(keepends=True)
        fields = lines[-1].split(",", 3)
        file.write_text("".join(lines[:-1]) + ",".join([*fields[:2], f"{day}T12:00:00Z", fields[3]]))
    return tmp_path / "rows"


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ([], [1, 3, 2, 0]),  # by time; among equals in the order of the files
        (["--suite", "guard"], [3, 2, 0]),
        (["--suite", "guar"], []),
        (["--benchmark", "oth"], [2]),
        (["--metric", "HELD"], [2, 0]),
        (["--metric", "."], []),
        (["--commit", "aaaa"], [3, 0]),
        (["--commit", "BBBB"], [1]),
        (["--machine", "box 2"], [2]),
        (["--device", "h200"], [1]),
        (["--since", "2026-11-02"], [3, 2, 0]),
        (["--since", "2026-11-02T12:00:01Z"], [0]),
        (["--since", "2026-11-02T13:00:00+01:00"], [3, 2, 0]),
        (["--last", "2"], [2, 0]),
        (["--last", "9"], [1, 3, 2, 0]),
        (["--suite", "guard", "--benchmark", "b", "--last", "1"], [0]),
    ],
)
def test_filters(folder, capsys, options, expected):
    assert _run("results", folder, "--json", *options)[0] == 0
    rows = json.loads(capsys.readouterr().out)
    assert [int(row["run_id"], 16) for row in rows] == expected
    assert _run("results", folder, "--csv", *options)[0] == 0
    printed = list(csv.DictReader(io.StringIO(capsys.readouterr().out)))
    assert [int(row["run_id"], 16) for row in printed] == expected
    assert _run("results", folder, *options)[0] == 0
    assert capsys.readouterr().out.endswith(f"{len(expected)} row{'s' * (len(expected) != 1)}\n")


def test_what_is_printed(folder, capsys):
    _run("results", folder)
    printed = capsys.readouterr().out
    for part in (
        "2026-11-01T12:00:00Z  bbbbbbbbbb*  s: b  NVIDIA H200",
        "2026-11-02T12:00:00Z  no commit  guard: Other  cpu",
        "  blocks held  7  6 to 8  (n=5)  fail\n",
        "  t  2 us  1 to 3  (n=1)\n",
        "a=[2, 3], b=1",
    ):
        assert part in printed
    assert "receipt" not in printed
    _run("results", folder, "--json", "--device", "h200")
    (row,) = json.loads(capsys.readouterr().out)
    assert row["params"]["receipt"]["checked_before"] is True and row["dirty"] is True
    assert (row["value"], row["ci_low"], row["n"], row["schema"]) == (2.0, 1.0, 1, 1)
    _run("results", folder, "--json", "--metric", "μ")
    assert json.loads(capsys.readouterr().out)[0]["ci_low"] is None
    _run("results", folder / "x.csv", "--csv")
    copied = capsys.readouterr().out
    (folder / "z.csv").write_text(copied)
    assert read_rows(folder / "z.csv").equals(read_rows(folder / "x.csv"))


def test_check_on_the_command_line(folder, capsys):
    assert _run("results", folder, "--check")[0] == 0
    assert "0 problems in 2 files" in capsys.readouterr().out
    _damaged(folder / "w.csv", 2, verdict="passed", n="-1")
    assert _run("results", folder, "--check")[0] == 1
    printed = capsys.readouterr().out
    assert "w.csv line 2: n is -1\n" in printed and "verdict='passed'" in printed and "2 problems in 3 files" in printed


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["{folder}/none.csv"], "none.csv does not exist; name a CSV"),
        (["{folder}/.."], "no .csv in"),
        (["{folder}", "--since", "yesterday"], "--since yesterday is no moment"),
        (["{folder}", "--last", "0"], "--last 0 must be at least 1"),
        (["{folder}", "--json", "--csv"], "exclude each other"),
        (["{folder}", "--check", "--json"], "--check looks at every row"),
        (["{folder}", "--check", "--suite", "s"], "--check looks at every row"),
        (["{folder}", "{other}"], "column 1 must be 'schema', found 'question'"),
        (["{empty}"], "is empty: column 1 must be 'schema'"),
        (["{empty}", "--check"], "is empty"),
    ],
)
def test_bad_questions_are_one_line_and_exit_code_2(folder, tmp_path, capsys, arguments, message):
    (tmp_path / "other.txt").write_text("question,answer\n")
    (tmp_path / "empty.txt").touch()
    places = {"folder": folder, "other": tmp_path / "other.txt", "empty": tmp_path / "empty.txt"}
    assert _run("results", *(argument.format(**places) for argument in arguments))[0] == 2
    printed = capsys.readouterr()
    assert printed.out == "" and printed.err.count("\n") == 1 and message in printed.err

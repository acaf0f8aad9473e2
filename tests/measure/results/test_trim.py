"""Only the newest run of each benchmark stays, line by line as it was."""

from __future__ import annotations

from pathlib import Path

import pytest

from hybrid_kv.measure.results import read_rows
from tests.cli.run import printed, refused
from tests.measure.dashboard.rows import row, write


def test_the_newest_run_of_each_benchmark_stays(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    rows = [
        row(run, {"K": k}, benchmark=name) for run in (0, 1) for name in ("a", "b") for k in (1, 3)
    ]
    rows += [row(2, benchmark="a"), row(0, benchmark="a", machine="other")]
    rows += [row(run, {"shape": shape}, suite="kernels") for run, shape in ((0, 1), (0, 2), (1, 2))]
    file = write(tmp_path, rows) / "made.csv"
    before = file.read_text().splitlines()
    assert printed(capsys, "results", "trim", file) == f"{file}: 6 of 13 rows kept\n"
    kept = read_rows(file)
    cells = list(
        zip(kept["run_id"], kept["benchmark"], kept["params"], kept["machine"], strict=True)
    )
    assert cells == [
        ("run00001", "b", '{"K": 1}', "box"),
        ("run00001", "b", '{"K": 3}', "box"),
        ("run00002", "a", "{}", "box"),
        ("run00000", "a", "{}", "other"),
        ("run00000", "slots", '{"shape": 1}', "box"),
        ("run00001", "slots", '{"shape": 2}', "box"),
    ]
    assert set(file.read_text().splitlines()) <= set(before)
    assert "is not a CSV" in refused(capsys, "results", "trim", tmp_path)

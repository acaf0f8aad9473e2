"""A study that is stopped, whose cells fail or are lost: each row is there once at the end."""

import json
import os
from collections.abc import Iterator, Sequence
from concurrent.futures import CancelledError
from pathlib import Path

import pytest
import yaml

from hybrid_kv.measure.results.store import read_rows
from hybrid_kv.measure.study.cell import Done, Running, run_cell
from hybrid_kv.measure.study.matrix import StudyCell
from hybrid_kv.measure.study.run import gather, locally, run_study
from tests.cli import run as cli
from tests.measure.study.conftest import Study


def test_what_was_done_is_not_run_again_and_no_row_is_doubled(study: Study, tmp_path: Path) -> None:
    cells = study("guard --n={n}", levels=range(4))
    reported: list[str] = []

    def interrupted(some: Sequence[StudyCell]) -> Iterator[tuple[StudyCell, Done]]:
        for number, one in enumerate(locally(2, 60)(some)):
            if number == 2:
                raise KeyboardInterrupt
            yield one

    with pytest.raises(KeyboardInterrupt):
        run_study(cells, tmp_path, interrupted, 0, lambda cell, _: reported.append(cell.id))
    assert gather(tmp_path, cells) == 2
    run_study(cells, tmp_path, locally(2, 60), 0, lambda cell, _: reported.append(cell.id))
    assert sorted(reported) == sorted(cell.id for cell in cells), "each cell is reported once"
    assert (gather(tmp_path, cells), gather(tmp_path, cells)) == (2, 0)
    assert sorted(read_rows(tmp_path / "rows.parquet")["value"]) == [0, 1, 4, 9]


def test_a_cell_that_died_is_tried_again_and_one_that_refused_is_not(
    study: Study, tmp_path: Path
) -> None:
    cells = study(f"guard once {tmp_path / 'marker'}", "guard refused", "guard failed")
    codes = []
    known = run_study(cells, tmp_path, locally(1, 60), 2, lambda _, done: codes.append(done.code))
    assert codes == [70, 2, 1, 0]
    assert [known[cell.id]["code"] for cell in cells] == [0, 2, 1]
    assert "error: no such thing" in known[cells[1].id]["said"]


def test_an_interrupt_ends_running_cells(study: Study, tmp_path: Path) -> None:
    marker = tmp_path / "pid"
    cells = study(f"guard sleep {marker}", "guard --n={n}", levels=(1, 2))

    def report(cell: StudyCell, done: Done) -> None:
        if cell.text == "guard --n=2":
            # Until the first cell, which sleeps for ten minutes, has begun to.
            while not (marker.exists() and marker.read_text()):
                pass
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run_study(cells, tmp_path, locally(2, 600), 0, report)
    with pytest.raises(ProcessLookupError):
        os.kill(int(marker.read_text()), 0)
    assert gather(tmp_path, cells) == 1


def test_what_was_ended_starts_no_more_cells(study: Study) -> None:
    (cell,) = study("guard --n=1")
    running = Running()
    running.end_all()
    with pytest.raises(CancelledError):
        run_cell(cell.command, 60, 1, running)


def test_a_cell_ends_when_its_time_is_up(study: Study, tmp_path: Path) -> None:
    (cell,) = study(f"guard sleep {tmp_path / 'pid'}")
    done = run_cell(cell.command, 1, 1)
    assert done.code == -9 and not done.is_result and not done.files


def test_a_lost_cell_has_no_folder(study: Study, tmp_path: Path) -> None:
    cells = study("guard --n={n}", levels=(3,))
    lost = Done(None, {}, "the node died", 0.0)
    known = run_study(
        cells, tmp_path, lambda some: iter([(cell, lost) for cell in some]), 1, lambda *_: None
    )
    assert known[cells[0].id] == {"command": "guard --n=3", "code": None, "said": "the node died"}
    assert not any((tmp_path / "cells").iterdir()) and gather(tmp_path, cells) == 0


def test_the_command_says_what_failed_and_where_rows_are(
    study: Study,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    study("guard --n={n}", "guard failed", levels=(1, 2))
    code, out, err = cli.run(capsys, "study", "study.yaml", "--jobs", "2", "--out", "out.json")
    assert code == 1 and "2 of 3 cells fine, 1 failed" in out and "failed: guard failed: " in out
    assert "3 new rows in out/study/study/rows.parquet" in out and "guard --n=2: fine after" in err
    assert len(json.loads(Path("out.json").read_text())["cells"]) == 3
    for run, code, said in (
        ("refused", 2, "could not run: guard refused: error: no such"),
        ("void", 3, "void: guard"),
    ):
        study(f"guard {run}")
        found, out, _ = cli.run(capsys, "study", "study.yaml")
        assert found == code and said in out


@pytest.mark.parametrize(
    ("run", "said"),
    [
        ("accuracy --limt 5", "--limt"),
        ("guard --jobs many", "'--jobs'"),
        ("kernels --help", "has --help"),
    ],
)
def test_options_that_a_command_does_not_have_are_refused_before_the_cells(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], run: str, said: str
) -> None:
    (tmp_path / "study.yaml").write_text(
        yaml.safe_dump({"runs": ["kernels", "guard --quick --only K=3", run]})
    )
    assert said in cli.refused(capsys, "study", tmp_path / "study.yaml", "--dry")


def test_a_dry_run_lists_the_cells(
    study: Study, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    cells = study("guard --n={n}", levels=(1, 2))
    code, out, _ = cli.run(capsys, "study", tmp_path / "study.yaml", "--dry")
    assert code == 0 and out.splitlines() == [f"{cell.id}  {cell.text}" for cell in cells]

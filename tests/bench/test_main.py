"""What `python -m bench` prints, writes and returns."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from bench.__main__ import main
from bench.harness import command
from bench.harness.cells import Cell, Count, grid
from bench.harness.registry import cells
from hybrid_kv.errors import CheckFailedError, HybridKVError
from hybrid_kv.measure.results import read_rows
from tests.support.cells import cell, failing_after, steady

Registry = Callable[..., None]


@pytest.fixture
def registry(monkeypatch: pytest.MonkeyPatch) -> Registry:
    def use(*made: Cell) -> None:
        monkeypatch.setattr(
            command, "cells", lambda quick: [one for one in made if one.quick or not quick]
        )
        monkeypatch.setattr(command, "unavailable", dict)

    return use


def test_the_command_prints_and_appends(
    registry: Registry, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    rivals = grid(
        "offload", "rivals", "cpu", lambda seed, **_: steady(), {"subject": ("r", "engine")}, [()]
    )
    count = replace(
        cell(lambda: {"blocks": Count(1234, "blocks")}, "count", mode="all"), benchmark="held"
    )
    registry(*rivals, cell(steady, x=1), count)
    out = tmp_path / "r.csv"
    assert main(["--quick", "--out", str(out)]) == 0
    printed = capsys.readouterr().out
    assert "offload/rivals, cpu time (how many times that of engine)" in printed
    assert "1,234" in printed and "blocks, blocks" in printed and "largest error" in printed
    frame = read_rows(out)
    assert list(frame["metric"]) == [
        "cpu_time",
        "ratio_to_engine",
        "cpu_time",
        "cpu_time",
        "blocks",
    ]
    timed = frame[frame["unit"].isin(["ns", "time ratio"])]
    assert all(json.loads(text)["receipt"]["checked_after"] for text in timed["params"])


def test_a_wrong_result_fails_and_writes_nothing_of_its_group(
    registry: Registry, tmp_path: Path
) -> None:
    registry(cell(steady, x=1), cell(lambda: failing_after(1), x=2))
    out = tmp_path / "r.csv"
    with pytest.raises(
        CheckFailedError, match=r"error: offload/b\[x=2\]: the injected mistake; nothing was timed"
    ):
        main(["--out", str(out)])
    assert len(read_rows(out)) == 1


def test_suites_and_tiers_are_chosen(
    registry: Registry, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    registry(
        cell(steady, x=1),
        cell(lambda: {"blocks": Count(3, "blocks")}, "count", x=1),
        cell(None, "gpu", x=1),
    )
    monkeypatch.setattr(command, "unavailable", lambda: {"memory": "ImportError: no plan"})
    assert main(["--tier", "count"]) == 0
    out, err = capsys.readouterr()
    assert "cpu time" not in out and "no memory: ImportError: no plan" in err
    assert main(["--suite", "offload"]) == 0
    assert "1 cells need a GPU" in capsys.readouterr().err
    for arguments in (["--tier", "gpu"], ["--suite", "memory"]):
        with pytest.raises(HybridKVError, match="runs on this machine"):
            main(arguments)


def test_an_unwritable_file_is_refused_before_the_work(registry: Registry, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    registry(cell(lambda: pytest.fail("ran"), x=1))
    with pytest.raises(HybridKVError, match="file"):
        main(["--out", str(tmp_path / "file" / "r.csv")])


def test_units_are_those_that_results_know() -> None:
    known = sys.modules["hybrid_kv.measure.results"].UNITS
    assert {unit for one in cells() for unit in one.units.values()} <= known


def test_cells_are_chosen_by_a_part_of_their_name_and_printed_as_json(
    registry: Registry, capsys: pytest.CaptureFixture[str]
) -> None:
    registry(cell(steady, x=1), cell(steady, x=22))
    assert main(["-k", "X=22", "--json"]) == 0
    (row,) = json.loads(capsys.readouterr().out)
    assert (row["suite"], row["metric"], row["params"]["x"]) == ("offload", "cpu_time", 22)
    with pytest.raises(HybridKVError, match="no cell of nothing runs on this machine"):
        main(["-k", "nothing"])


def test_a_broken_promise_leaves_the_json_whole(
    registry: Registry, capsys: pytest.CaptureFixture[str]
) -> None:
    registry(cell(steady, subject="engine"), cell(steady, promise=1e9, subject="rival"))
    assert main(["--json"]) == 1
    printed = capsys.readouterr()
    assert len(json.loads(printed.out)) == 3 and "needs 1000000000.0" in printed.err

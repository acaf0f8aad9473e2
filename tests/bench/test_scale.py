"""`python -m bench.scale`: each cost is a line; those of Ray only where it is installed."""

from __future__ import annotations

import re

import pytest

from bench import scale


def test_each_cost_is_a_line(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    cells = []
    monkeypatch.setattr(scale, "SEEDS_PER_BATCH", 1)
    monkeypatch.setattr(scale, "SHARD_ROWS", 10)
    monkeypatch.setattr(scale, "find_spec", lambda _: None)
    monkeypatch.setattr(scale, "run_cell", lambda command, *_: cells.append(command("")))
    assert scale.main(["--tasks", "2", "--rows", "100"]) == 0
    head, _, *lines = capsys.readouterr().out.splitlines()
    assert head == "| what | CPU ms of one |" and len(lines) == 7 and "there already" in lines[-1]
    assert all(re.fullmatch(r"\| .+ \| \d[\d.e+-]* \|", line) for line in lines)
    assert {command[1:] for command in map(tuple, cells)} == {("-c", ""), ("-c", "import hybrid_kv.guard.run")}

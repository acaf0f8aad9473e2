"""The table of what a bisect finds: newest rates, a line for each kind of history."""

from __future__ import annotations

from pathlib import Path

from hybrid_kv.bisect.self_test import Trial, rates
from hybrid_kv.dashboard.bisected import bisected_table
from hybrid_kv.dashboard.data import Results, load
from hybrid_kv.results import Row, append_rows


def test_the_newest_rates_are_a_line_each(tmp_path: Path) -> None:
    assert bisected_table(load_of(tmp_path, [Trial("time", "drawn", 0, "wrong", 8, 90, 0.0, 60.0)] * 4)) is not None
    trials = [Trial("time", "drawn", n, "right" if n else "open", 8, 90, 0.0, 300.0) for n in range(10)]
    trials += [Trial("equal time", "drawn", 0, "open", 0, 96, 0.0, 60.0)]
    trials += [Trial("tokens", "planted", 0, "right", 7, 0, 400.0, 90.0)]
    found = bisected_table(load_of(tmp_path, trials))
    assert found is not None and found[1] == [
        ["a time, 5 % longer", "10 drawn", "9", "0", "1", "8.0", "90", "5.0 CPU min"],
        ["a time, equal code", "1 drawn", "–", "0", "1", "0.0", "96", "1.0 CPU min"],
        ["a scenario that fails", "1 planted", "1", "0", "0", "7.0", "–", "1.5 CPU min"],
    ]


def load_of(folder: Path, trials: list[Trial]) -> Results:
    append_rows(folder / "bisect.csv", list(rates(trials)))
    return load(folder)


def test_without_rows_there_is_no_table(tmp_path: Path) -> None:
    append_rows(tmp_path / "guard.csv", [Row("guard", "layout", "views", 0.0)])
    assert bisected_table(load(tmp_path)) is None

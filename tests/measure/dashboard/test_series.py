"""A series over time: runs and commits, changes of level, stated rates, and thinning."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from hybrid_kv.measure.dashboard.sections.history import newest_series, thin
from hybrid_kv.measure.dashboard.series import MIN_SEGMENT, Step, find_steps, histories
from tests.measure.dashboard.rows import history, results, row


def noise(n: int, seed: int, spread: float = 0.02) -> np.ndarray:
    return np.exp(spread * np.random.default_rng(seed).standard_normal(n))


def test_a_step_lies_where_the_level_changed() -> None:
    values = 100 * noise(40, 0)
    values[25:] *= 1.2
    (step,) = find_steps(values, exact=False)
    assert step.index == 25
    assert step.before == pytest.approx(np.median(values[:25]))
    assert step.after == pytest.approx(np.median(values[25:]))
    assert step.change == pytest.approx(0.2, abs=0.02)


def test_two_steps_are_both_found_in_order() -> None:
    values = noise(90, 1)
    values[30:60] *= 1.3
    assert [step.index for step in find_steps(values, exact=False)] == [30, 60]


def test_a_level_that_came_and_went_is_found_in_the_parts() -> None:
    values = noise(220, 6)
    values[100:120] *= 1.3  # On the whole neither half is higher than the other.
    first, second = (step.index for step in find_steps(values, exact=False))
    assert abs(first - 100) <= 1 and abs(second - 120) <= 1


@pytest.mark.parametrize("side", ["first", "last"])
def test_a_level_needs_five_runs_on_either_side(side: str) -> None:
    def steps(runs: int) -> int:
        values = noise(40, 2)
        values[slice(None, runs) if side == "first" else slice(-runs, None)] *= 1.5
        return len(find_steps(values, exact=False))

    assert MIN_SEGMENT == 5
    assert steps(5) == 1
    assert steps(2) == 0  # Of five runs three would make a median.


def test_fewer_runs_than_two_levels_have_no_step() -> None:
    for n in range(2 * MIN_SEGMENT):
        assert not find_steps(np.r_[np.ones(n // 2), 9 * np.ones(n - n // 2)], exact=False)
    assert len(find_steps(np.r_[np.ones(5), 9 * np.ones(5)], exact=False)) == 1


def test_wild_runs_are_no_step_however_wild() -> None:
    values = noise(60, 3)
    values[[7, 20, 33, 51]] = 1e6
    assert not find_steps(values, exact=False)


def test_a_sure_change_below_two_percent_is_none() -> None:
    values = noise(200, 4, spread=0.0005)
    values[100:] *= 1.015
    assert not find_steps(values, exact=False)
    values[100:] *= 1.02
    assert len(find_steps(values, exact=False)) == 1


def test_a_sure_change_within_the_spread_is_none() -> None:
    values = noise(400, 5, spread=0.05)
    values[200:] *= 1.05  # A rank test of 200 against 200 is sure of it; one run does not show it.
    assert not find_steps(values, exact=False)


def test_a_drift_back_and_forth_is_not_sure_enough() -> None:
    assert not find_steps(np.tile([1.0, 2.0], 20), exact=False)


def test_equal_values_and_none_at_all() -> None:
    assert find_steps(np.full(50, 7.0), exact=False) == []
    assert find_steps(np.array([]), exact=False) == []
    assert find_steps(np.array([]), exact=True) == []


def test_exact_figures_step_at_each_change() -> None:
    assert find_steps(np.array([64.0, 64, 66, 66, 64]), exact=True) == [
        Step(2, 64.0, 66.0),
        Step(4, 66.0, 64.0),
    ]


def test_a_change_from_nothing_is_infinite() -> None:
    (step,) = find_steps(np.array([0.0, 3.0]), exact=True)
    assert step.change == np.inf
    assert find_steps(np.array([0.0, -3.0]), exact=True)[0].change == -np.inf
    assert find_steps(np.array([-2.0, -3.0]), exact=True)[0].change == -0.5


@pytest.mark.parametrize(("runs", "most"), [(10, 0.03), (20, 0.03), (100, 0.004)])
def test_false_steps_are_as_rare_as_stated(runs: int, most: float) -> None:
    trials = 1000 if runs < 100 else 250
    found = sum(
        bool(find_steps(noise(runs, 1000 + seed, 0.05), exact=False)) for seed in range(trials)
    )
    assert found <= most * trials


@pytest.mark.parametrize("runs", [20, 40, 100])
def test_a_tenth_more_is_found_five_runs_later(runs: int) -> None:
    found = 0
    for seed in range(100):
        values = noise(runs, 5000 + seed)
        values[-5:] *= 1.1
        found += bool(find_steps(values, exact=False))
    assert found >= 0.9 * 100


@pytest.mark.parametrize("length", [5, 8, 12])
def test_a_short_level_that_came_and_went_is_found(length: int) -> None:
    found = 0
    for seed in range(50):
        values = noise(70, 7000 + seed)
        values[40 : 40 + length] *= 1.19
        places = [step.index for step in find_steps(values, exact=False)]
        found += len(places) == 2 and abs(places[0] - 40) <= 1 and abs(places[1] - 40 - length) <= 1
    assert found >= 0.5 * 50


def test_a_run_counts_once(tmp_path: Path) -> None:
    (series,) = histories(
        results(tmp_path, row(0, value=1.0), row(0, value=2.0), row(1, value=3.0)).rows
    )
    assert list(series.rows["value"]) == [2, 3]


def test_machines_are_never_mixed(tmp_path: Path) -> None:
    slow = [row(run + 20, value=200.0 + run % 3, machine="slow") for run in range(20)]
    found = histories(results(tmp_path, *history([100.0 + i % 3 for i in range(20)]), *slow).rows)
    assert [s.key[4] for s in found] == ["box", "slow"]
    assert not any(s.steps for s in found)


def test_steps_of_changed_trees_and_void_runs_are_not_looked_for(tmp_path: Path) -> None:
    rows = history([100.0 + i % 3 for i in range(20)])
    dirty = [row(30 + i, value=200.0 + i % 3, dirty=True) for i in range(10)]
    void = [row(50 + i, value=200.0 + i % 3, verdict="void") for i in range(10)]
    (series,) = histories(results(tmp_path, *rows, *dirty, *void).rows)
    assert len(series.rows) == 40
    assert list(series.clean) == list(range(20))
    assert not series.steps
    (again,) = histories(results(tmp_path, *rows, *[one | {"dirty": False} for one in dirty]).rows)
    assert len(again.steps) == 1


def test_a_step_names_both_commits(tmp_path: Path) -> None:
    values = [100.0 + i % 3 for i in range(8)] + [150.0 + i % 3 for i in range(8)]
    rows = history(values)
    rows[7]["dirty"] = True  # The last before the step: it belongs to no commit.
    (series,) = histories(results(tmp_path, *rows).rows)
    (step,) = series.steps
    assert series.step_row(step).commit == "00008" * 8
    assert series.row_before(step).commit == "00006" * 8


@pytest.mark.parametrize(
    ("better", "words"),
    [
        ("lower", ["worse", "better"]),
        ("higher", ["better", "worse"]),
        ("equal", ["changed", "changed"]),
    ],
)
def test_worse_is_what_the_rows_call_worse(tmp_path: Path, better: str, words: list[str]) -> None:
    (series,) = histories(
        results(tmp_path, *history([100.0, 120.0, 100.0], unit="B", better=better)).rows
    )
    assert [*map(series.judge, series.steps)] == words


@pytest.mark.parametrize(
    ("same", "values", "exact"),
    [
        ({"unit": "B"}, [1.0, 2.0], True),
        ({"unit": "ns"}, [1.0, 2.0], False),
        ({"unit": "share", "ci_low": 0.0, "ci_high": 1.0}, [1.0, 0.0], False),
        ({"unit": "logit"}, [1.0, 1.5], False),
        ({"unit": "1/B", "suite": "kernels"}, [1.1, 1.5], True),
    ],
)
def test_counts_are_exact_and_times_are_not(
    tmp_path: Path, same: dict[str, Any], values: list[float], exact: bool
) -> None:
    (series,) = histories(results(tmp_path, *history(values, **same)).rows)
    assert len(series.steps) == exact


def test_thinning_keeps_the_ends_and_every_extreme() -> None:
    values = np.random.default_rng(0).random(10_000)
    values[[1234, 8765]] = [99, -99]
    kept = thin(values, 100)
    assert len(kept) <= 100
    assert {0, 1234, 8765, 9999} <= set(kept)
    assert list(kept) == sorted(set(kept)) and np.diff(kept).max() < 3 * 10_000 / 49
    assert list(thin(values[:100], 100)) == list(range(100))
    assert len(thin(values[:101], 100)) <= 100


def test_too_many_series_keep_those_that_matter(tmp_path: Path) -> None:
    stepped = history([1.0, 2.0], unit="B", params={"i": 0})
    long = history([1.0, 1.0, 1.0], unit="B", params={"i": 1})
    short = [row(run, {"i": 2 + run}, unit="B", value=1.0) for run in range(3)]
    series = histories(results(tmp_path, *stepped, *long, *short).rows)
    assert [s.key[3] for s in newest_series(series, 3)] == ["i=0", "i=1", "i=4"]
    assert len(newest_series(series, 5)) == len(series)

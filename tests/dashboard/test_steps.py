"""The rule for a change of level: what it finds, what it leaves alone, and the rates that its docstring states."""

from __future__ import annotations

import numpy as np
import pytest

from hybrid_kv.dashboard.steps import MIN_SEGMENT, Step, find_steps


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
    values[200:] *= 1.05  # A rank test of 200 against 200 is sure of it; nobody sees it in one run.
    assert not find_steps(values, exact=False)


def test_a_drift_back_and_forth_is_not_sure_enough() -> None:
    assert not find_steps(np.tile([1.0, 2.0], 20), exact=False)


def test_equal_values_and_none_at_all() -> None:
    assert find_steps(np.full(50, 7.0), exact=False) == []
    assert find_steps(np.array([]), exact=False) == []
    assert find_steps(np.array([]), exact=True) == []


def test_exact_figures_step_at_each_change() -> None:
    assert find_steps(np.array([64.0, 64, 66, 66, 64]), exact=True) == [Step(2, 64.0, 66.0), Step(4, 66.0, 64.0)]


def test_a_change_from_nothing_is_infinite() -> None:
    (step,) = find_steps(np.array([0.0, 3.0]), exact=True)
    assert step.change == np.inf
    assert find_steps(np.array([0.0, -3.0]), exact=True)[0].change == -np.inf
    assert find_steps(np.array([-2.0, -3.0]), exact=True)[0].change == -0.5


@pytest.mark.parametrize(("runs", "most"), [(10, 0.03), (20, 0.03), (100, 0.004)])
def test_false_steps_are_as_rare_as_stated(runs: int, most: float) -> None:
    trials = 1000 if runs < 100 else 250
    found = sum(bool(find_steps(noise(runs, 1000 + seed, 0.05), exact=False)) for seed in range(trials))
    assert found <= most * trials


@pytest.mark.parametrize("runs", [20, 40, 100])
def test_a_tenth_more_is_found_five_runs_later(runs: int) -> None:
    found = 0
    for seed in range(100):
        values = noise(runs, 5000 + seed)
        values[-5:] *= 1.1
        found += bool(find_steps(values, exact=False))
    assert found >= 0.9 * 100

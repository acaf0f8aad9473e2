"""The statistics hold what they state: by simulation with fixed seeds, and by hand."""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
import numpy.typing as npt
import pytest

from bench.harness import inference
from bench.harness.inference import clopper_pearson, estimate, holm, p_faster, p_slower, typical
from tests.support.noise import heavy, normal

Floats = npt.NDArray[np.float64]

ALPHA = 0.05


@pytest.mark.parametrize(
    ("seconds", "expected"),
    [([2.0, 4.0, 9.0, 100.0], 3.0), ([5.0, 1.0, 3.0], 2.0), ([7.0], 7.0)],
)
def test_typical_is_the_mean_of_the_faster_half(seconds: list[float], expected: float) -> None:
    assert typical(seconds) == expected


def test_the_standard_error_is_yuens() -> None:
    # By hand: 6 values, one dropped at each end; winsorised to 2, 2, 3, 4, 5, 5, of variance 1.9.
    mean, error, freedom = inference.trimmed_mean(np.array([1.0, 2.0, 3.0, 4.0, 5.0, 90.0]))
    assert (float(mean), freedom) == (3.5, 3)
    assert float(error) == pytest.approx(math.sqrt(1.9 * 5 / (4 * 3)))
    assert inference.center([1.0, 2.0, 6.0]) == 3.0  # fewer than 6 pairs: nothing is dropped


@pytest.mark.parametrize("draw", [normal, heavy])
@pytest.mark.parametrize("n", [6, 12])
@pytest.mark.parametrize("p", [p_slower, p_faster])
def test_p_values_keep_their_rate(
    draw: Callable[[np.random.Generator, int], Floats], n: int, p: Callable[[Floats, float], float]
) -> None:
    rng = np.random.default_rng(7)
    hits = sum(p(draw(rng, n), 0.0) < ALPHA for _ in range(2000))
    low, high = clopper_pearson(hits, 2000, level=0.999)
    assert low < 1.2 * ALPHA
    assert high > 0.5 * ALPHA  # and are no hollow promise


def test_a_change_of_just_the_minimum_effect_is_no_alarm() -> None:
    rng = np.random.default_rng(8)
    values = [math.log1p(0.01) + normal(rng, 12) for _ in range(2000)]
    hits = sum(p_slower(one, 0.01) < ALPHA for one in values)
    assert clopper_pearson(hits, 2000, level=0.999)[0] < 1.2 * ALPHA
    assert sum(p_slower(one, 0.0) < ALPHA for one in values) > 2 * hits


@pytest.mark.parametrize(("draw", "least"), [(normal, 0.97), (heavy, 0.9)])
def test_power(draw: Callable[[np.random.Generator, int], Floats], least: float) -> None:
    rng = np.random.default_rng(9)
    found = [p_slower(math.log1p(0.05) + draw(rng, 12), 0.01) < 0.01 for _ in range(500)]
    assert np.mean(found) > least
    assert not any(p_faster(math.log1p(0.05) + draw(rng, 12), 0.01) < 0.01 for _ in range(500))


@pytest.mark.parametrize("draw", [normal, heavy])
@pytest.mark.parametrize("n", [6, 12])
def test_bootstrap_coverage(
    draw: Callable[[np.random.Generator, int], Floats], n: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(inference, "RESAMPLES", 1000)
    rng = np.random.default_rng(10)
    covered = 0
    for i in range(600):
        one = estimate(math.log(1.5) + draw(rng, n), seed=i)
        covered += one.low <= 1.5 <= one.high
    assert 0.92 < covered / 600 < 0.98


def test_an_interval_needs_three_pairs() -> None:
    with pytest.raises(ValueError, match="2 worker pairs"):
        estimate([0.0, 0.1])


def test_holm_by_hand() -> None:
    adjusted = holm({"a": 0.01, "b": 0.04, "c": 0.03, "d": 0.005})
    assert adjusted == pytest.approx({"d": 0.02, "a": 0.03, "c": 0.06, "b": 0.06})
    assert holm({}) == {}
    assert holm({"a": 0.6, "b": 0.7}) == {"a": 1.0, "b": 1.0}


@pytest.mark.parametrize(
    ("hits", "n", "low", "high"),
    [(0, 10, 0, 0.3085), (10, 10, 0.6915, 1), (5, 10, 0.1871, 0.8129), (1, 50, 0.0005, 0.1065)],
)
def test_clopper_pearson_as_in_tables(hits: int, n: int, low: float, high: float) -> None:
    assert clopper_pearson(hits, n) == pytest.approx((low, high), abs=1e-4)

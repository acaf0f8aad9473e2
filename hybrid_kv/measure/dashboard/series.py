"""A benchmark on a machine over time, and the places where its level changed.

Exact metrics (counts, bytes, everything of suite `kernels`) have no noise: every change is a step.
Any other series is cut where the rank sum of what comes before is least likely for one level, if
(1) at least `MIN_SEGMENT` runs lie on either side, (2) the Wilcoxon p-value times the number of
places that were tried is below `ALPHA`, and (3) the medians of both sides differ by `MIN_CHANGE`
and by `MIN_SPREADS` robust standard deviations of one run from the next. Both sides are then cut
again. Ranks and medians: one outlier is no step, whatever its size.

A threshold on the last run over the one before alarms on noise; penalised least absolute deviations
(asv) have no error rate to state; Pettitt's test misses steps near the ends, where a new regression
lies. This is Pettitt's test with the rank sum standardised at each place, so that the ends count
alike.

Of 2,000 series without a step (independent runs, log-normal, spread 5 %) the rule cuts 1.2 % of
those with 10 runs, 2.0 % with 20, 0.7 % with 60 and 0.1 % with 100; a step of 10 % in runs that
spread by 2 % is found in 97 % or more five runs later. `tests/measure/dashboard/test_series.py`
repeats both. The rule promises nothing for runs that depend on each other, such as a machine that
warms up over days.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np
import numpy.typing as npt
import pandas as pd

from hybrid_kv.measure.dashboard.data import NO_LEVEL, SERIES, STATIC_SUITE
from hybrid_kv.measure.results import TIME_UNITS

MIN_SEGMENT = 5
ALPHA = 0.05
MIN_CHANGE = 0.02
MIN_SPREADS = 2.0
_MAD_TO_SD = 1.4826  # of a normal distribution

Floats = npt.NDArray[np.float64]


@dataclass(frozen=True)
class Step:
    """A change of level.

    Attributes:
        index: the first run of the new level.
        before, after: medians of the levels on both sides.
    """

    index: int
    before: float
    after: float

    @property
    def change(self) -> float:
        """Relative to before; infinite where that is 0."""
        return (
            (self.after - self.before) / abs(self.before)
            if self.before
            else math.copysign(math.inf, self.after)
        )


@dataclass(frozen=True)
class Series:
    """One benchmark on one machine over time.

    Attributes:
        key: values of `SERIES`.
        rows: the last row of each run, in order of time.
        clean: [runs] positions in `rows` that steps are looked for in: measured on a commit, not on
            a changed tree.
        steps: their `index` counts in `clean`.
    """

    key: tuple[str, ...]
    rows: pd.DataFrame
    clean: npt.NDArray[np.int64]
    steps: list[Step]

    @property
    def better(self) -> str:
        return str(self.rows["better"].iloc[-1])

    @property
    def unit(self) -> str:
        return str(self.rows["unit"].iloc[-1])

    def step_row(self, step: Step) -> Any:
        """Return the first run of the new level."""
        return self.rows.iloc[int(self.clean[step.index])]

    def row_before(self, step: Step) -> Any:
        """Return the last run of the old level: the cause lies between both commits."""
        return self.rows.iloc[int(self.clean[step.index - 1])]

    def judge(self, step: Step) -> str:
        """Return `worse`, `better` or `changed`, by the rows' own `better`."""
        if self.better == "equal":
            return "changed"
        return "worse" if (step.after > step.before) == (self.better == "lower") else "better"


def histories(rows: pd.DataFrame) -> list[Series]:
    """Return all series with their steps, in order of their names."""
    once = rows[~rows["suite"].isin(NO_LEVEL)].drop_duplicates([*SERIES, "run_id"], keep="last")
    if once.empty:
        return []
    number = once.groupby(SERIES, sort=True).ngroup().to_numpy()
    order = np.argsort(number, kind="stable")
    once = once.iloc[order]
    starts = np.flatnonzero(np.diff(number[order], prepend=-1))
    # Arrays, not frames: with ten thousand series a frame for each test would cost more than all
    # the tests.
    usable = (~once["dirty"] & (once["verdict"] != "void")).to_numpy()
    values = once["value"].to_numpy()
    exact = _is_exact(once, starts)
    keys = once[SERIES].iloc[starts].itertuples(index=False, name=None)
    series = []
    for key, is_exact, (start, end) in zip(
        keys, exact, pairwise([*starts, len(once)]), strict=True
    ):
        clean = np.flatnonzero(usable[start:end])
        steps = find_steps(values[start:end][clean], bool(is_exact))
        series.append(Series(tuple(map(str, key)), once.iloc[start:end], clean, steps))
    return series


def _is_exact(rows: pd.DataFrame, starts: npt.NDArray[np.int64]) -> npt.NDArray[np.bool_]:
    """Return whether each series is exact; the rows of each begin at `starts`.

    It is if it is static, or has whole numbers without an interval that are no times.
    """
    counted = (
        ~rows["unit"].isin(TIME_UNITS)
        & rows["ci_low"].isna()
        & (rows["value"] == rows["value"].round())
    )
    static = np.logical_or.reduceat((rows["suite"] == STATIC_SUITE).to_numpy(), starts)
    return np.asarray(static | np.logical_and.reduceat(counted.to_numpy(), starts))


def find_steps(values: Floats, exact: bool) -> list[Step]:
    """Return the steps of a series, in order.

    Args:
        values: [runs], in the order in which they were measured.
        exact: without noise.
    """
    if not values.size:
        return []
    cuts = [int(i) + 1 for i in np.flatnonzero(np.diff(values))] if exact else _cuts(values, 0)
    levels = _levels(values, cuts)
    # A level is shorter once it is cut itself, and its median another: condition 3 holds for what
    # is left.
    small = [] if exact else _small_cuts(cuts, levels)
    while small:
        cuts.remove(small[0])
        levels = _levels(values, cuts)
        small = _small_cuts(cuts, levels)
    return [Step(cut, *pair) for cut, pair in zip(cuts, pairwise(levels), strict=True)]


def _levels(values: Floats, cuts: list[int]) -> list[float]:
    return [float(np.median(values[a:b])) for a, b in pairwise([0, *cuts, len(values)])]


def _small_cuts(cuts: list[int], levels: list[float]) -> list[int]:
    return [cut for cut, pair in zip(cuts, pairwise(levels), strict=True) if _is_small(*pair)]


def _is_small(before: float, after: float) -> bool:
    return abs(after - before) < MIN_CHANGE * abs(before)


def _cuts(values: Floats, offset: int) -> list[int]:
    """Return cuts where the whole calls for them, else those in its parts.

    A level that came and went hides from the whole.
    """
    cut = _best_cut(values, ALPHA) or _best_cut_inside(values)
    if cut is None:
        return []
    place = cut[1]
    return [*_cuts(values[:place], offset), offset + place, *_cuts(values[place:], offset + place)]


def _best_cut_inside(values: Floats) -> tuple[float, int] | None:
    """Return the p-value and the place of the likeliest cut in a part of a series."""
    parts = _parts(len(values))
    cuts = [(_best_cut(values[a:b], ALPHA / len(parts)), a) for a, b in parts]
    return min(((cut[0], cut[1] + a) for cut, a in cuts if cut is not None), default=None)


def _parts(n: int) -> list[tuple[int, int]]:
    """Return halves, quarters, … of a series, each overlapping the next by half.

    Kovács et al., seeded segmentation, 2023.
    """
    parts = []
    length = n // 2
    while length >= 2 * MIN_SEGMENT:
        parts += [(start, start + length) for start in range(0, n - length + 1, length // 2)]
        length //= 2
    return parts


def _best_cut(values: Floats, alpha: float) -> tuple[float, int] | None:
    """Return the p-value and the place of the likeliest cut that fulfils all three conditions.

    The p-value is that of the normal distribution, or, where all runs on one side are above all on
    the other, exact.
    """
    n = len(values)
    places = np.arange(MIN_SEGMENT, n - MIN_SEGMENT + 1)
    # No score exceeds sqrt(n - 1): it is a correlation of ranks with sides, times that. Most short
    # parts end here.
    if math.erfc(math.sqrt(max(0, n - 1) / 2)) * places.size >= alpha or not places.size:
        return None
    _, rank, ties = np.unique(values, return_inverse=True, return_counts=True)
    ranks = (np.cumsum(ties) - (ties - 1) / 2)[rank]  # ties share the mean of their ranks
    # Variance of a rank sum without replacement, ties averaged (Lehmann, Nonparametrics, 1.4).
    variance = places * (n - places) / 12 * (n + 1 - float((ties**3 - ties).sum()) / (n * (n - 1)))
    if not variance.all():
        return None
    scores = np.abs(np.cumsum(ranks)[places - 1] - places * (n + 1) / 2) / np.sqrt(variance)
    best = int(scores.argmax())
    place = int(places[best])
    p = math.erfc(scores[best] / math.sqrt(2))
    if ranks[:place].max() < ranks[place:].min() or ranks[:place].min() > ranks[place:].max():
        # For few runs the normal distribution has too much in its tails: a level of eight would be
        # missed.
        p = min(p, 2 / math.comb(n, place))
    p *= places.size
    if p >= alpha:
        return None
    before = np.median(values[:place])
    after = np.median(values[place:])
    # Of neighbours' differences, which another step among these runs does not widen.
    noise = _MAD_TO_SD * float(np.median(np.abs(np.diff(values)))) / math.sqrt(2)
    needed = max(MIN_CHANGE * abs(before), MIN_SPREADS * noise)
    return (p, place) if abs(after - before) >= needed else None

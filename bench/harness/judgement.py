"""Judgement of times: `slower`, `faster`, the `same` or `inconclusive`.

It says how much is measured, and what is concluded from it.

The first look at all benchmarks only picks suspects. They are measured again, in fresh processes,
with twice the pairs and three times the samples; that repeat alone is evidence, and what the first
look selected cannot bias it. Holm's procedure over the suspects bounds the chance of any false
alarm by `alpha`. A change below `min_effect` is none.

What is no alarm is the `same` only if its 95 % interval lies within `threshold` of equal. Until it
does, more pairs are measured, up to `budget` times as many as at first; what is still wider then is
`inconclusive`. A repeat may be extended once and tested twice, so each of its two p-values counts
double (Bonferroni).
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from bench.harness.inference import center, estimate, holm, p_faster, p_slower
from hybrid_kv.config import ConfigError


@dataclass(frozen=True)
class Design:
    """The amount that is measured, and what is an alarm.

    Attributes:
        pairs: worker pairs of the first look; the repeat has twice as many.
        budget: of worker pairs of a benchmark in a look that stays inconclusive, in multiples of
            `pairs`.
        samples: of each side in a worker pair; the repeat takes three times as many. They matter on
            a busy machine: with 10 processes on 2 cores the standard deviation between pairs of
            equal code was 3.1, 2.5 and 1.7 % for 8, 16 and 32, on average over the benchmarks that
            `bench.harness.operating_curve` injects in.
        sample_seconds: that one sample should take.
        cell_seconds: of samples of one side in a worker pair; a slow cell has fewer samples, at
            least 2.
        min_effect: a relative change that does not matter.
        threshold: a relative change that an interval must exclude before times are called the same.
        screen: p-value below which the first look makes a suspect.
        alpha: chance of any false alarm in a repeat.
    """

    pairs: int = 6
    budget: int = 4
    samples: int = 16
    sample_seconds: float = 1.5e-3
    cell_seconds: float = 0.05
    min_effect: float = 0.01
    threshold: float = 0.05
    screen: float = 0.1
    alpha: float = 0.01

    def __post_init__(self) -> None:
        if self.pairs < 3:
            raise ConfigError(
                f"--pairs {self.pairs}: fewer than 3 worker pairs have no interval; give 3 or more"
            )
        if not self.min_effect <= self.threshold < 1:
            raise ConfigError(
                f"--threshold {self.threshold}: give a share from {self.min_effect} to less than 1"
            )

    @property
    def closer(self) -> Design:
        """Return the design of the repeat."""
        return replace(
            self, pairs=2 * self.pairs, samples=3 * self.samples, cell_seconds=3 * self.cell_seconds
        )


@dataclass
class Times:
    """The times of one cell by worker pair, in the order in which they were measured."""

    log_ratios: list[float] = field(default_factory=list)
    seconds: list[tuple[float, float]] = field(default_factory=list)  # per call, of each side
    max_error: float = 0.0
    clock_mhz: list[tuple[int | None, int | None]] = field(default_factory=list)
    own: dict[str, str] = field(
        default_factory=dict
    )  # of a side that ran its version's own benchmark: why

    def suspicious(self, design: Design) -> bool:
        """Return whether a first look deserves a repeat; either direction."""
        enough = abs(center(self.log_ratios)) > math.log1p(design.min_effect)
        return (
            enough
            and min(p_slower(self.log_ratios, 0), p_faster(self.log_ratios, 0)) < design.screen
        )

    def settled(self, design: Design) -> bool:
        """Return whether the 95 % interval lies within the threshold."""
        found = estimate(self.log_ratios)
        return 1 / (1 + design.threshold) <= found.low and found.high <= 1 + design.threshold

    def wants_more(self, design: Design) -> bool:
        """Return whether the interval is too wide and the budget allows for more pairs."""
        return len(
            self.log_ratios
        ) + design.pairs <= design.budget * design.pairs and not self.settled(design)


def _p_value(times: Times, slower: bool, design: Design) -> float:
    """Return the p-value of the repeat.

    It is tested after its first pairs and after all, hence twice the smaller one.
    """
    test = p_slower if slower else p_faster
    looks = {design.closer.pairs, len(times.log_ratios)}
    return min(1.0, 2 * min(test(times.log_ratios[:pairs], design.min_effect) for pairs in looks))


def confirmed(
    first: Mapping[str, Times], repeat: Mapping[str, Times], design: Design
) -> dict[str, tuple[str, float]]:
    """Return for each suspect `slower`, `faster` or nothing, with its adjusted p-value.

    The repeat tests the direction that the first look saw, so that it is one direction per suspect.
    """
    p_values, directions = {}, {}
    for key, times in repeat.items():
        slower = center(first[key].log_ratios) > 0
        directions[key] = "slower" if slower else "faster"
        p_values[key] = _p_value(times, slower, design)
    return {
        key: (directions[key] if p < design.alpha else "", p) for key, p in holm(p_values).items()
    }


def verdict(times: Times, alarm: str, design: Design) -> str:
    """Return `slower` or `faster` where the repeat confirmed it (`alarm`).

    Otherwise it is `same` or `inconclusive`.
    """
    return alarm or ("same" if times.settled(design) else "inconclusive")

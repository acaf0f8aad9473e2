"""Functions in which a commit takes longer than the one before it, each by itself.

Both run the same benchmark in turns, in two processes that share a core, under pyinstrument, which
samples 1,000 times a second. What a profiler costs, it costs both. A function is reported if its
mean differs by more than `CERTAIN` standard errors of that difference over the turns.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

TURNS = 8
TURN_SECONDS = 0.4  # of one side
CERTAIN = 4.0
MOST = 6  # functions that are reported


@dataclass(frozen=True)
class Moved:
    """A function, and the seconds that it takes by itself in a call of the benchmark."""

    name: str
    before: float
    after: float

    @property
    def line(self) -> str:
        change = 1e6 * (self.after - self.before)
        before, after = 1e6 * self.before, 1e6 * self.after
        return f"{change:+9.1f} us a call: {self.name} ({before:.1f} -> {after:.1f})"


Profiles = Sequence[Mapping[str, float]]  # of each turn, seconds by function
Profile = Callable[[str, str], tuple[Profiles, Profiles]]  # of two commits


def moved(before: Profiles, after: Profiles) -> list[Moved]:
    """Return the functions that differ for sure, the most first.

    Args:
        before, after: at least two turns each.
    """
    found = []
    for name in sorted({*(name for turn in (*before, *after) for name in turn)}):
        sides = [[turn.get(name, 0.0) for turn in turns] for turns in (before, after)]
        error = math.sqrt(sum(statistics.variance(side) / len(side) for side in sides))
        one = Moved(name, *map(statistics.fmean, sides))
        if abs(one.after - one.before) > CERTAIN * error:
            found.append(one)
    return sorted(found, key=lambda one: -abs(one.after - one.before))[:MOST]


def story(profile: Profile, before: str, first_bad: str) -> list[str]:
    """Return lines for the evidence."""
    found = moved(*profile(before, first_bad))
    return [one.line for one in found] or ["profile: no single function is clearly slower"]

"""Histories of timed commits with a step in them."""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Generator

from bench.bisect.question import NotMeasurableError

SHIFT = math.log(1.05)
Measured = Callable[[str, str], Generator[float, None, None]]


def history(
    levels: dict[str, float], spread: float, seed: int = 0
) -> tuple[Measured, list[tuple[str, str]]]:
    """Pairs of commits whose times differ by `levels`; and which pairs were measured."""
    rng, measured = random.Random(seed), list[tuple[str, str]]()

    def measure(base: str, head: str) -> Generator[float, None, None]:
        while True:
            measured.append((base, head))
            if math.isnan(levels[head]):
                raise NotMeasurableError("cannot run: ImportError")
            yield levels[head] - levels[base] + rng.gauss(0, spread)

    return measure, measured


def row(first_bad: int, num: int = 30, shift: float = SHIFT) -> dict[str, float]:
    return {str(number): shift * (number >= first_bad) for number in range(num)}

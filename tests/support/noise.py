"""Differences of equal times, drawn: with normal noise, and with heavy tails."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt


def normal(rng: np.random.Generator, n: int) -> npt.NDArray[np.float64]:
    return rng.normal(0, 0.02, n)


def heavy(rng: np.random.Generator, n: int) -> npt.NDArray[np.float64]:
    """A pair in ten is off tenfold."""
    return rng.normal(0, 0.02, n) * np.where(rng.random(n) < 0.1, 10, 1)

"""Differences of equal times, drawn: with normal noise, and with heavy tails."""

import numpy as np


def normal(rng, n):
    return rng.normal(0, 0.02, n)


def heavy(rng, n):
    """A pair in ten is off tenfold."""
    return rng.normal(0, 0.02, n) * np.where(rng.random(n) < 0.1, 10, 1)

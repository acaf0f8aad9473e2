"""Statistics of two runs over the same questions: those that were lost, and those gained.

`lost` is right in the baseline and not in the candidate, `gained` the other way round. Questions on
which both agree cancel out, so that 13 lost of 250 are plain to see where two averages of 95 and 90
% are not. Everything here is exact or a score method: with so few flips the normal approximations
are wrong.
"""

from __future__ import annotations

import math
from functools import lru_cache
from typing import Literal

import numpy as np
from scipy.optimize import brentq
from scipy.stats import binom

ALPHA = 0.05  # how often the rule may call a model worse that is not
FIRST_QUESTIONS = 250
FIRST_ALPHA = 0.001
POWER = 0.8
Verdict = Literal["worse", "no loss shown", "undecided"]


def looks(questions: int) -> list[tuple[int, float]]:
    """Return the numbers of questions at which a live comparison decides, and its p there.

    The first look spends a fiftieth of `ALPHA`, the second the rest: whatever the first look shows,
    the chance of a false alarm in either is at most the sum (the union bound; each exact test keeps
    its own level).
    """
    if questions <= FIRST_QUESTIONS:
        return [(questions, ALPHA)]
    return [(FIRST_QUESTIONS, FIRST_ALPHA), (questions, ALPHA - FIRST_ALPHA)]


def decide(lost: int, gained: int, alpha: float, final: bool) -> Verdict:
    """Return the verdict of a look.

    A look that is not final leaves it open unless it is clear: see `accuracy.compare`.
    """
    if mcnemar_p(lost, gained) <= alpha:
        return "worse"
    return "no loss shown" if final or lost == 0 else "undecided"


@lru_cache(maxsize=4096)
def mcnemar_p(lost: int, gained: int) -> float:
    """Return the exact one-sided p of McNemar's test.

    It is the chance of so many losses if each flip went either way alike.
    """
    return float(binom.sf(lost - 1, lost + gained, 0.5))


def difference_interval(lost: int, gained: int, n: int, z: float = 1.959964) -> tuple[float, float]:
    """Return Tango's score interval (1998) of the paired difference, candidate minus baseline.

    Every difference that the score test would not reject. It has no zero width when nothing
    flipped, and excludes 0 exactly where (gained - lost)^2 / (gained + lost), McNemar's statistic,
    exceeds z^2.
    """
    observed = (gained - lost) / n

    def excess(difference: float) -> float:
        # The most likely share of losses if that were the true difference: the root of a x^2 + b x
        # + c.
        a = 2 * n
        b = (2 * n - gained + lost) * difference - gained - lost
        c = -lost * difference * (1 - difference)
        share = (math.sqrt(max(0.0, b * b - 4 * a * c)) - b) / (2 * a)
        return n * (observed - difference) ** 2 - z * z * (
            2 * share + difference * (1 - difference)
        )

    def bound(end: float) -> float:
        # Where nothing flipped the observed difference is a root, too.
        start = observed + math.copysign(1e-12, end)
        return end if excess(end) <= 0 else float(brentq(excess, start, end))

    return bound(-1.0), bound(1.0)


def power(loss: float, flips: int, n: int, alpha: float = ALPHA) -> float:
    """Return the chance that McNemar's test at `alpha` notices a true loss, a share.

    `flips` questions of `n` change anyway, half of them each way; the loss comes on top. Exact:
    summed over the number of flips, given which the losses are binomial.
    """
    noise = flips / n
    share = noise + loss
    if share == 0:
        return 0.0
    total = np.arange(n + 1)
    enough = binom.isf(alpha, total, 0.5) + 1  # the fewest losses with p <= alpha
    noticed = binom.sf(enough - 1, total, (noise / 2 + loss) / share)
    return float((binom.pmf(total, n, share) * noticed).sum())


def detectable_loss(flips: int, n: int, alpha: float = ALPHA) -> float | None:
    """Return the smallest true loss, a share, that is noticed with 80 % power.

    None: not even the largest.
    """
    largest = 1 - flips / n
    if power(largest, flips, n, alpha) < POWER:
        return None
    return float(brentq(lambda loss: power(loss, flips, n, alpha) - POWER, 0, largest))


def unseen_loss(n: int, confidence: float = 0.95) -> float:
    """Return the largest share of losses that shows none in `n` questions.

    That happens with a chance of 1 - confidence.
    """
    return 1 - (1 - confidence) ** (1 / n)

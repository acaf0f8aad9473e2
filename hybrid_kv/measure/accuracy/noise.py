"""The score that the next equal run falls below with a stated chance, from k equal runs.

With k runs of mean m and standard deviation s the next one is below m - t s sqrt(1 + 1/k) with
chance alpha, t being the quantile of Student's distribution with k - 1 degrees of freedom: the
one-sided prediction limit of a normal distribution (Hahn and Meeker, Statistical Intervals, 1991),
which allows for what k runs do not tell of m and s.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass

from scipy.stats import norm, t

FALSE_ALARMS = 0.01
POWER = 0.8
MIN_RUNS = 10


@dataclass(frozen=True)
class Noise:
    """Scores of equal runs: their number, mean and standard deviation, and their questions."""

    runs: int
    mean: float
    sd: float
    questions: int

    def limit(self, alpha: float = FALSE_ALARMS) -> float:
        """Return the score that the next run is below with a chance of alpha."""
        return self.mean - float(t.isf(alpha, self.runs - 1)) * self.sd * math.sqrt(
            1 + 1 / self.runs
        )

    def right_answers(self, alpha: float = FALSE_ALARMS) -> int:
        """Return the fewest right answers that still pass.

        A score is a number of questions, so that alarms are rarer than alpha.
        """
        return max(0, math.floor(self.limit(alpha) * self.questions + 1e-9))

    def threshold(self, alpha: float = FALSE_ALARMS) -> float:
        """Return a threshold between the lowest score that passes and the next below.

        No rounding and no `>` matters then.
        """
        return max(0.0, (self.right_answers(alpha) - 0.5) / self.questions)

    def loss_below(self, threshold: float) -> float:
        """Return the smallest true loss that is below this threshold with a chance of `POWER`."""
        return self.mean - threshold + float(norm.isf(1 - POWER)) * self.sd

    def loss(self, alpha: float = FALSE_ALARMS) -> float:
        """Return the smallest true loss that the threshold sees with a chance of `POWER`."""
        return self.loss_below(self.threshold(alpha))


def noise_of(scores: Sequence[float], questions: int) -> Noise:
    """Return the noise of at least two equal runs."""
    return Noise(len(scores), statistics.fmean(scores), statistics.stdev(scores), questions)


def tensorrt_llm_threshold(
    mean: float, questions: int, alpha: float = 0.05, sigma: float = 50.0
) -> float:
    """Return TensorRT-LLM's threshold: a z-test of two means, sigma points per answer.

    See tests/integration/defs/accuracy/README.md there.
    """
    return mean - float(norm.isf(alpha)) * sigma / 100 * math.sqrt(2 / questions)


def tensorrt_llm_theta(
    questions: int, alpha: float = 0.05, beta: float = 0.2, sigma: float = 50.0
) -> float:
    """Return the loss that TensorRT-LLM says it sees with a chance of 1 - beta; a share."""
    return float(norm.isf(alpha) + norm.isf(beta)) * sigma / 100 * math.sqrt(2 / questions)

"""The score below which the next run of an unchanged engine falls with a stated chance, from k equal runs.

With k runs of mean m and standard deviation s the next one is below m - t s sqrt(1 + 1/k) with chance alpha, t being
the quantile of Student's distribution with k - 1 degrees of freedom: the one-sided prediction limit of a normal
distribution (Hahn and Meeker, Statistical Intervals, 1991), which allows for what k runs do not tell of m and s.
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
    """Scores of equal runs: how many, their mean and standard deviation, and the questions of each."""

    runs: int
    mean: float
    sd: float
    questions: int

    def limit(self, alpha: float = FALSE_ALARMS) -> float:
        """What the next run is below with a chance of alpha."""
        return self.mean - float(t.isf(alpha, self.runs - 1)) * self.sd * math.sqrt(1 + 1 / self.runs)

    def right_answers(self, alpha: float = FALSE_ALARMS) -> int:
        """The fewest that still pass: a score is a number of questions, so that alarms are rarer than alpha."""
        return max(0, math.floor(self.limit(alpha) * self.questions + 1e-9))

    def threshold(self, alpha: float = FALSE_ALARMS) -> float:
        """Between the lowest score that passes and the next one below, so that no rounding and no `>` matters."""
        return max(0.0, (self.right_answers(alpha) - 0.5) / self.questions)

    def loss_below(self, threshold: float) -> float:
        """The smallest true loss that brings a run below this threshold with a chance of `POWER`."""
        return self.mean - threshold + float(norm.isf(1 - POWER)) * self.sd

    def loss(self, alpha: float = FALSE_ALARMS) -> float:
        """The smallest true loss that the own threshold sees with a chance of `POWER`."""
        return self.loss_below(self.threshold(alpha))


def noise_of(scores: Sequence[float], questions: int) -> Noise:
    """Of equal runs; at least two."""
    return Noise(len(scores), statistics.fmean(scores), statistics.stdev(scores), questions)


def tensorrt_llm_threshold(mean: float, questions: int, alpha: float = 0.05, sigma: float = 50.0) -> float:
    """TensorRT-LLM's own (tests/integration/defs/accuracy/README.md): z-test of two means, sigma points per answer."""
    return mean - float(norm.isf(alpha)) * sigma / 100 * math.sqrt(2 / questions)


def tensorrt_llm_theta(questions: int, alpha: float = 0.05, beta: float = 0.2, sigma: float = 50.0) -> float:
    """The loss that TensorRT-LLM says it sees with a chance of 1 - beta; a share, not points."""
    return float(norm.isf(alpha) + norm.isf(beta)) * sigma / 100 * math.sqrt(2 / questions)

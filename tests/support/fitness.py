"""A machine that is fit for timing."""

from __future__ import annotations

from hybrid_kv.measure.timing.clock import Interval
from hybrid_kv.measure.timing.fitness import Fitness

QUIET = Fitness(0.004, 0.001, Interval(1.0, 0.994, 1.005), "performance", "off", "", ())

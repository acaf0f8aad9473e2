"""Times: how many times as long a commit takes as GOOD, in pairs of fresh processes.

Pairs are measured until the answer is clear.

One number is one worker pair of `hybrid-kv compare`: the log-ratio of two processes that run side
by side on a core.

The ends. BAD must be slower than GOOD by Yuen's test over pairs, in at most three looks that share
`ALPHA`. Their pairs also say how large the change is (`shift`) and how far pairs of equal code lie
apart (`spread`).

A commit. It is as fast as GOOD or as slow as BAD: Wald's sequential test (1945) adds the logarithm
of how much likelier each pair is under one than under the other, and stops at odds of 1 to `ERROR`.
A pair says at most `CLIP` (Huber 1965): now and then one is off by a factor for all of its samples,
and must not decide alone. What stays open after `MOST_PAIRS` is skipped: such a commit lies between
the two.

The first bad commit. It is measured again, in fresh pairs against the commit before it, by the test
of the ends. So a commit that changed nothing is named with a chance of at most `ALPHA`, whatever
the search did.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass
from typing import Any

import numpy as np

from bench.bisect.profile import Profile, story
from bench.bisect.question import CONFIRMED, ENDS, Answer, NotMeasurableError, Outcome
from bench.harness.inference import center, estimate, p_slower

ALPHA = 0.01
LOOKS = (24, 48, 96)
MIN_EFFECT = 0.01  # a smaller change does not matter: that of `compare`
ERROR = 0.001  # of one commit's answer; a search over 200 commits needs 8
# of 1.5, 2 and 3, at a spread of 1.2 to 5 % and 5 % slower, 2 errs least for its number of pairs
CLIP = 2.0
MOST_PAIRS = 100
MIN_SPREAD = 0.002
CAUTION = 1.2  # times the spread that was seen: 24 pairs may show too little of it

# The log-ratios of one commit over another, as many as are taken; closed after the last.
Measure = Callable[[str, str], Generator[float, None, None]]


def typical_spread(groups: Sequence[Sequence[float]]) -> float:
    """Return the standard deviation of pairs of the same two commits.

    It is taken from the median distance from each group's own median.

    A little more than that: see `CAUTION`.
    """
    usable = [np.asarray(group) for group in groups if len(group) > 1]
    distances = np.concatenate([np.abs(group - np.median(group)) for group in usable])
    freedom = len(distances) / (len(distances) - len(usable))
    return max(MIN_SPREAD, CAUTION * 1.4826 * float(np.median(distances)) * math.sqrt(freedom))


def decide(log_ratios: Sequence[float], shift: float, spread: float) -> Answer | None:
    """Return what the pairs say so far; None: not enough. See the module's text."""
    evidence = sum(
        max(-CLIP, min(CLIP, shift / spread**2 * (log_ratio - shift / 2)))
        for log_ratio in log_ratios
    )
    if abs(evidence) < math.log((1 - ERROR) / ERROR):
        return None
    return "bad" if evidence > 0 else "good"


def in_words(log_ratios: Sequence[float]) -> str:
    found = estimate(log_ratios)
    return f"{found.ratio:.3f} times as long ({found.low:.3f} to {found.high:.3f}, {found.n} pairs)"


@dataclass(frozen=True)
class Times:
    """See `question.Question`."""

    measure: Measure
    profile: Profile | None = None

    def ends(self, good: str, bad: str) -> Outcome:
        answer, log_ratios = self._is_slower(good, bad)
        detail = in_words(log_ratios)
        if answer != "bad":
            detail = f"BAD is not shown to be slower than GOOD: it takes {detail}"
        return Outcome(
            answer, detail, {"log_ratios": log_ratios, "shift": center(log_ratios), "good": good}
        )

    def test(self, commit: str, known: Mapping[str, Outcome]) -> Outcome:
        ends = known[ENDS].metrics
        others = [
            one.metrics["log_ratios"]
            for key, one in known.items()
            if key != CONFIRMED and "log_ratios" in one.metrics
        ]
        log_ratios: list[float] = []
        answer: Answer | None = None
        with closing(self.measure(ends["good"], commit)) as pairs:
            while answer is None and len(log_ratios) < MOST_PAIRS:
                log_ratios.append(next(pairs))
                answer = decide(log_ratios, ends["shift"], typical_spread([*others, log_ratios]))
        middle = math.exp(float(np.median(log_ratios)))
        detail = f"about {middle:.3f} times as long ({len(log_ratios)} pairs)"
        return Outcome(answer or "skip", detail, {"log_ratios": log_ratios})

    def confirm(self, before: str, first_bad: str, known: Mapping[str, Outcome]) -> Outcome:
        answer, log_ratios = self._is_slower(before, first_bad)
        detail = f"against the commit before it, it takes {in_words(log_ratios)}"
        metrics: dict[str, Any] = {"log_ratios": log_ratios}
        if answer == "bad" and self.profile is not None:
            try:
                metrics["story"] = story(self.profile, before, first_bad)
            except NotMeasurableError as error:  # the commit is found, with or without
                metrics["story"] = [str(error)]
        return Outcome("bad" if answer == "bad" else "skip", detail, metrics)

    def _is_slower(self, base: str, head: str) -> tuple[Answer, list[float]]:
        log_ratios: list[float] = []
        with closing(self.measure(base, head)) as pairs:
            for look in LOOKS:
                while len(log_ratios) < look:
                    log_ratios.append(next(pairs))
                if p_slower(log_ratios, MIN_EFFECT) <= ALPHA / len(LOOKS):
                    return "bad", log_ratios
        return "good", log_ratios

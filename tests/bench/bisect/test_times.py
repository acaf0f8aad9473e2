"""Times: the sequential test's errors, the ends, the last check, and pairs that are far off."""

from __future__ import annotations

import math
import random

import pytest

from bench.bisect import times
from bench.bisect.find import Finding, find
from bench.bisect.question import ENDS, Outcome
from bench.bisect.times import LOOKS, MOST_PAIRS, Times, decide, typical_spread
from tests.support.timed_history import SHIFT, history, row


def bisected(
    levels: dict[str, float], spread: float = 0.015
) -> tuple[Finding, list[tuple[str, str]]]:
    measure, measured = history(levels, spread)
    good, *commits = levels
    return find(good, tuple(commits), Times(measure)), measured


def test_a_slower_commit_is_found_with_few_pairs() -> None:
    for first_bad in (1, 7, 29):
        finding, measured = bisected(row(first_bad))
        assert (finding.verdict, finding.first_bad) == ("found", str(first_bad))
        assert "against the commit before it, it takes 1.0" in finding.evidence.detail
        assert len(measured) < 90


def test_equal_code_ends_after_the_last_look() -> None:
    finding, measured = bisected(row(99))
    assert (finding.verdict, finding.first_bad) == ("nothing", "") and len(measured) == LOOKS[-1]
    assert finding.evidence.detail.startswith("BAD is not shown to be slower than GOOD: it takes ")


def test_a_commit_that_cannot_run_is_skipped() -> None:
    levels = row(9)
    levels |= dict.fromkeys(("7", "8", "15", "14"), math.nan)
    finding, _ = bisected(levels)
    assert (finding.first_bad, finding.before, finding.between) == ("9", "6", ("7", "8"))


def test_a_good_commit_that_the_search_ends_at_is_not_named() -> None:
    """It creeps: each commit is a little slower, none by as much as matters."""
    finding, _ = bisected({str(number): 0.004 * number for number in range(20)})
    assert finding.verdict == "undecided" and finding.evidence.answer == "skip"


@pytest.mark.parametrize("truth", [0.0, SHIFT])
def test_the_sequential_test_keeps_its_error_rate_with_pairs_that_are_far_off(truth: float) -> None:
    rng, wrong, num_pairs = random.Random(1), 0, 0
    for _ in range(1000):
        log_ratios: list[float] = []
        while (answer := decide(log_ratios, SHIFT, 0.02)) is None:
            far_off = 1.0 if rng.random() < 0.03 else 0.0
            log_ratios.append(rng.gauss(truth + far_off, 0.02))
        wrong += answer != ("bad" if truth else "good")
        num_pairs += len(log_ratios)
    assert wrong <= 6 and num_pairs < 8000


def test_a_commit_half_way_stays_open() -> None:
    measure, measured = history({"good": 0.0, "half": SHIFT / 2}, 0.05, seed=4)
    ends = Outcome(
        "bad",
        "",
        {"log_ratios": [SHIFT - 0.1, SHIFT, SHIFT + 0.1] * 4, "shift": SHIFT, "good": "good"},
    )
    outcome = Times(measure).test("half", {ENDS: ends})
    assert outcome.answer == "skip" and len(measured) == MOST_PAIRS


def test_the_spread_is_that_of_most_pairs_around_their_own_commit() -> None:
    rng = random.Random(2)
    groups = [[rng.gauss(level, 0.02) for _ in range(40)] for level in (0.0, 0.05, 1.0)]
    groups[0][0] = 5.0
    assert typical_spread([*groups, [3.0]]) == pytest.approx(times.CAUTION * 0.02, rel=0.2)
    assert typical_spread([[0.0] * 12]) == times.MIN_SPREAD

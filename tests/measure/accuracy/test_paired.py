"""The statistics against scipy, brute force and simulation; error rates of the whole rule."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest
from scipy.optimize import minimize_scalar
from scipy.stats import binomtest, multinomial

from hybrid_kv.measure.accuracy import paired


@pytest.mark.parametrize(
    ("lost", "gained"), [(0, 0), (0, 5), (5, 0), (7, 1), (8, 2), (30, 30), (90, 41), (600, 719)]
)
def test_p_is_the_one_sided_binomial_tests(lost: int, gained: int) -> None:
    expected = binomtest(lost, lost + gained, 0.5, "greater").pvalue if lost + gained else 1.0
    assert paired.mcnemar_p(lost, gained) == pytest.approx(expected, rel=1e-9)


def test_five_percent_of_250_are_seen_at_the_first_look_and_identical_runs_are_not() -> None:
    ((first, alpha), (last, rest)) = paired.looks(1319)
    assert (first, last) == (250, 1319)
    assert alpha + rest == pytest.approx(paired.ALPHA)
    # 5 % of 250, all of them right before
    assert paired.decide(12, 0, alpha, final=False) == "worse"
    assert (
        paired.decide(0, 0, alpha, final=False)
        == paired.decide(0, 0, rest, final=True)
        == "no loss shown"
    )
    # gains are no reason to ask on
    assert paired.decide(0, 9, alpha, final=False) == "no loss shown"
    assert (
        paired.decide(1, 0, alpha, final=False)
        == paired.decide(9, 0, alpha, final=False)
        == "undecided"
    )
    assert paired.decide(10, 0, alpha, final=False) == "worse"
    assert paired.decide(5, 0, 0.05, final=True) == "worse"
    assert (
        paired.decide(4, 0, 0.05, final=True)
        == paired.decide(0, 50, 0.05, final=True)
        == "no loss shown"
    )
    assert paired.looks(250) == [(250, paired.ALPHA)] and len(paired.looks(251)) == 2


def rule(rng: np.random.Generator, lost: float, gained: float, questions: int = 1319) -> str:
    """Run the two-stage rule on a model that loses and gains questions with these chances."""
    kinds = rng.choice(3, size=questions, p=[lost, gained, 1 - lost - gained])
    for count, alpha in paired.looks(questions):
        counts = np.bincount(kinds[:count], minlength=3)
        verdict = paired.decide(int(counts[0]), int(counts[1]), alpha, count == questions)
        if verdict != "undecided":
            break
    return verdict


@pytest.mark.parametrize("flips", [0.005, 0.05, 0.13])
def test_the_rule_calls_an_unchanged_model_worse_in_at_most_5_percent(flips: float) -> None:
    rng, trials = np.random.default_rng(7), 3000
    alarms = sum(rule(rng, flips / 2, flips / 2) == "worse" for _ in range(trials))
    # At the limit itself, fewer than one seed in a thousand would exceed this.
    assert alarms / trials <= paired.ALPHA + 3.1 * math.sqrt(
        paired.ALPHA * (1 - paired.ALPHA) / trials
    )
    if flips == 0.13:
        assert alarms / trials > 0.02  # with many flips the exact test nearly uses up its level


@pytest.mark.parametrize(("flips", "loss"), [(0.005, 0.009), (0.05, 0.0185), (0.13, 0.028)])
def test_the_rule_finds_the_loss_that_the_final_look_can_detect(flips: float, loss: float) -> None:
    rng, trials = np.random.default_rng(8), 1500
    found = sum(rule(rng, flips / 2 + loss, flips / 2) == "worse" for _ in range(trials)) / trials
    alone = paired.power(loss, round(flips * 1319), 1319, paired.looks(1319)[1][1])
    # Stopping early when nothing was lost costs next to nothing.
    assert found == pytest.approx(alone, abs=3.5 * math.sqrt(alone * (1 - alone) / trials) + 0.01)
    assert found > 0.75
    assert paired.detectable_loss(round(flips * 1319), 1319) == pytest.approx(loss, abs=0.002)


@pytest.mark.parametrize("alpha", [0.05, 0.2])
@pytest.mark.parametrize(("loss", "flips"), [(0.0, 3), (0.3, 0), (0.2, 4), (0.5, 6)])
def test_power_is_the_sum_over_all_outcomes(alpha: float, loss: float, flips: int) -> None:
    n, total = 12, 0.0
    lost_share, gained_share = flips / n / 2 + loss, flips / n / 2
    for lost, gained in itertools.product(range(n + 1), repeat=2):
        if lost + gained <= n and paired.mcnemar_p(lost, gained) <= alpha:
            chances = [lost_share, gained_share, 1 - lost_share - gained_share]
            total += multinomial.pmf([lost, gained, n - lost - gained], n, chances)
    assert paired.power(loss, flips, n, alpha) == pytest.approx(total, abs=1e-12)


def test_the_detectable_loss_has_80_percent_power() -> None:
    for flips, n in ((0, 250), (13, 250), (171, 1319)):
        loss = paired.detectable_loss(flips, n)
        assert loss is not None
        assert paired.power(loss, flips, n) == pytest.approx(0.8, abs=1e-9)
    # A regression guide: the metrics that the documentation quotes, in points.
    assert paired.detectable_loss(0, 250) == pytest.approx(0.0267, abs=1e-4)
    assert paired.detectable_loss(4, 4) is None and paired.detectable_loss(0, 3) is None
    # No false alarm without flips; a power of a whole percent below the level is the exact test's.
    assert paired.power(0, 0, 250) == 0.0
    assert paired.power(0, 171, 1319) <= 0.05


def score(lost: int, gained: int, n: int, difference: float) -> float:
    """Return the score statistic, its constrained likelihood maximised numerically."""

    def cost(share: float) -> float:
        chances = (share, share + difference, 1 - 2 * share - difference)
        counts = (lost, gained, n - lost - gained)
        return -sum(k * math.log(p) for k, p in zip(counts, chances, strict=True) if k)

    low, high = max(0.0, -difference), (1 - difference) / 2
    found = minimize_scalar(
        cost, bounds=(low + 1e-12, high - 1e-12), method="bounded", options={"xatol": 1e-12}
    )
    variance = (2 * found.x + difference - difference**2) / n
    return abs((gained - lost) / n - difference) / math.sqrt(variance)


@pytest.mark.parametrize(
    ("lost", "gained", "n"), [(12, 2, 50), (3, 9, 40), (13, 1, 250), (60, 50, 1319), (4, 0, 30)]
)
def test_the_interval_ends_where_the_score_test_does(lost: int, gained: int, n: int) -> None:
    low, high = paired.difference_interval(lost, gained, n)
    assert low < (gained - lost) / n < high
    for end in (low, high):
        assert score(lost, gained, n, end) == pytest.approx(1.959964, abs=1e-4)
    mirrored = paired.difference_interval(gained, lost, n)
    assert mirrored == pytest.approx((-high, -low), abs=1e-9)
    assert (low > 0 or high < 0) == ((gained - lost) ** 2 / (gained + lost) > 1.959964**2)


def test_intervals_at_the_edges() -> None:
    low, high = paired.difference_interval(0, 0, 250)
    z2 = 1.959964**2
    assert high == pytest.approx(z2 / (250 + z2)) and low == pytest.approx(-high)
    assert (
        paired.difference_interval(5, 0, 5)[0] == -1 and paired.difference_interval(0, 5, 5)[1] == 1
    )


def test_what_no_lost_question_says() -> None:
    loss = paired.unseen_loss(250)
    assert (1 - loss) ** 250 == pytest.approx(0.05)
    assert loss == pytest.approx(0.0119, abs=1e-4)

"""When a result is slower, faster, the same or inconclusive: by simulation, without a clock."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import numpy as np
import numpy.typing as npt
import pytest

from bench.harness import inference
from bench.harness.cells import CellInfo
from bench.harness.compare import Measured, take_times
from bench.harness.inference import center, clopper_pearson, kept, p_slower
from bench.harness.judgement import Design, Times, confirmed, verdict
from bench.harness.verdicts import Outcome, timed_outcomes
from tests.support.noise import heavy, normal

Floats = npt.NDArray[np.float64]
Look = tuple[str, list[str]]


@pytest.fixture(autouse=True)
def fewer_resamples(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(inference, "RESAMPLES", 250)


def quiet(rng: np.random.Generator, n: int) -> Floats:
    """As the pairs of most benchmarks of 0.1 ms and more: 1.5 %."""
    return rng.normal(0, 0.015, n)


def wild(rng: np.random.Generator, n: int) -> Floats:
    """As on a machine on which nothing can be said."""
    return rng.normal(0, 0.5, n)


def decide(
    rng: np.random.Generator,
    design: Design,
    effects: Sequence[float],
    draw: Callable[[np.random.Generator, int], Floats],
) -> tuple[dict[str, Outcome], Measured, list[Look]]:
    """Simulate a comparison of benchmarks with these effects; return measurements and outcomes."""
    cells = [CellInfo("s", str(i), {}, "cpu") for i in range(len(effects))]
    measured, looks = Measured(cells), []

    def take(
        title: str, chosen: Sequence[CellInfo], design: Design, found: dict[str, Times]
    ) -> None:
        looks.append((title, [cell.benchmark for cell in chosen]))
        for cell in chosen:
            ratios = effects[int(cell.benchmark)] + draw(rng, design.pairs)
            times = found.setdefault(cell.key, Times())
            times.log_ratios += list(ratios)
            times.seconds += [(1.0, math.exp(ratio)) for ratio in ratios]

    take_times(measured, cells, design, take)
    return {one.cell.benchmark: one for one in timed_outcomes(measured, design)}, measured, looks


@pytest.mark.parametrize("draw", [normal, heavy, wild])
def test_a_suite_of_equal_code_raises_almost_no_alarm(
    draw: Callable[[np.random.Generator, int], Floats],
) -> None:
    rng, design = np.random.default_rng(11), Design(alpha=0.05)  # a rate that a simulation can see
    runs = [decide(rng, design, [0.0] * 20, draw) for _ in range(25)]
    assert np.mean([len(measured.repeat) for _, measured, _ in runs]) > 1  # there were suspects
    false = sum(
        any(one.verdict in ("slower", "faster") for one in outcomes.values())
        for outcomes, _, _ in runs
    )
    assert clopper_pearson(false, len(runs), level=0.99)[0] <= design.alpha


@pytest.mark.parametrize(("effect", "expected"), [(0.05, "slower"), (-0.05, "faster")])
def test_one_changed_benchmark_among_many_is_found(effect: float, expected: str) -> None:
    rng = np.random.default_rng(12)
    found = [decide(rng, Design(), [effect] + [0.0] * 19, quiet)[0]["0"].verdict for _ in range(25)]
    assert found.count(expected) >= 24


def test_equal_code_on_a_quiet_machine_is_the_same() -> None:
    outcomes, measured, _ = decide(np.random.default_rng(13), Design(), [0.0] * 20, quiet)
    assert {one.verdict for one in outcomes.values()} == {"same"}
    assert all(
        1 / 1.05 <= one.estimate.low <= one.estimate.high <= 1.05 for one in outcomes.values()
    )
    assert max(len(times.log_ratios) for times in measured.first.values()) <= 24


def test_what_is_off_by_more_than_the_threshold_is_hardly_ever_the_same() -> None:
    rng = np.random.default_rng(14)
    words = [
        one.verdict
        for _ in range(20)
        for one in decide(rng, Design(), [0.1] * 10, normal)[0].values()
    ]
    assert words.count("same") / len(words) < 0.025


def test_where_nothing_can_be_said_nothing_is_said() -> None:
    """An interval of 0.886 … 5.835 was once called the same."""
    outcomes, measured, looks = decide(np.random.default_rng(15), Design(), [0.0] * 20, wild)
    assert {one.verdict for one in outcomes.values()} == {"inconclusive"}
    assert {
        len(times.log_ratios) for key, times in measured.first.items() if key not in measured.repeat
    } == {24}
    assert {len(times.log_ratios) for times in measured.repeat.values()} == {24}
    assert [title for title, _ in looks] == [
        "first look",
        *["more pairs"] * 3,
        "repeat",
        "more pairs",
    ]


def test_more_pairs_are_measured_only_where_an_interval_is_too_wide() -> None:
    spread = iter([0.001, 0.3])  # of the first and the second benchmark in the first look

    def one_wild(rng: np.random.Generator, n: int) -> Floats:
        return np.array([1, -1] * (n // 2)) * next(spread, 0.001)

    outcomes, measured, looks = decide(np.random.default_rng(1), Design(), [0.0] * 2, one_wild)
    assert looks[0] == ("first look", ["0", "1"])
    assert looks[1] == ("more pairs", ["1"])
    assert len(measured.first["s/0[]"].log_ratios) == 6 < len(measured.first["s/1[]"].log_ratios)
    assert outcomes["0"].verdict == "same"


def test_the_columns_have_the_ratio_that_the_table_shows() -> None:
    for one in decide(np.random.default_rng(16), Design(), [0.0, 0.3, -0.2], heavy)[0].values():
        assert one.head / one.base == pytest.approx(one.estimate.ratio, rel=1e-12)


def test_the_kept_pairs_are_those_of_the_trimmed_mean() -> None:
    values = [5.0, -9.0, 0.1, 0.3, 0.2, 0.4, 8.0]
    assert np.mean(np.array(values)[kept(values)]) == pytest.approx(center(values))
    assert sorted(kept(values)) == [0, 2, 3, 4, 5]


def test_the_first_look_alone_is_no_evidence() -> None:
    first = {"a": Times(log_ratios=[0.3] * 6)}
    repeat = {"a": Times(log_ratios=[-0.3] * 12)}
    alarm, _ = confirmed(first, repeat, Design())["a"]
    assert alarm == ""
    assert verdict(repeat["a"], alarm, Design()) == "inconclusive"


def test_more_suspects_ask_more_of_each() -> None:
    weak = [0.03, 0.06, 0.02, 0.05, 0.0, 0.07, 0.04, 0.01, 0.05, 0.03, 0.06, 0.02]
    p = 2 * p_slower(weak, 0.01)  # tested twice, if it is extended
    assert 0.001 < p < 0.01

    def verdicts(others: int) -> dict[str, tuple[str, float]]:
        keys = ["a", *map(str, range(others))]
        first = {key: Times(log_ratios=[0.05] * 6) for key in keys}
        repeat = {key: Times(log_ratios=weak if key == "a" else [0.0, 0.01] * 6) for key in keys}
        return confirmed(first, repeat, Design())

    assert verdicts(0)["a"] == ("slower", p)
    assert verdicts(9)["a"] == ("", pytest.approx(10 * p))


def test_a_repeat_that_convinced_after_its_first_pairs_stays_convincing() -> None:
    clear, noise = [0.1, 0.11, 0.09, 0.1, 0.12, 0.1] * 2, [0.5, -0.5] * 6
    first = {"a": Times(log_ratios=[0.1] * 6)}
    assert confirmed(first, {"a": Times(log_ratios=clear + noise)}, Design())["a"][0] == "slower"
    assert confirmed(first, {"a": Times(log_ratios=noise + clear)}, Design())["a"][0] == ""

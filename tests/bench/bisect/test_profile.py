"""Profiles of two sides: changes are reported, noise is not, a commit's functions are named."""

from __future__ import annotations

import random
from pathlib import Path

from bench.bisect.find import find
from bench.bisect.profile import TURNS, moved, story
from bench.bisect.question import NotMeasurableError
from bench.bisect.times import Times
from bench.harness.worker import _function
from tests.support.timed_history import history, row


def turns(seed: int, **seconds: float) -> list[dict[str, float]]:
    rng = random.Random(seed)
    return [
        {name: rng.gauss(mean, 0.05 * mean) for name, mean in seconds.items()} for _ in range(TURNS)
    ]


def test_the_function_that_became_slower_comes_first_and_noise_is_left_out() -> None:
    before = turns(0, schedule=100e-6, admit=40e-6, free=10e-6)
    after = turns(1, schedule=160e-6, admit=40e-6, free=5e-6)
    found = moved(before, after)
    assert [one.name for one in found] == ["schedule", "free"]
    assert found[0].line.startswith("    +") and found[1].line.startswith("     -")
    assert " us a call: schedule (" in found[0].line


def test_equal_code_moves_nothing() -> None:
    rows = [turns(seed, a=1e-4, b=2e-4, c=5e-6) for seed in range(40)]
    assert sum(len(moved(rows[i], rows[i + 1])) for i in range(0, 40, 2)) == 0
    assert story(lambda *_: (rows[0], rows[1]), "", "") == [
        "profile: no single function is clearly slower"
    ]


def test_a_frame_is_named_by_its_file_in_the_commit(tmp_path: Path) -> None:
    own = f"schedule\0{tmp_path / 'hybrid_kv' / 'engine' / 'scheduler.py'}\x007"
    assert _function(own, tmp_path) == "hybrid_kv/engine/scheduler.py schedule"
    assert (
        _function("apply\0/usr/lib/torch/nn/functional.py\x009", tmp_path)
        == "nn/functional.py apply"
    )


def test_a_time_that_was_found_is_profiled_against_the_commit_before_it() -> None:
    measure, _ = history(row(7), 0.015)
    profiled = []

    def profile(
        before: str, first_bad: str
    ) -> tuple[list[dict[str, float]], list[dict[str, float]]]:
        profiled.append((before, first_bad))
        return turns(0, loop=1e-4), turns(1, loop=2e-4)

    good, *commits = row(7)
    finding = find(good, tuple(commits), Times(measure, profile))
    assert profiled == [("6", "7")] and finding.first_bad == "7"
    assert "loop (" in finding.evidence.metrics["story"][0]


def test_the_commit_is_named_even_where_nothing_can_be_profiled() -> None:
    def profile(
        before: str, first_bad: str
    ) -> tuple[list[dict[str, float]], list[dict[str, float]]]:
        raise NotMeasurableError("no profile: ModuleNotFoundError: No module named 'pyinstrument'")

    good, *commits = row(7)
    finding = find(good, tuple(commits), Times(history(row(7), 0.015)[0], profile))
    assert finding.verdict == "found"
    assert finding.evidence.metrics["story"] == [
        "no profile: ModuleNotFoundError: No module named 'pyinstrument'"
    ]

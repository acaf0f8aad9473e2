"""The self-test: what counts as right, what it draws, and its rates."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from hybrid_kv.bisect import self_test
from hybrid_kv.bisect.memory import Outcome
from hybrid_kv.bisect.run import Finding
from hybrid_kv.bisect.self_test import KINDS, Noise, Trial, draw, judge, rates
from hybrid_kv.results import read_rows

RNG = random.Random(0)
QUIET = [Noise(tuple(RNG.gauss(0, 0.015) for _ in range(48)), 2.0)]
DONE = Outcome("bad", "")


def test_only_a_single_commit_is_right_or_wrong() -> None:
    assert judge(Finding("found", DONE, "a", "b"), "b") == "right"
    assert judge(Finding("found", DONE, "a", "c"), "b") == "wrong"
    assert judge(Finding("found", DONE, "a", "c", between=("b",)), "b") == "open"
    assert judge(Finding("undecided", DONE, "a", "c"), "b") == judge(Finding("nothing", DONE), "b") == "open"


@pytest.mark.parametrize("kind", KINDS)
def test_drawn_histories_are_bisected_rightly(kind: str) -> None:
    outcomes = [draw(kind, number, QUIET).outcome for number in range(4)]
    expected = "open" if kind == "equal time" else "right"
    assert outcomes.count(expected) >= (3 if kind == "answers" else 4), outcomes


def test_a_number_is_a_history() -> None:
    first, second = draw("time", 3, QUIET), draw("time", 3, QUIET)
    assert (first.questions, first.pairs, first.cpu_seconds) == (second.questions, second.pairs, 2.0 * second.pairs)


def test_a_search_that_blames_the_neighbour_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(self_test._Drawn, "is_bad", lambda self, commit: int(commit) >= self.culprit - 1)
    assert draw("tokens", 0, QUIET).outcome == "wrong"


def test_rates_have_exact_intervals() -> None:
    trials = [Trial("time", "drawn", n, "right" if n < 9 else "wrong", 8, 90 + n, 60.0, 6.0) for n in range(10)]
    right, wrong = rates(trials)
    assert (right.value, wrong.value, right.n) == (0.9, 0.1, 10)
    assert right.ci_low == pytest.approx(0.555, abs=1e-3) and right.ci_high == pytest.approx(0.9975, abs=1e-3)
    assert right.params["longest_minutes"] == 1.0 and right.params["pairs"] == 94


def test_planted_trials_are_not_run_twice(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ran = []

    def plant(kind: str, number: int, *_: object) -> Trial:
        ran.append((kind, number))
        return Trial(kind, "planted", number, "right", 8, 0, 60.0, 30.0)

    monkeypatch.setattr(self_test, "plant", plant)
    monkeypatch.setattr(self_test, "_loops", lambda *_: 1)
    monkeypatch.setattr(self_test, "measure_noise", lambda *_: QUIET)
    for _ in range(2):
        summary = self_test.self_test(tmp_path, "0" * 40, tmp_path / "bisect.csv", 1, 1)
    assert ran == [("tokens", 0), ("counts", 0), ("time", 0)]
    assert [row.params["way"] for row in summary] == ["drawn"] * 10 + ["planted"] * 6
    assert len(read_rows(tmp_path / "bisect.csv")) == 3 + 2 * 16


def test_what_is_planted_is_still_there() -> None:
    root = Path(self_test.__file__).parents[2]
    plants = [self_test._more_operations(), self_test._slower_steps(10), *map(self_test._bug, self_test.BUGS)]
    for plant in plants:
        for file, edit in plant.items():
            text = (root / file).read_text(encoding="utf-8")
            compile(edit(text), file, "exec")
            assert edit(text) != text

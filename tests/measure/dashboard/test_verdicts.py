"""Whose word counts, of which code it is, and the answers that follow."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from hybrid_kv.measure.dashboard.answers import HeadAnswers
from hybrid_kv.measure.dashboard.report import Report
from hybrid_kv.measure.dashboard.verdicts import SuiteVerdict, overall, verdicts
from hybrid_kv.measure.results import NO_HEAD, Head
from tests.measure.dashboard.rows import RECEIPT, history, results, row


class Checkout(Head):
    """HEAD is commit 9 of ten; each changes what any suite but `calm` measures."""

    def commits_since(self, commit: str, suite: str) -> int | None:
        known = commit[:5].isdigit() and int(commit[:5]) < 10
        return (0 if suite == "calm" else 9 - int(commit[:5])) if known else None


HEAD = Checkout("0000900009" * 4)


def only(folder: Path, *rows: dict[str, Any]) -> SuiteVerdict:
    (verdict,) = verdicts(results(folder, *rows).rows, HEAD)
    return verdict


def answers(folder: Path, *rows: dict[str, Any], head: Head = HEAD) -> HeadAnswers:
    return Report(results(folder, *rows), head).answers()


def test_only_the_newest_run_judges(tmp_path: Path) -> None:
    old = row(0, {"i": 1}, verdict="fail", suite="guard", benchmark="a", metric="m")
    new = [row(9, verdict="pass", suite="guard", benchmark="a", metric=f"n{i}") for i in range(3)]
    verdict = only(tmp_path, old, *new)
    assert (verdict.word, verdict.count("pass"), len(verdict.rows)) == ("pass", 3, 3)
    assert verdict.newest.commit == "00009" * 8


def test_runs_at_the_newest_commit_are_joined_and_a_repeated_check_counts_once(
    tmp_path: Path,
) -> None:
    same = {"suite": "guard", "benchmark": "a", "commit": row(9)["commit"]}
    rows = [row(7, verdict="fail", metric="m", **same), row(7, verdict="fail", metric="n", **same)]
    verdict = only(
        tmp_path,
        *rows,
        row(8, verdict="pass", metric="m", **same),
        row(8, verdict="pass", metric="o", **same),
    )
    assert (verdict.count("pass"), verdict.count("fail")) == (2, 1)


def test_a_static_metric_stands_until_it_is_replaced(tmp_path: Path) -> None:
    static = {"suite": "kernels", "benchmark": "k", "unit": "", "metric": "registers"}
    rows = [
        row(0, {"target": "sm_80"}, verdict="fail", **static),
        row(0, {"target": "sm_90"}, verdict="fail", **static),
        row(9, {"target": "sm_90"}, verdict="pass", **static),
    ]
    verdict = only(tmp_path, *rows)
    assert (verdict.word, verdict.count("pass"), verdict.count("fail")) == ("fail", 1, 1)
    assert verdict.machine == ""
    passed = only(tmp_path / "passed", *[one | {"verdict": "pass"} for one in rows])
    assert passed.word == "pass"  # what did not change keeps its old row


def test_each_gate_of_accuracy_is_judged_by_its_own_newest_run(tmp_path: Path) -> None:
    def gate(run: int, metric: str, verdict: str) -> dict[str, Any]:
        return row(
            run, suite="accuracy", benchmark="gsm8k", metric=metric, unit="", verdict=verdict
        )

    rows = [
        gate(7, "cached_kl", "pass"),
        gate(8, "cached_kl", "fail"),
        gate(9, "exact_match_strict", "pass"),
    ]
    verdict = only(tmp_path, *rows)
    assert (verdict.word, verdict.count("pass"), verdict.count("fail")) == ("fail", 1, 1)
    assert only(tmp_path / "mended", *rows, gate(9, "cached_kl", "pass")).word == "pass"


def test_each_machine_has_a_verdict_of_its_own(tmp_path: Path) -> None:
    found = results(tmp_path, row(0, verdict="fail"), row(1, machine="b", verdict="pass"), row(2))
    assert [(v.machine, v.word) for v in verdicts(found.rows)] == [("b", "pass"), ("box", "fail")]


def test_void_is_not_passed(tmp_path: Path) -> None:
    rows = [row(9, {"i": i}, verdict=word) for i, word in enumerate(["pass", "void", "pass"])]
    assert only(tmp_path, *rows).word == "void"
    assert overall(["pass", "stale"]) == "stale"
    assert overall(["pass", "stale", "void"]) == "void"
    assert overall(["void", "fail", "pass"]) == "fail"
    assert overall([]) == "none"


# ---- of which code ----


@pytest.mark.parametrize(
    ("run", "own", "word", "distance"),
    [
        (9, {}, "pass", "0 commits"),
        (8, {}, "stale", "1 commit"),
        (3, {}, "stale", "6 commits"),
        (3, {"suite": "calm"}, "pass", "0 commits"),
        (9, {"dirty": True}, "stale", "a changed tree"),
        (20, {}, "stale", "a commit that this checkout lacks"),
        (3, {"verdict": "fail"}, "fail", "6 commits"),
        (3, {"verdict": "void"}, "void", "6 commits"),
    ],
)
def test_a_run_passes_only_as_long_as_head_is_the_code_that_it_measured(
    tmp_path: Path, run: int, own: dict[str, Any], word: str, distance: str
) -> None:
    verdict = only(tmp_path, row(run, **{"verdict": "pass"} | own))
    assert verdict.fresh is not None
    assert (verdict.word, verdict.fresh.distance) == (word, distance)


def test_without_a_checkout_only_rows_of_an_installed_package_are_current(tmp_path: Path) -> None:
    assert answers(tmp_path, row(9, verdict="pass"), head=NO_HEAD).verdict.word == "stale"
    assert (
        answers(
            tmp_path / "installed", row(9, verdict="pass", commit=""), head=NO_HEAD
        ).verdict.word
        == "pass"
    )


# ---- the answers ----


def timed(runs: range, slower_from: int = 10**6, **own: Any) -> list[dict[str, Any]]:
    """A series of the first screen."""
    same = {"suite": "scheduler", "benchmark": "decode", "params": {"receipt": RECEIPT}, **own}
    return [row(run, value=100.0 + run % 2 + 20 * (run >= slower_from), **same) for run in runs]


def test_all_is_well(tmp_path: Path) -> None:
    level = [one | {"commit": row(9)["commit"]} for one in timed(range(12))]
    found = answers(tmp_path, row(9, verdict="pass", suite="guard"), *level)
    assert found.verdict.text == "✓ HEAD is right, and no slower"
    assert found.right.text == "✓ yes: 1 of 1 check passed"
    assert found.slower.text == "✓ no: the levels of 1 chart stand"
    assert (found.cause, found.command, found.stale) == (None, "", ())


def test_a_failed_check_is_run_again(tmp_path: Path) -> None:
    found = answers(tmp_path, row(9, verdict="fail", suite="guard", benchmark="layout"))
    assert found.verdict.text == "✕ HEAD is wrong"
    assert found.right.text == "✕ no: 1 check failed"
    assert found.command == 'hybrid-kv guard -k "layout"'
    void = answers(tmp_path / "void", row(9, verdict="void", suite="ssd", unit=""))
    assert void.verdict.text == "○ HEAD is not proved right"
    assert void.command == "python -m bench --suite ssd --out results/microbench.csv"


def test_a_worse_level_is_bisected(tmp_path: Path) -> None:
    fine = row(9, verdict="pass", suite="guard")
    found = answers(tmp_path, fine, *timed(range(20), 12), *timed(range(20), 12, benchmark="admit"))
    assert found.verdict.text == "✕ HEAD is right, but worse than it was"
    assert found.slower.text == "✕ yes: scheduler admit +19.9 % worse, and 1 more"
    assert found.cause is not None and found.cause.first.commit[:5] == "00012"
    assert found.command == "hybrid-kv bisect 0001100011 0001200012 --benchmark scheduler/admit"


def test_a_comparison_that_failed_says_that_head_is_slower_not_wrong(tmp_path: Path) -> None:
    compared = {
        "suite": "compare",
        "benchmark": "ssd/scan",
        "metric": "cpu_time_ratio",
        "unit": "time ratio",
    }
    rows = [row(9, {"receipt": RECEIPT}, verdict="fail", baseline_commit="b" * 40, **compared)]
    found = answers(tmp_path, row(9, verdict="pass", suite="guard"), *rows)
    assert (found.right.word, found.slower.word, found.verdict.word) == ("pass", "worse", "worse")
    assert found.command == "hybrid-kv bisect bbbbbbbbbb 0000900009 --benchmark ssd/scan"


def test_a_promise_of_speed_that_is_not_kept_is_not_wrong_either(tmp_path: Path) -> None:
    same = {
        "suite": "ssd",
        "params": {"receipt": RECEIPT},
        "unit": "time ratio",
        "metric": "ratio_to_engine",
    }
    found = answers(tmp_path, row(9, verdict="pass", suite="guard"), row(9, verdict="fail", **same))
    assert (found.right.word, found.slower.word) == ("pass", "worse")
    stale = answers(
        tmp_path / "stale", row(9, verdict="pass", suite="guard"), row(3, verdict="pass", **same)
    )
    assert (found.right.word, stale.verdict.word, stale.stale) == ("pass", "pass", ())


def test_a_rival_that_became_slower_is_no_news(tmp_path: Path) -> None:
    rows = timed(range(20), 12, params={"receipt": RECEIPT, "subject": "vllm"})
    assert answers(tmp_path, row(9, verdict="pass", suite="guard"), *rows).slower.word == "none"


def test_what_is_stale_is_measured_again_the_guard_first(tmp_path: Path) -> None:
    rows = [
        row(run, verdict="pass", suite=suite, unit="")
        for run, suite in ((2, "ssd"), (8, "guard"), (9, "kernels"))
    ]
    found = answers(tmp_path, *rows)
    assert found.verdict.text == "△ HEAD has not been measured"
    assert found.right.text == "△ not known: 2 of 3 suites measured other code"
    assert [one.suite for one in found.stale] == ["guard", "ssd"]
    assert found.command == "hybrid-kv guard --record"
    assert answers(tmp_path / "ssd", rows[0]).command.startswith("python -m bench --suite ssd")


def test_charts_that_end_before_head_say_nothing_about_it(tmp_path: Path) -> None:
    found = answers(tmp_path, row(9, verdict="pass", suite="guard"), *timed(range(-12, 0)))
    assert found.verdict.text == "✓ HEAD is right"
    assert found.slower.text == "△ not known: 1 of 1 chart end before HEAD"
    short = answers(tmp_path / "short", row(9, verdict="pass", suite="guard"), *timed(range(9)))
    assert short.slower.text == "– not known: no chart has 10 runs"


def test_nothing_has_run(tmp_path: Path) -> None:
    found = answers(tmp_path, *history([1.0]))
    assert found.verdict.text == "– No check has run yet"
    assert found.command == "hybrid-kv guard --record"

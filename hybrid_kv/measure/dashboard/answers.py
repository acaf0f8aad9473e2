"""Four answers about HEAD and a verdict: right, slower, since which commit, what to run next."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from hybrid_kv.measure.dashboard.data import COMPARE
from hybrid_kv.measure.dashboard.failing import Failing, counted
from hybrid_kv.measure.dashboard.series import MIN_SEGMENT, Series
from hybrid_kv.measure.dashboard.verdicts import SuiteVerdict, command_of, freshness, overall
from hybrid_kv.measure.dashboard.words import SIGNS, plural
from hybrid_kv.measure.results import Head


@dataclass(frozen=True)
class HeadAnswer:
    """An answer: a word for its colour and the text, its sign first.

    The word is `pass`, `stale`, `void`, `fail`, `worse` or `none`.
    """

    word: str
    text: str


@dataclass(frozen=True)
class HeadAnswers:
    """HeadAnswers about HEAD.

    Attributes:
        verdict: one line; `fail`, `void`, `worse`, `stale`, `pass` or `none`.
        right, slower: the first two answers.
        cause: what failed first in the list of what is failing; None if nothing is.
        command: to run next; empty if there is nothing to do.
        stale: suites that check what is right, and whose newest run is no longer of HEAD's code.
    """

    verdict: HeadAnswer
    right: HeadAnswer
    slower: HeadAnswer
    cause: Failing | None
    command: str
    stale: tuple[SuiteVerdict, ...]


def answers_of(
    suites: Sequence[SuiteVerdict],
    failing: Sequence[Failing],
    charted: Sequence[Series],
    head: Head,
) -> HeadAnswers:
    """Return the answers that follow from the newest runs.

    Args:
        suites: their verdicts and distance from HEAD.
        failing: what is failing, the worst first.
        charted: the series of the first screen.
    """
    checks = [suite for suite in suites if not suite.is_of_speed]
    speed = {(suite.suite, suite.machine) for suite in suites if suite.is_of_speed}
    worse = [
        failure
        for failure in failing
        if failure.word == "worse" or (failure.key[0], failure.key[4]) in speed
    ]
    wrong = [failure for failure in failing if failure not in worse]
    right = _right(checks, wrong)
    slower = _slower(worse, charted, head)
    cause = next(iter([*wrong, *worse]), None)
    old = sorted((suite for suite in checks if suite.is_stale), key=_distance)
    return HeadAnswers(
        _verdict(right, slower), right, slower, cause, _command(cause, checks), tuple(old)
    )


def _verdict(right: HeadAnswer, slower: HeadAnswer) -> HeadAnswer:
    is_worse = slower.word == "worse" and right.word in ("pass", "stale")
    word = "worse" if is_worse else right.word
    texts = {
        "fail": "HEAD is wrong",
        "void": "HEAD is not proved right",
        "worse": "HEAD is right, but worse than it was"
        if right.word == "pass"
        else "HEAD is worse than it was",
        "stale": "HEAD has not been measured",
        "pass": "HEAD is right, and no slower" if slower.word == "pass" else "HEAD is right",
        "none": "No check has run yet",
    }
    return HeadAnswer(word, f"{SIGNS[word]} {texts[word]}")


def _right(suites: Sequence[SuiteVerdict], wrong: Sequence[Failing]) -> HeadAnswer:
    word = overall(suite.word for suite in suites)
    judged = sum(len(suite.rows) for suite in suites)
    passed = sum(suite.count("pass") for suite in suites)
    old = sum(suite.is_stale for suite in suites)
    failed = [failure for failure in wrong if failure.word == "fail"]
    void = [failure for failure in wrong if failure.word == "void"]
    texts = {
        "fail": f"no: {counted(failed)}",
        "void": f"not known: {counted(void)}",
        "stale": f"not known: {old} of {plural(len(suites), 'suite')} measured other code",
        "pass": f"yes: {passed:,} of {plural(judged, 'check')} passed",
        "none": "not known: no check has run",
    }
    return HeadAnswer(word, f"{SIGNS[word]} {texts[word]}")


def _slower(worse: Sequence[Failing], charted: Sequence[Series], head: Head) -> HeadAnswer:
    """HeadAnswer whether HEAD is slower.

    A step can be seen in a series of twice `MIN_SEGMENT` runs, and at HEAD if the newest of them is
    of its code.
    """
    long = [series for series in charted if len(series.clean) >= 2 * MIN_SEGMENT]
    old = [series for series in long if not freshness(series.rows, head).is_current]
    charts = plural(len(long), "chart")
    if worse:
        more = f", and {len(worse) - 1:,} more" if len(worse) > 1 else ""
        suite, benchmark, *_ = worse[0].key
        return _signed("worse", f"yes: {suite} {benchmark} {worse[0].text}{more}")
    if not long:
        return _signed("none", f"not known: no chart has {2 * MIN_SEGMENT} runs")
    if old:
        return _signed("stale", f"not known: {len(old)} of {charts} end before HEAD")
    return _signed("pass", f"no: the levels of {charts} stand")


def _signed(word: str, text: str) -> HeadAnswer:
    return HeadAnswer(word, f"{SIGNS[word]} {text}")


def _command(cause: Failing | None, suites: Sequence[SuiteVerdict]) -> str:
    if cause is None:
        old = [suite for suite in suites if suite.is_stale]
        if old:
            return command_of(max(old, key=_urgency).suite)
        return "" if suites else command_of("guard")
    suite, benchmark, *_ = cause.key
    newest = cause.newest
    if suite == COMPARE:
        return (
            f"hybrid-kv bisect {newest.baseline_commit[:10]} {newest.commit[:10]} --benchmark "
            f"{benchmark}"
        )
    if cause.step is None:
        return f'hybrid-kv guard -k "{benchmark}"' if suite == "guard" else command_of(suite)
    good = cause.passed.commit[:10]
    bad = cause.first.commit[:10]
    return f"hybrid-kv bisect {good} {bad} --benchmark {suite}/{benchmark}"


def _urgency(verdict: SuiteVerdict) -> tuple[bool, float]:
    """Return the order of suites to run: first those that say whether HEAD is right."""
    return verdict.suite == "guard", _distance(verdict)


def _distance(verdict: SuiteVerdict) -> float:
    """Return the commits from a stale run to HEAD; a commit that HEAD lacks is the farthest."""
    commits = verdict.fresh.commits if verdict.fresh else 0
    return float("inf") if commits is None else commits

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
class Answer:
    """An answer: a word for its colour and the text, its sign first.

    The word is `pass`, `stale`, `void`, `fail`, `worse` or `none`.
    """

    word: str
    text: str


@dataclass(frozen=True)
class Answers:
    """Answers about HEAD.

    Attributes:
        verdict: one line; `fail`, `void`, `worse`, `stale`, `pass` or `none`.
        right, slower: the first two answers.
        cause: what failed first in the list of what is failing; None if nothing is.
        command: to run next; empty if there is nothing to do.
        stale: suites that check what is right, and whose newest run is no longer of HEAD's code.
    """

    verdict: Answer
    right: Answer
    slower: Answer
    cause: Failing | None
    command: str
    stale: tuple[SuiteVerdict, ...]


def answers_of(
    found: Sequence[SuiteVerdict], failing: Sequence[Failing], charted: Sequence[Series], head: Head
) -> Answers:
    """Return the answers that follow from the newest runs.

    Args:
        found: their verdicts beside HEAD.
        failing: what is failing, the worst first.
        charted: the series of the first screen.
    """
    checks = [one for one in found if not one.is_of_speed]
    speed = {(one.suite, one.machine) for one in found if one.is_of_speed}
    worse = [one for one in failing if one.word == "worse" or (one.key[0], one.key[4]) in speed]
    wrong = [one for one in failing if one not in worse]
    right, slower = _right(checks, wrong), _slower(worse, charted, head)
    cause = next(iter([*wrong, *worse]), None)
    old = sorted((one for one in checks if one.is_stale), key=_distance)
    return Answers(
        _verdict(right, slower), right, slower, cause, _command(cause, checks), tuple(old)
    )


def _verdict(right: Answer, slower: Answer) -> Answer:
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
    return Answer(word, f"{SIGNS[word]} {texts[word]}")


def _right(found: Sequence[SuiteVerdict], wrong: Sequence[Failing]) -> Answer:
    word = overall(one.word for one in found)
    judged = sum(len(one.rows) for one in found)
    passed = sum(one.count("pass") for one in found)
    old = sum(one.is_stale for one in found)
    texts = {
        "fail": f"no: {counted([one for one in wrong if one.word == 'fail'])}",
        "void": f"not known: {counted([one for one in wrong if one.word == 'void'])}",
        "stale": f"not known: {old} of {plural(len(found), 'suite')} measured other code",
        "pass": f"yes: {passed:,} of {plural(judged, 'check')} passed",
        "none": "not known: no check has run",
    }
    return Answer(word, f"{SIGNS[word]} {texts[word]}")


def _slower(worse: Sequence[Failing], charted: Sequence[Series], head: Head) -> Answer:
    """Answer whether HEAD is slower.

    A step can be seen in a series of twice `MIN_SEGMENT` runs, and at HEAD if the newest of them is
    of its code.
    """
    long = [one for one in charted if len(one.clean) >= 2 * MIN_SEGMENT]
    old = [one for one in long if not freshness(one.rows, head).is_current]
    if worse:
        more = f", and {len(worse) - 1:,} more" if len(worse) > 1 else ""
        word, text = "worse", f"yes: {worse[0].key[0]} {worse[0].key[1]} {worse[0].text}{more}"
    elif not long:
        word, text = "none", f"not known: no chart has {2 * MIN_SEGMENT} runs"
    elif old:
        word, text = (
            "stale",
            f"not known: {len(old)} of {plural(len(long), 'chart')} end before HEAD",
        )
    else:
        word, text = "pass", f"no: the levels of {plural(len(long), 'chart')} stand"
    return Answer(word, f"{SIGNS[word]} {text}")


def _command(cause: Failing | None, found: Sequence[SuiteVerdict]) -> str:
    if cause is None:
        old = [one for one in found if one.is_stale]
        if old:
            return command_of(max(old, key=_urgency).suite)
        return "" if found else command_of("guard")
    suite, benchmark, *_ = cause.key
    newest = cause.newest
    if suite == COMPARE:
        return (
            f"hybrid-kv bisect {newest.baseline_commit[:10]} {newest.commit[:10]} --benchmark "
            f"{benchmark}"
        )
    if cause.step is None:
        return f'hybrid-kv guard -k "{benchmark}"' if suite == "guard" else command_of(suite)
    good, bad = cause.passed.commit[:10], cause.first.commit[:10]
    return f"hybrid-kv bisect {good} {bad} --benchmark {suite}/{benchmark}"


def _urgency(verdict: SuiteVerdict) -> tuple[bool, float]:
    """Return the order of suites to run: first those that say whether HEAD is right."""
    return verdict.suite == "guard", _distance(verdict)


def _distance(verdict: SuiteVerdict) -> float:
    """Return the commits from a stale run to HEAD; a commit that HEAD lacks is the farthest."""
    commits = verdict.fresh.commits if verdict.fresh else 0
    return float("inf") if commits is None else commits

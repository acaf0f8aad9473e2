"""The way from a good and a bad end to a commit: both ends, a search between them, and what it found, asked again."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from hybrid_kv.bisect.kinds import Question
from hybrid_kv.bisect.memory import CONFIRMED, ENDS, Memory, Outcome
from hybrid_kv.bisect.search import Answer, search

Verdict = Literal["found", "nothing", "undecided"]


@dataclass(frozen=True)
class Finding:
    """What came of it.

    Attributes:
        verdict: `found`; `nothing`: the ends do not differ; `undecided`: asked again, the culprit was none.
        evidence: of the last question that was asked.
        before, culprit: the last good commit and the first bad one.
        between: commits between these two, which did not say.
        asked, skipped: how many commits between the ends.
    """

    verdict: Verdict
    evidence: Outcome
    before: str = ""
    culprit: str = ""
    between: tuple[str, ...] = ()
    asked: int = 0
    skipped: int = 0


Tell = Callable[[str, Outcome, float], None]  # a commit or an end, what it said, seconds


def find(good: str, commits: tuple[str, ...], question: Question, memory: Memory, tell: Tell) -> Finding:
    """
    Args:
        good: the commit before `commits`, whose last one is bad.
        tell: is called for every new answer.
    """

    def recall(key: str, ask: Callable[[], Outcome]) -> Outcome:
        begin, is_new = time.perf_counter(), key not in memory.outcomes
        outcome = memory.recall(key, ask)
        if is_new:
            tell(key, outcome, time.perf_counter() - begin)
        return outcome

    known = memory.outcomes
    ends = recall(ENDS, lambda: question.ends(good, commits[-1]))
    if ends.answer != "bad":
        return Finding("nothing", ends)
    answers: list[Answer] = []

    def ask(position: int) -> Answer:
        commit = commits[position]
        answers.append(recall(commit, lambda: question.ask(commit, known)).answer)
        return answers[-1]

    last, first = search(len(commits), ask)
    before, culprit = good if last < 0 else commits[last], commits[first]
    evidence = recall(CONFIRMED, lambda: question.confirm(before, culprit, known))
    verdict: Verdict = "found" if evidence.answer == "bad" else "undecided"
    between = commits[last + 1 : first]
    return Finding(verdict, evidence, before, culprit, between, len(answers), answers.count("skip"))

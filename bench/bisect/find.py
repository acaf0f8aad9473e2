"""The search: both ends are tested, then commits between them, then the result is confirmed.

The last test is another one.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Collection
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Literal

from bench.bisect.question import CONFIRMED, ENDS, Answer, NotMeasurableError, Outcome, Question
from hybrid_kv.config import ConfigError
from hybrid_kv.files import write_whole
from hybrid_kv.measure.timing.clock import wall_clock

Verdict = Literal["found", "nothing", "undecided"]
Report = Callable[
    [str, Outcome, float], None
]  # a commit or `ENDS` or `CONFIRMED`, its outcome, seconds


@dataclass(frozen=True)
class Finding:
    """The result of a bisect.

    Attributes:
        verdict: `found`; `nothing`: the ends do not differ; `undecided`: the last test did not
            confirm the result.
        evidence: the last outcome.
        before, first_bad: the last good commit and the first bad one.
        between: commits between these two, which could not be tested.
        tested, skipped: how many commits between the ends.
    """

    verdict: Verdict
    evidence: Outcome
    before: str = ""
    first_bad: str = ""
    between: tuple[str, ...] = ()
    tested: int = 0
    skipped: int = 0


class Memory:
    """The outcomes so far, by commit, `ENDS` or `CONFIRMED`.

    They are kept in a file, from which an interrupted bisect resumes.
    """

    def __init__(self, file: Path | None = None) -> None:
        self._file = file
        self.outcomes: dict[str, Outcome] = {}
        if file is not None and file.exists():
            try:
                found = json.loads(file.read_text(encoding="utf-8"))
                self.outcomes = {key: Outcome(**one) for key, one in found.items()}
            except (ValueError, TypeError, AttributeError):
                raise ConfigError(
                    f"{file} is not the state of a bisect; delete it to start anew"
                ) from None

    def recall(self, key: str, test: Callable[[], Outcome], report: Report) -> Outcome:
        """Return the known outcome, or that of `test`, which is reported and kept."""
        if key not in self.outcomes:
            begin = wall_clock()
            self.outcomes[key] = test()
            report(key, self.outcomes[key], wall_clock() - begin)
            if self._file is not None:
                write_whole(
                    self._file,
                    json.dumps({name: asdict(one) for name, one in self.outcomes.items()}),
                )
        return self.outcomes[key]


def _nothing(*_: object) -> None:
    """Report nothing."""


def find(
    good: str,
    commits: tuple[str, ...],
    question: Question,
    memory: Memory | None = None,
    report: Report = _nothing,
) -> Finding:
    """Find the first bad commit: test the ends, search between them, confirm the result.

    Args:
        good: the commit before `commits`, whose last one is bad.
        report: is called with every new outcome.
    """
    memory = memory or Memory()
    known = memory.outcomes

    def recall(key: str, test: Callable[[], Outcome]) -> Outcome:
        def tested() -> Outcome:
            try:
                return test()
            except NotMeasurableError as error:
                return Outcome("skip", str(error))

        return memory.recall(key, tested, report)

    ends = memory.recall(ENDS, lambda: question.ends(good, commits[-1]), report)
    if ends.answer != "bad":
        return Finding("nothing", ends)
    answers: list[Answer] = []

    def test(position: int) -> Answer:
        commit = commits[position]
        answers.append(recall(commit, lambda: question.test(commit, known)).answer)
        return answers[-1]

    last, first = search(len(commits), test)
    before, first_bad = good if last < 0 else commits[last], commits[first]
    evidence = recall(CONFIRMED, lambda: question.confirm(before, first_bad, known))
    verdict: Verdict = "found" if evidence.answer == "bad" else "undecided"
    between = commits[last + 1 : first]
    return Finding(
        verdict, evidence, before, first_bad, between, len(answers), answers.count("skip")
    )


def search(num: int, test: Callable[[int], Answer]) -> tuple[int, int]:
    """Halve a row of `num` commits, the last of which is bad.

    It ends when nothing between good and bad can be tested.

    Returns:
        Positions of the last good commit (-1: the one before the row) and of the first bad one. All
        commits between them were skipped.
    """
    good, bad, skipped = -1, num - 1, set[int]()
    while (position := _next(good, bad, skipped)) is not None:
        answer = test(position)
        if answer == "good":
            good = position
        elif answer == "bad":
            bad = position
        else:
            skipped.add(position)
    return good, bad


def _next(good: int, bad: int, skipped: Collection[int]) -> int | None:
    """Return the middle; where that was skipped a quarter, an eighth.

    Commits that cannot run come in a row.
    """
    if all(position in skipped for position in range(good + 1, bad)):
        return None
    parts = 2
    while True:
        for part in range(1, parts, 2):
            position = good + (bad - good) * part // parts
            if position > good and position not in skipped:
                return position
        parts *= 2

"""Lost answers: the same questions at each commit, paired with those of both ends.

The pairs are judged by McNemar's exact test.

A commit is bad if it is worse than GOOD, good if it is better than BAD, each at `ALPHA`; one that
is both or neither lies between them and is skipped. The engine is greedy: a commit gives the same
answers twice, and only the choice of questions is left to chance. So the first bad commit and the
one before it are confirmed with the questions of the next seed.
"""

from __future__ import annotations

import hashlib
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from bench.bisect.history import Trees, cannot_run
from bench.bisect.question import ENDS, NotMeasurableError, Outcome
from hybrid_kv.config import HybridKVError
from hybrid_kv.measure.accuracy.paired import difference_interval, mcnemar_p
from hybrid_kv.measure.accuracy.read import read_answers

ALPHA = 0.01


@dataclass(frozen=True)
class Answered:
    """The questions that a commit answered right, as text of 0 and 1, and a digest of them all."""

    right: str
    questions: str


AnswersOf = Callable[[str, int], Answered]  # a commit, the seed of the questions


def flips(before: str, after: str) -> tuple[int, int]:
    """Return how many answers were lost, and how many gained."""
    pairs = [*zip(before, after, strict=True)]
    return pairs.count(("1", "0")), pairs.count(("0", "1"))


def in_words(before: str, after: str) -> str:
    lost, gained = flips(before, after)
    low, high = difference_interval(lost, gained, len(before))
    return (
        f"{lost} answers of {len(before)} lost, {gained} gained, p {mcnemar_p(lost, gained):.2g}, "
        f"difference {low:+.1%} to {high:+.1%}"
    )


@dataclass(frozen=True)
class Answers:
    """See `question.Question`."""

    answers: AnswersOf
    seed: int

    def ends(self, good: str, bad: str) -> Outcome:
        first, last = self.answers(good, self.seed), self.answers(bad, self.seed)
        if first.questions != last.questions:
            raise HybridKVError(
                "GOOD and BAD have different questions; give ends with the same ones"
            )
        is_worse = mcnemar_p(*flips(first.right, last.right)) <= ALPHA
        detail = in_words(first.right, last.right)
        metrics = {"good": first.right, "bad": last.right, "questions": first.questions}
        return Outcome(
            "bad" if is_worse else "good",
            detail if is_worse else f"no loss shown: {detail}",
            metrics,
        )

    def test(self, commit: str, known: Mapping[str, Outcome]) -> Outcome:
        ends = known[ENDS].metrics
        own = self.answers(commit, self.seed)
        if own.questions != ends["questions"]:
            return Outcome("skip", "it has other questions")
        detail = in_words(ends["good"], own.right)
        is_worse = mcnemar_p(*flips(ends["good"], own.right)) <= ALPHA
        is_better = mcnemar_p(*flips(own.right, ends["bad"])) <= ALPHA
        return Outcome("skip" if is_worse == is_better else "bad" if is_worse else "good", detail)

    def confirm(self, before: str, first_bad: str, known: Mapping[str, Outcome]) -> Outcome:
        first, last = self.answers(before, self.seed + 1), self.answers(first_bad, self.seed + 1)
        is_worse = (
            first.questions == last.questions
            and mcnemar_p(*flips(first.right, last.right)) <= ALPHA
        )
        detail = f"of other questions: {in_words(first.right, last.right)}"
        return Outcome(
            "bad" if is_worse else "skip", detail, {"before": first.right, "first_bad": last.right}
        )


def answers_of(trees: Trees, options: Sequence[str]) -> AnswersOf:
    """Return a function that runs each commit's own `hybrid-kv accuracy` with these options."""

    def run(commit: str, seed: int) -> Answered:
        with tempfile.TemporaryDirectory(prefix="hybrid-kv-bisect-") as folder:
            file = Path(folder) / "samples.jsonl"
            words = (
                "accuracy",
                "--seed",
                str(seed),
                "--samples",
                str(file),
                "--results",
                folder,
                *options,
            )
            ran = trees.run(commit, *words)
            if not file.exists():
                raise NotMeasurableError(cannot_run(ran))
            found = read_answers(file).by_doc
        hashes = repr([(number, found[number].hashes) for number in sorted(found)])
        right = "".join(str(int(found[number].correct)) for number in sorted(found))
        return Answered(right, hashlib.sha256(hashes.encode()).hexdigest()[:16])

    return run

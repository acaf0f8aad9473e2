"""Tests of a commit. Each kind of question is a class in a file of its own."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol

from hybrid_kv.config import HybridKVError

Answer = Literal["good", "bad", "skip"]
ENDS, CONFIRMED = "ends", "confirmed"  # keys of outcomes beside those of commits


class NotMeasurableError(HybridKVError):
    """A commit cannot run the test."""


@dataclass(frozen=True)
class Outcome:
    """The answer of a test, one line for people, and the metrics behind it, ready for JSON."""

    answer: Answer
    detail: str
    metrics: Mapping[str, Any] = field(default_factory=dict)


class Question(Protocol):
    """Something that was right, or fast, at GOOD and is not at BAD."""

    def ends(self, good: str, bad: str) -> Outcome:
        """Return `bad` if the two differ as expected.

        Otherwise there is nothing to search for, and the detail says why.

        Raises:
            HybridKVError: one of them cannot be tested.
        """

    def test(self, commit: str, known: Mapping[str, Outcome]) -> Outcome:
        """Return whether a commit is bad.

        `known` has all outcomes so far, `ENDS` among them.

        Raises:
            NotMeasurableError: it cannot run the test, and is skipped.
        """

    def confirm(self, before: str, first_bad: str, known: Mapping[str, Outcome]) -> Outcome:
        """Return the evidence: `bad` if a new test confirms the result.

        Then `first_bad` is bad and the commit before it is good.
        """
        first, last = self.test(before, known), self.test(first_bad, known)
        is_so = (first.answer, last.answer) == ("good", "bad")
        return Outcome(
            "bad" if is_so else "skip",
            f"before: {first.detail}; with it: {last.detail}",
            last.metrics,
        )

"""What can be asked of a commit. Each question is a class of its own in a file of its own."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol

from hybrid_kv.bisect.memory import Outcome


class Question(Protocol):
    """Something that was right, or fast, at GOOD and is not at BAD."""

    def ends(self, good: str, bad: str) -> Outcome:
        """`bad` if the two differ as they should. Else there is nothing to look for, and the detail says why.

        Raises:
            HybridKVError: one of them cannot be asked.
        """

    def ask(self, commit: str, known: Mapping[str, Outcome]) -> Outcome:
        """Whether a commit is bad; `known` has what was answered before, `ENDS` among it."""

    def confirm(self, before: str, culprit: str, known: Mapping[str, Outcome]) -> Outcome:
        """`bad` if the culprit is bad and the commit before it good, asked anew: the evidence."""

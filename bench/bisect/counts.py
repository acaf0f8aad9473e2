"""An exact number of a benchmark: blocks, bytes, launches."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from bench.bisect.question import ENDS, Outcome, Question

Count = Callable[[str], Mapping[str, int]]  # of a commit, by metric


@dataclass(frozen=True)
class Counts(Question):
    """Counts of a benchmark; see `Question`.

    A commit is bad if a count that differs between the ends is at least as near to BAD's.
    """

    count: Count

    def ends(self, good: str, bad: str) -> Outcome:
        first, last = self.count(good), self.count(bad)
        changed = {
            name: (first[name], last[name])
            for name in first.keys() & last.keys()
            if first[name] != last[name]
        }
        if not changed:
            return Outcome("good", "GOOD and BAD count the same: " + _in_words(last))
        detail = ", ".join(
            f"{name} {before} -> {after}" for name, (before, after) in sorted(changed.items())
        )
        return Outcome("bad", detail, {"changed": changed})

    def test(self, commit: str, known: Mapping[str, Outcome]) -> Outcome:
        changed = known[ENDS].metrics["changed"]
        counts = self.count(commit)
        own = {name: counts[name] for name in sorted(changed) if name in counts}
        if len(own) < len(changed):
            return Outcome(
                "skip", f"it does not count {', '.join(sorted(changed.keys() - own.keys()))}"
            )
        is_bad = any(
            abs(own[name] - before) >= abs(own[name] - after)
            for name, (before, after) in changed.items()
        )
        return Outcome("bad" if is_bad else "good", _in_words(own), {"counts": own})


def _in_words(counts: Mapping[str, int]) -> str:
    return ", ".join(f"{name} {value}" for name, value in counts.items())

"""A scenario that the guard saw fail, replayed by each commit's own guard.

It is run by `hybrid-kv replay FILE`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from bench.bisect.history import Trees, cannot_run, last_line
from bench.bisect.question import ENDS, NotMeasurableError, Outcome, Question
from hybrid_kv.config import HybridKVError

BROKEN, FINE = "broken rule: ", "no rule is broken"


# Of a commit: `good`, or `bad` with metrics that name the `rule` that is broken.
# NotMeasurableError: it cannot run.
Play = Callable[[str], Outcome]


@dataclass(frozen=True)
class Tokens(Question):
    """See `question.Question`. A commit that breaks another rule first than BAD does is skipped."""

    play: Play
    name: str  # of the scenario, for people

    def ends(self, good: str, bad: str) -> Outcome:
        first, last = self._end("GOOD", good), self._end("BAD", bad)
        if first.answer == "bad":
            return Outcome(
                "good", f"{self.name} fails at GOOD as well: {first.detail}; give an earlier GOOD"
            )
        if last.answer == "good":
            return Outcome("good", f"{self.name} breaks no rule at BAD")
        return last

    def _end(self, name: str, commit: str) -> Outcome:
        try:
            return self.play(commit)
        except NotMeasurableError as error:
            raise HybridKVError(f"{name}: {self.name} {error}") from None

    def test(self, commit: str, known: Mapping[str, Outcome]) -> Outcome:
        played, wanted = self.play(commit), known[ENDS].metrics["rule"]
        if played.answer == "bad" and played.metrics["rule"] != wanted:
            return Outcome("skip", f"{played.detail}, not {wanted}")
        return played


def played_by(trees: Trees, file: Path) -> Play:
    """Return a function that plays the file by the guard of each commit."""

    def play(commit: str) -> Outcome:
        ran = trees.run(commit, "guard", "--replay", str(file.absolute()))
        line = last_line(ran.stdout)
        if ran.returncode == 1 and line.startswith(BROKEN):
            story = ran.stdout.splitlines()[1:-1]
            return Outcome("bad", line, {"rule": line.removeprefix(BROKEN), "story": story})
        if ran.returncode == 0 and line == FINE:
            return Outcome("good", line)
        raise NotMeasurableError(cannot_run(ran))

    return play

"""A scenario that the guard saw fail: `hybrid-kv guard --replay FILE`, run by each commit's own guard."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from hybrid_kv.bisect.history import Trees
from hybrid_kv.bisect.memory import ENDS, Outcome
from hybrid_kv.bisect.own_code import NotMeasurableError, cannot_run, last_line, run_own
from hybrid_kv.config import HybridKVError

BROKEN, FINE = "broken rule: ", "no rule is broken"


Play = Callable[[str], Outcome]  # of a commit; its figures name the `rule` that is broken


@dataclass(frozen=True)
class Replay:
    """See `kinds.Question`. A commit that breaks another rule first than BAD does says nothing of BAD's."""

    play: Play
    name: str  # of the scenario, for people

    def ends(self, good: str, bad: str) -> Outcome:
        first, last = self.play(good), self.play(bad)
        for name, one in (("GOOD", first), ("BAD", last)):
            if one.answer == "skip":
                raise HybridKVError(f"{name}: {self.name} {one.detail}")
        if first.answer == "bad":
            return Outcome("good", f"{self.name} fails at GOOD as well: {first.detail}; give an earlier GOOD")
        if last.answer == "good":
            return Outcome("good", f"{self.name} breaks no rule at BAD")
        return last

    def ask(self, commit: str, known: Mapping[str, Outcome]) -> Outcome:
        played, wanted = self.play(commit), known[ENDS].figures["rule"]
        if played.answer == "bad" and played.figures["rule"] != wanted:
            return Outcome("skip", f"{played.detail}, not {wanted}")
        return played

    def confirm(self, before: str, culprit: str, known: Mapping[str, Outcome]) -> Outcome:
        first, last = self.ask(before, known), self.ask(culprit, known)
        is_so = (first.answer, last.answer) == ("good", "bad")
        return Outcome("bad" if is_so else "skip", f"before: {first.detail}; with it: {last.detail}", last.figures)


def played_by(trees: Trees, file: Path) -> Play:
    """The guard of each commit."""

    def play(commit: str) -> Outcome:
        try:
            ran = run_own(trees, commit, "guard", "--replay", str(file.absolute()))
        except NotMeasurableError as error:
            return Outcome("skip", str(error))
        told = last_line(ran.stdout)
        if ran.returncode == 1 and told.startswith(BROKEN):
            story = ran.stdout.splitlines()[1:-1]
            return Outcome("bad", told, {"rule": told.removeprefix(BROKEN), "story": story})
        if ran.returncode == 0 and told == FINE:
            return Outcome("good", told)
        return Outcome("skip", cannot_run(ran))

    return play

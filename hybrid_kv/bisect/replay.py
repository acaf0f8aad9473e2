"""A scenario that the guard saw fail: `hybrid-kv guard --replay FILE`, run by each commit's own guard."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from hybrid_kv.bisect.history import Trees
from hybrid_kv.bisect.memory import ENDS, Outcome
from hybrid_kv.config import ConfigError, HybridKVError

LIMIT = 600.0  # seconds; a shrunk scenario takes less than one, the imports before it ten
BROKEN, FINE = "broken rule: ", "no rule is broken"


def run_tree(tree: Path, *words: str) -> subprocess.CompletedProcess[str]:
    """`hybrid-kv WORDS` by a commit's own code, in its folder.

    Raises:
        subprocess.TimeoutExpired: it was still at it after `LIMIT` seconds.
    """
    environment = {**os.environ, "PYTHONPATH": str(tree), "OMP_NUM_THREADS": "1"}
    command = (sys.executable, "-m", "hybrid_kv.cli", *words)
    return subprocess.run(
        command, cwd=tree, env=environment, timeout=LIMIT, capture_output=True, text=True, errors="backslashreplace"
    )


def last_line(text: str) -> str:
    return next((line for line in reversed(text.splitlines()) if line.strip()), "")


@dataclass(frozen=True)
class Replay:
    """See `kinds.Question`. A commit that breaks another rule first than BAD does says nothing of BAD's."""

    trees: Trees
    file: Path

    def ends(self, good: str, bad: str) -> Outcome:
        first, last = self._play(good), self._play(bad)
        for name, one in (("GOOD", first), ("BAD", last)):
            if one.answer == "skip":
                raise HybridKVError(f"{name}: {self.file.name} {one.detail}")
        if first.answer == "bad":
            return Outcome("good", f"{self.file.name} fails at GOOD as well: {first.detail}; give an earlier GOOD")
        if last.answer == "good":
            return Outcome("good", f"{self.file.name} breaks no rule at BAD")
        return last

    def ask(self, commit: str, known: Mapping[str, Outcome]) -> Outcome:
        played, wanted = self._play(commit), known[ENDS].figures["rule"]
        if played.answer == "bad" and played.figures["rule"] != wanted:
            return Outcome("skip", f"{played.detail}, not {wanted}")
        return played

    def confirm(self, before: str, culprit: str, known: Mapping[str, Outcome]) -> Outcome:
        first, last = self.ask(before, known), self.ask(culprit, known)
        is_so = (first.answer, last.answer) == ("good", "bad")
        return Outcome("bad" if is_so else "skip", f"before: {first.detail}; with it: {last.detail}", last.figures)

    def _play(self, commit: str) -> Outcome:
        try:
            ran = run_tree(self.trees.of(commit), "guard", "--replay", str(self.file.absolute()))
        except subprocess.TimeoutExpired:
            return Outcome("skip", f"still at it after {LIMIT:.0f} s")
        except ConfigError as error:
            return Outcome("skip", str(error))
        told = last_line(ran.stdout)
        if ran.returncode == 1 and told.startswith(BROKEN):
            story = ran.stdout.splitlines()[1:-1]
            return Outcome("bad", told, {"rule": told.removeprefix(BROKEN), "story": story})
        if ran.returncode == 0 and told == FINE:
            return Outcome("good", told)
        return Outcome("skip", f"cannot run: {last_line(ran.stderr) or told or f'exit code {ran.returncode}'}")

"""Reduces the case that caught a bug, and runs it again: each in a fresh process that imports the changed copy."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from hybrid_kv.guard.cases import Reproducer, broken_rule, reproduce

RUNS = 5


@dataclass(frozen=True)
class Reduced(Reproducer):
    """A case as small as it got, run again with and without the bug.

    Attributes:
        fails: the share of its runs that broke its rule first.
        passes: without the bug no rule is broken; None: not run yet.
    """

    fails: float = 0.0
    passes: bool | None = None

    def __str__(self) -> str:
        return (
            f"{self.requests} req, {self.tokens} tok, {self.seconds:.0f} s, fails {round(self.fails * RUNS)} of {RUNS}"
        )

    @property
    def is_right(self) -> bool:
        """It fails each time with the bug, and never without."""
        return self.fails == 1 and self.passes is True


def reduced(task: Mapping[str, Any], case: Path) -> dict[str, Any]:
    """Reduce a case and write it into the task's `folder`; a `Reproducer` without its story."""
    made = asdict(reproduce(case.read_text(), Path(task["folder"])))
    del made["story"]
    return made


def rule(task: Mapping[str, Any], case: Path) -> str:
    """Which rule the case in the task's `file` breaks."""
    return broken_rule(Path(task["file"]))

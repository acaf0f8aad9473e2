"""Makes the case that caught a planted bug small: run by a fresh process that imports the changed copy of the package.

The small case is played `PLAYS` times, each in a process of its own in which nothing was played before: it is forked
from one that has only imported.
"""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from hybrid_kv.guard.cases import Reproducer, broken_rule, reproduce
from hybrid_kv.mutation.catch import compile_loops

PLAYS = 20


@dataclass(frozen=True)
class Small(Reproducer):
    """A case as small as it got, played again with and without the bug.

    Attributes:
        held: the share of its plays that broke its rule first.
        passes: without the bug no rule is broken; None: nobody has looked.
    """

    held: float = 0.0
    passes: bool | None = None

    def __str__(self) -> str:
        return (
            f"{self.requests} req, {self.tokens} tok, {self.seconds:.0f} s, fails {round(self.held * PLAYS)} of {PLAYS}"
        )

    @property
    def is_right(self) -> bool:
        """It fails each time with the bug, and never without."""
        return self.held == 1 and self.passes is True


def _small(file: Path, folder: Path) -> dict[str, Any]:
    made = asdict(reproduce(file.read_text(), folder))
    del made["story"]
    return made


def _forked(limit: float, function: Callable[..., Any], *arguments: Any) -> tuple[Any, str]:
    """What a function answers in a process that is forked for it, and why if it does not within `limit` seconds."""
    receiver, sender = os.pipe()
    if (child := os.fork()) == 0:
        try:
            signal.setitimer(signal.ITIMER_REAL, limit)  # no child inherits it
            torch.set_num_threads(1)
            with os.fdopen(sender, "w") as answer:
                try:
                    json.dump((function(*arguments), ""), answer)
                except Exception as error:
                    json.dump((None, f"{type(error).__name__}: {error}"), answer)
        finally:
            os._exit(0)
    os.close(sender)
    with os.fdopen(receiver) as answer:
        text = answer.read()
    os.waitpid(child, 0)
    value, problem = json.loads(text) if text else (None, f"it died, or was still at it after {limit:.0f} s")
    return value, problem


def made_small(task: Mapping[str, Any], case: Path) -> dict[str, Any]:
    """Make a case small, write it into the task's `folder`, and play it again and again; a `Small` as it is written."""
    with suppress(Exception):  # The loops that numba has compiled take half a second to load, in each process anew.
        compile_loops()
    small, problem = _forked(task["limit"], _small, case, Path(task["folder"]))
    if problem:
        raise RuntimeError(problem)
    plays = [_forked(task["limit"], broken_rule, Path(small["file"]))[0] for _ in range(PLAYS)]
    return {**small, "held": plays.count(small["rule"]) / PLAYS}

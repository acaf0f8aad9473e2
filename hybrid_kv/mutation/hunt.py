"""Plants mutants one by one, each in a folder and a process of its own, and tells what caught them."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import asdict, dataclass, replace
from multiprocessing import get_context
from pathlib import Path
from typing import Any

from hybrid_kv.guard.cases import broken_rule
from hybrid_kv.kernels.block_tables import HostTables, TableLayout
from hybrid_kv.mutation.mutant import UNCHANGED, Mutant
from hybrid_kv.mutation.small import PLAYS, Small
from hybrid_kv.results import Row as Record

REQUESTS = 2500  # of the sanitizer's scenarios, as many as the quick guard has
FAILED = ("time limit", "no answer")  # of the run, which is no catch


@dataclass(frozen=True)
class Row:
    """What became of a mutant.

    Attributes:
        executed: whether a changed line was reached; None: nobody has looked.
        section, rule: what caught it first; empty if nothing did.
        requests: until then, where the section counts them.
        seconds: until then, imports included; of one core, but for `http`, which waits for a server.
        cell, is_first: see `outside.Found`.
        small: the case that caught it, if it was to be made small.
    """

    id: str
    executed: bool | None
    section: str
    rule: str
    detail: str
    requests: int
    seconds: float
    cell: str = ""
    is_first: bool | None = None
    small: Small | None = None

    @property
    def caught(self) -> bool:
        return bool(self.section) and self.section not in FAILED

    @property
    def problem(self) -> str:
        """Why this is not as it should be, for a column; empty: it is."""
        if self.id == UNCHANGED:
            return "false alarm" if self.section else ""
        if not self.caught:
            return "not reached" if self.executed is False else "not caught"
        return "" if self.small is None or self.small.is_right else "the small case is wrong"

    def records(self, by: str) -> list[Record]:
        """As rows of the results file. Seconds have no unit of time: they are of an engine that is wrong."""
        told = {
            "by": by, "section": self.section, "rule": self.rule, "cell": self.cell, "is_first": self.is_first,
            "executed": self.executed,
        }  # fmt: skip
        params = {name: value for name, value in told.items() if value not in ("", None)}

        def record(metric: str, value: float, better: str, unit: str = "", n: int = self.requests) -> Record:
            return Record("mutants", self.id, metric, value, unit, params, n=n, better=better)

        records = [record("caught", int(self.caught), "higher"), record("seconds", round(self.seconds, 1), "lower")]
        if (small := self.small) is not None:
            records += [
                record("small_requests", small.requests, "lower", "requests", 1),
                record("small_tokens", small.tokens, "lower", "tokens", 1),
                record("small_seconds", round(small.seconds, 1), "lower", "", 1),
                record("small_held", small.held, "higher", "share", PLAYS),
                record("small_passes_unchanged", int(small.passes is True), "higher", "", 1),
            ]
        return records


def hunt(mutant: Mutant, by: str, limit: float, repro: Path | None = None) -> Row:
    """Plant one mutant and run what may catch it, but for `http` at most `limit` seconds.

    Args:
        repro: a folder in which the case that caught it is kept, as small as it gets in as many seconds.

    Raises:
        ConfigError: the code has moved.
    """
    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder)
        lines = mutant.plant(root)
        if by == "http":
            from hybrid_kv.mutation.outside import ask  # with transformers, which the others do not need

            found, seconds = ask(root)
            return Row(mutant.id, None, **asdict(found), seconds=seconds)
        # A loop that numba has compiled tells nobody which lines it reaches.
        is_loop = any("import compiled" in Path(file).read_text(encoding="utf-8") for file in lines)
        try:
            answer = _in_copy(root, "catch", {"by": by, "lines": lines, "amount": REQUESTS}, limit, not is_loop)
        except _FailedError as error:
            return Row(mutant.id, False, str(error), "", error.detail, 0, limit)
        row, case = Row(mutant.id, **answer), root / "catch.case"
        if repro is None or not case.exists():
            return row
        try:
            small = Small(**_in_copy(root, "small", [str(case), str(repro / mutant.id)], limit))
        except _FailedError as error:
            return replace(row, detail=f"{row.detail}; making it small failed: {error}: {error.detail}")
        return replace(row, small=replace(small, passes=not broken_rule(Path(small.file))))


class _FailedError(Exception):
    """One of `FAILED`."""

    def __init__(self, what: str, detail: str) -> None:
        super().__init__(what)
        self.detail = detail


def _in_copy(root: Path, module: str, task: Any, limit: float, compiled: bool = True) -> Any:
    """What a module of `mutation` answers in a fresh process that imports the copy.

    Raises:
        _FailedError: it took longer than the limit, or died.
    """
    file = root / f"{module}.json"
    file.write_text(json.dumps(task), encoding="utf-8")
    environment = {
        **os.environ, "PYTHONPATH": str(root), "PYTHONDONTWRITEBYTECODE": "1", "OMP_NUM_THREADS": "1",
        "NUMBA_DISABLE_JIT": str(int(not compiled)),
    }  # fmt: skip
    command = [sys.executable, "-m", f"hybrid_kv.mutation.{module}", str(file)]
    try:
        run = subprocess.run(command, cwd=root, env=environment, timeout=limit, capture_output=True, text=True)
    except subprocess.TimeoutExpired:
        raise _FailedError(FAILED[0], f"still at it after {limit:.0f} s") from None
    answer = file.with_suffix(".answer")
    if not answer.exists():
        raise _FailedError(FAILED[1], " ".join(run.stderr.strip().splitlines()[-1:]))
    return json.loads(answer.read_text(encoding="utf-8"))


def hunt_all(mutants: Sequence[Mutant], by: str, jobs: int, limit: float, repro: Path | None = None) -> Iterator[Row]:
    """A row for each mutant, as they come. See `hunt`."""
    # Copies find the loops that numba has compiled here, which takes it five seconds.
    HostTables([TableLayout(1, 1, 1, 1)], 1, 1)
    with ProcessPoolExecutor(jobs, mp_context=get_context("spawn")) as pool:
        tasks = [pool.submit(hunt, mutant, by, limit, repro) for mutant in mutants]
        try:
            for task in as_completed(tasks):
                yield task.result()
        finally:
            pool.shutdown(cancel_futures=True)

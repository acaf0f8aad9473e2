"""Plants mutants one by one, each in a folder and a process of its own, and tells what caught them."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import asdict, dataclass
from multiprocessing import get_context
from pathlib import Path

from hybrid_kv.kernels.block_tables import HostTables, TableLayout
from hybrid_kv.mutation.mutant import UNCHANGED, Mutant
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

    @property
    def caught(self) -> bool:
        return bool(self.section) and self.section not in FAILED

    @property
    def is_fine(self) -> bool:
        """A bug was caught; where there is none, nothing was found."""
        return not self.section if self.id == UNCHANGED else self.caught

    def records(self, by: str) -> list[Record]:
        """As rows of the results file. Seconds have no unit of time: they are of an engine that is wrong."""
        told = {
            "by": by, "section": self.section, "rule": self.rule, "cell": self.cell, "is_first": self.is_first,
            "executed": self.executed,
        }  # fmt: skip
        params = {name: value for name, value in told.items() if value not in ("", None)}
        values = {"caught": (int(self.caught), "higher"), "seconds": (round(self.seconds, 1), "lower")}
        return [
            Record("mutants", self.id, metric, value, params=params, n=self.requests, better=better)
            for metric, (value, better) in values.items()
        ]


def hunt(mutant: Mutant, by: str, limit: float) -> Row:
    """Plant one mutant and run what may catch it, but for `http` at most `limit` seconds.

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
        task = root / "task.json"
        task.write_text(json.dumps({"by": by, "lines": lines, "amount": REQUESTS}), encoding="utf-8")
        # A loop that numba has compiled tells nobody which lines it reaches.
        is_loop = any("import compiled" in Path(file).read_text(encoding="utf-8") for file in lines)
        environment = {
            **os.environ, "PYTHONPATH": folder, "PYTHONDONTWRITEBYTECODE": "1", "OMP_NUM_THREADS": "1",
            "NUMBA_DISABLE_JIT": str(int(is_loop)),
        }  # fmt: skip
        command = [sys.executable, "-m", "hybrid_kv.mutation.catch", str(task)]
        try:
            run = subprocess.run(command, cwd=folder, env=environment, timeout=limit, capture_output=True, text=True)
        except subprocess.TimeoutExpired:
            return Row(mutant.id, False, "time limit", "", f"still at it after {limit:.0f} s", 0, limit)
        answer = task.with_suffix(".answer")
        if not answer.exists():
            last = run.stderr.strip().splitlines()[-1:]
            return Row(mutant.id, False, "no answer", "", " ".join(last), 0, 0.0)
        return Row(mutant.id, **json.loads(answer.read_text(encoding="utf-8")))


def hunt_all(mutants: Sequence[Mutant], by: str, jobs: int, limit: float) -> Iterator[Row]:
    """A row for each mutant, as they come."""
    # Copies find the loops that numba has compiled here, which takes it five seconds.
    HostTables([TableLayout(1, 1, 1, 1)], 1, 1)
    with ProcessPoolExecutor(jobs, mp_context=get_context("spawn")) as pool:
        tasks = [pool.submit(hunt, mutant, by, limit) for mutant in mutants]
        try:
            for task in as_completed(tasks):
                yield task.result()
        finally:
            pool.shutdown(cancel_futures=True)

"""Inject mutants, each into a copy in a process of its own, and report what catches them."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Executor, ProcessPoolExecutor, ThreadPoolExecutor, as_completed
from contextlib import ExitStack, closing, contextmanager
from dataclasses import asdict, dataclass, field, replace
from itertools import groupby
from multiprocessing import get_context
from pathlib import Path
from signal import SIGALRM, SIGKILL, SIGXCPU
from threading import local
from typing import Any

from hybrid_kv.check.guard.cases import Reproducer, broken_rule
from hybrid_kv.errors import HybridKVError
from hybrid_kv.measure.results import Row as Record
from mutants.runner import forks, units
from mutants.runner.guard import RUN, compile_loops
from mutants.runner.mutant import PACKAGE, UNCHANGED, Changed, Mutant, inject
from mutants.runner.units import BY_TESTS, tests_of_all
from mutants.runner.weights import WEIGHTS, write_checkpoints

RUNS = 5  # of a reduced case


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
        fails = round(self.fails * RUNS)
        size = f"{self.requests} req, {self.tokens} tok, {self.seconds:.0f} s"
        return f"{size}, fails {fails} of {RUNS}"

    @property
    def is_right(self) -> bool:
        """Return whether it fails each time with the bug, and never without."""
        return self.fails == 1 and self.passes is True


@dataclass(frozen=True)
class Row:
    """The outcome of a mutant.

    Attributes:
        section, rule: what caught it first; empty if nothing did.
        requests: until then, where the section counts them.
        seconds: until then, of one core, without the imports of other packages; of `http`, which
            waits for a server, all that passed.
        cell: see `guard.Catch`.
        reduced: the case that caught it, if it was to be reduced.
        digest, change: see `generated.Generated`; empty for a known bug. The results have no text.
    """

    id: str
    section: str
    rule: str
    detail: str
    requests: int
    seconds: float
    cell: str = ""
    reduced: Reduced | None = None
    digest: str = ""
    change: str = ""

    @property
    def caught(self) -> bool:
        """No known bug loops or ends a process, so that one which does was injected wrong.

        A generated one may.
        """
        return bool(self.section) and (self.section != RUN or bool(self.digest))

    @property
    def problem(self) -> str:
        """Return why this is not as it should be, for a column; empty: it is."""
        if self.id == UNCHANGED:
            return "false alarm" if self.section else ""
        if not self.caught:
            return "not caught"
        return "" if self.reduced is None or self.reduced.is_right else "the reduced case is wrong"

    def records(self, by: str) -> list[Record]:
        """Yield the rows of the results file.

        Seconds have no unit of time: they are of an engine that is wrong.
        """
        parts = {
            "by": by,
            "section": self.section,
            "rule": self.rule,
            "cell": self.cell,
            "digest": self.digest,
        }
        params = {name: value for name, value in parts.items() if value}

        def record(
            metric: str, value: float, better: str, unit: str = "", n: int = self.requests
        ) -> Record:
            return Record("mutants", self.id, metric, value, unit, params, n=n, better=better)

        records = [record("caught", int(self.caught), "higher")]
        if not self.digest:  # There are thousands of the others.
            records.append(record("seconds", round(self.seconds, 1), "lower"))
        if (case := self.reduced) is not None:
            records += [
                record("reduced_requests", case.requests, "lower", "requests", 1),
                record("reduced_tokens", case.tokens, "lower", "tokens", 1),
                record("reduced_seconds", round(case.seconds, 1), "lower", "", 1),
                record("reduced_fails", case.fails, "higher", "share", RUNS),
                record("reduced_passes_unchanged", int(case.passes is True), "higher", "", 1),
            ]
        return records


class FailedError(Exception):
    """A process did not answer: why, as a rule, and more of it."""


class Forks:
    """A process of `forks`, which does one thing at a time."""

    def __init__(self) -> None:
        environment = {
            **os.environ,
            "PYTHONDONTWRITEBYTECODE": "1",
            "OMP_NUM_THREADS": "1",
            "TOKENIZERS_PARALLELISM": "false",
        }
        self.process = subprocess.Popen(
            [sys.executable, forks.__file__],
            env=environment,
            text=True,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            start_new_session=True,
        )

    def call(self, root: Path, function: str, task: Mapping[str, Any], limit: float) -> Any:
        """Return what a function such as `guard.run` returns, run with the copy in `root`.

        Raises:
            FailedError: it took longer than the limit, in seconds of one core, or died.
        """
        (root / forks.TASK).write_text(
            json.dumps({"compiled": True, **task, "limit": limit}), encoding="utf-8"
        )
        assert self.process.stdin is not None and self.process.stdout is not None
        print(root, *function.split("."), sep="\t", file=self.process.stdin, flush=True)
        code = int(self.process.stdout.readline())
        if code == 0:
            return json.loads((root / forks.ANSWER).read_text(encoding="utf-8"))
        if code in (-SIGXCPU, -SIGALRM):
            raise FailedError("time limit", f"not done after {limit:.0f} s of one core")
        last = (root / forks.OUTPUT).read_text(encoding="utf-8").splitlines()[-1:]
        raise FailedError("death", " ".join([f"exit code {code}", *last]))

    def close(self) -> None:
        """End it, and what it does."""
        os.killpg(self.process.pid, SIGKILL)
        self.process.communicate()


@dataclass(frozen=True)
class MutationRun:
    """A run of mutants: what is done with each.

    Attributes:
        limit: seconds of one core for one, but by `http`.
        repro: a folder for the case that caught one, reduced for at most as many seconds.
        weights: the folder of exact checkpoints and their right answers; None: nothing needs it.
        sound: tests that have failed with a mutant and passed without.
    """

    limit: float
    repro: Path | None = None
    weights: Path | None = None
    sound: set[str] = field(default_factory=set)

    def judge(self, mutant: Mutant, ways: Sequence[str], forked: Forks) -> Row:
        """Inject one mutant and see what catches it.

        The guard's ways come first, in one process, then unit tests, in their order.

        Raises:
            ConfigError: the code has moved.
            HybridKVError: the test that fails with it fails without it, too.
        """
        row = Row(mutant.id, "", "", "", 0, 0.0, **mutant.labels())
        for by_tests, part in groupby(ways, BY_TESTS.__eq__):
            if row.caught:
                break
            with tempfile.TemporaryDirectory() as folder:
                root = Path(folder)
                texts = mutant.changed()
                inject(root, texts)
                try:
                    if by_tests:
                        found = self._by_tests(root, tests_of_all(texts), forked)
                    else:
                        found = self._by_guard(root, texts, [*part], forked)
                except FailedError as error:
                    found = {"section": RUN, "rule": error.args[0], "detail": error.args[1]}
                requests, seconds = (
                    max(row.requests, found.get("requests", 0)),
                    found.get("seconds", self.limit),
                )
                caught = (
                    found if found["section"] or not row.section else {}
                )  # a loop that no test has seen stays one
                row = replace(
                    row, **{**caught, "requests": requests, "seconds": row.seconds + seconds}
                )
                if self.repro is not None and (root / forks.CASE).exists():
                    row = self._reduced(row, root, self.repro, forked)
        return row

    def _by_guard(
        self, root: Path, texts: Changed, ways: Sequence[str], forked: Forks
    ) -> dict[str, Any]:
        # A changed loop is not compiled, which takes longer than to interpret it.
        task = {
            "ways": ways,
            "compiled": not any("import compiled" in text for text in texts.values()),
        }
        function = "guard.run"
        if self.weights is not None:
            function, task = "weights.run", {**task, "folder": str(self.weights)}
        found: dict[str, Any] = forked.call(root, function, task, self.limit)
        return found

    def record(self, folder: Path, forked: Forks) -> None:
        """Write exact checkpoints into a folder, and the right answers to all questions."""
        write_checkpoints(folder)
        with tempfile.TemporaryDirectory() as copy:
            inject(Path(copy), {})
            task = {"folder": str(folder), "record": True}
            forked.call(Path(copy), "weights.run", task, 10 * self.limit)

    def _by_tests(self, root: Path, tests: Sequence[str], forked: Forks) -> dict[str, Any]:
        task, limit = {"checkout": str(PACKAGE.parent)}, min(units.LIMIT, self.limit)
        found: dict[str, Any] = forked.call(root, "units.run", {**task, "tests": tests}, limit)
        if (test := found.pop("test")) and test not in self.sound:
            with tempfile.TemporaryDirectory() as folder:
                inject(Path(folder), {})
                if forked.call(Path(folder), "units.run", {**task, "tests": [test]}, limit)["test"]:
                    raise HybridKVError(f"{test} fails without a mutant, too: {found['detail']}")
            self.sound.add(test)
        return found

    def _reduced(self, row: Row, root: Path, repro: Path, forked: Forks) -> Row:
        try:
            made = forked.call(
                root, "guard.reduced", {"folder": str(repro.absolute() / row.id)}, self.limit
            )
            rules = [
                forked.call(root, "guard.rule", {"file": made["file"]}, self.limit)
                for _ in range(RUNS)
            ]
        except FailedError as error:
            return replace(row, detail=f"{row.detail}; reducing it failed: {': '.join(error.args)}")
        passes = not broken_rule(Path(made["file"]))
        return replace(
            row, reduced=Reduced(**made, fails=rules.count(made["rule"]) / RUNS, passes=passes)
        )


def _probe(mutant: Mutant) -> Row:
    from mutants.runner.served import probe  # with transformers, which the others do not need

    with tempfile.TemporaryDirectory() as folder:
        inject(Path(folder), mutant.changed())
        found, seconds = probe(Path(folder))
        return Row(mutant.id, **asdict(found), seconds=seconds)


Judge = Callable[[Mutant], Row]


@contextmanager
def _forking(by: str, run: MutationRun, jobs: int) -> Iterator[tuple[Executor, Judge]]:
    """Yield a pool of threads and their judge: each mutant has a process of its own."""
    compile_loops()
    every, own = list[Forks](), local()

    def begin() -> None:
        own.forks = Forks()
        every.append(own.forks)

    def judge(mutant: Mutant) -> Row:
        return run.judge(mutant, mutant.ways(by), own.forks)

    with ThreadPoolExecutor(jobs, initializer=begin) as pool:
        try:
            yield pool, judge
        finally:  # Threads end once their processes have ended.
            pool.shutdown(wait=False, cancel_futures=True)
            for one in every:
                one.close()


@contextmanager
def _probing(jobs: int) -> Iterator[tuple[Executor, Judge]]:
    """Yield a pool of processes, each with its own oracles, and their judge."""
    with ProcessPoolExecutor(jobs, mp_context=get_context("spawn")) as pool:
        try:
            yield pool, _probe
        finally:
            pool.shutdown(cancel_futures=True)


def run_all(mutants: Sequence[Mutant], by: str, run: MutationRun, jobs: int) -> Iterator[Row]:
    """Yield a row for each mutant, as they come.

    Args:
        by: what is to catch them, see `Mutant.ways`.

    Raises:
        HybridKVError: a test that kills one fails without it, too.
    """
    if not mutants:
        return
    with ExitStack() as stack:
        if by == WEIGHTS:
            run = stack.enter_context(_recorded(run))
        pool, judge = stack.enter_context(
            _probing(jobs) if by == "http" else _forking(by, run, jobs)
        )
        for task in as_completed([pool.submit(judge, mutant) for mutant in mutants]):
            yield task.result()


@contextmanager
def _recorded(run: MutationRun) -> Iterator[MutationRun]:
    """Yield the run with exact checkpoints, which last as long as the context."""
    with tempfile.TemporaryDirectory() as folder, closing(Forks()) as forked:
        run.record(Path(folder), forked)
        yield replace(run, weights=Path(folder))

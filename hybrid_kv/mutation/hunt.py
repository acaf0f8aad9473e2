"""Plants mutants one by one, each in a folder and a process of its own, and tells what caught them."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Executor, ProcessPoolExecutor, ThreadPoolExecutor, as_completed
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, replace
from hashlib import sha256
from multiprocessing import get_context
from pathlib import Path
from queue import SimpleQueue
from signal import SIGALRM, SIGKILL, SIGXCPU
from typing import Any

from hybrid_kv.errors import HybridKVError
from hybrid_kv.files import write_whole
from hybrid_kv.guard.cases import broken_rule
from hybrid_kv.mutation import forks
from hybrid_kv.mutation.catch import IMPORT, RUN, SCENARIO, compile_loops
from hybrid_kv.mutation.generated import GUARD, TRITON, files
from hybrid_kv.mutation.interpreted import LOOPS, folders_of
from hybrid_kv.mutation.mutant import PACKAGE, UNCHANGED, Mutant, plant
from hybrid_kv.mutation.small import PLAYS, Small
from hybrid_kv.results import Row as Record

REQUESTS = 2500  # of the sanitizer's scenarios, as many as the quick guard has


@dataclass(frozen=True)
class Row:
    """What became of a mutant.

    Attributes:
        executed: whether a changed line was reached; None: nobody has looked.
        section, rule: what caught it first; empty if nothing did.
        requests: until then, where the section counts them.
        seconds: until then, of one core, without the imports of other packages; of `http`, which waits for a server,
            all that passed.
        cell, is_first: see `outside.Found`.
        small: the case that caught it, if it was to be made small.
        change, digest: see `generated.Generated`; empty for a known bug.
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
    change: str = ""
    digest: str = ""

    @property
    def caught(self) -> bool:
        """No known bug loops or ends a process, so that one which does was planted wrong. A generated one may."""
        return bool(self.section) and (self.section != RUN or bool(self.change))

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
            "executed": self.executed, "change": self.change, "digest": self.digest,
        }  # fmt: skip
        params = {name: value for name, value in told.items() if value not in ("", None)}

        def record(metric: str, value: float, better: str, unit: str = "", n: int = self.requests) -> Record:
            return Record("mutants", self.id, metric, value, unit, params, n=n, better=better)

        records = [record("caught", int(self.caught), "higher")]
        if not self.change:  # Of thousands nobody asks how long each took.
            records.append(record("seconds", round(self.seconds, 1), "lower"))
        if (small := self.small) is not None:
            records += [
                record("small_requests", small.requests, "lower", "requests", 1),
                record("small_tokens", small.tokens, "lower", "tokens", 1),
                record("small_seconds", round(small.seconds, 1), "lower", "", 1),
                record("small_held", small.held, "higher", "share", PLAYS),
                record("small_passes_unchanged", int(small.passes is True), "higher", "", 1),
            ]
        return records


class Forks:
    """A process of `forks`, which is asked for one thing at a time."""

    def __init__(self) -> None:
        environment = {
            **os.environ, "PYTHONDONTWRITEBYTECODE": "1", "OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false",
        }  # fmt: skip
        self._process = subprocess.Popen(
            [sys.executable, forks.__file__], env=environment, text=True, stdin=subprocess.PIPE, stdout=subprocess.PIPE,
            start_new_session=True,
        )  # fmt: skip

    def ask(self, root: Path, function: str, task: Mapping[str, Any], limit: float, compiled: bool = True) -> Any:
        """What a function of `mutation` answers in a process of its own that imports the copy.

        Args:
            function: as `catch.run`.
            compiled: whether numba compiles loops; one that it has compiled tells nobody which lines it reaches.

        Raises:
            _FailedError: it took longer than the limit, in seconds of one core, or died.
        """
        (root / forks.TASK).write_text(json.dumps({**task, "limit": limit, "compiled": compiled}), encoding="utf-8")
        assert self._process.stdin is not None and self._process.stdout is not None
        print(root, *function.split("."), sep="\t", file=self._process.stdin, flush=True)
        code = int(self._process.stdout.readline())
        if code == 0:
            return json.loads((root / forks.ANSWER).read_text(encoding="utf-8"))
        if code in (-SIGXCPU, -SIGALRM):
            raise _FailedError("time limit", f"still at it after {limit:.0f} s of one core")
        last = (root / forks.SAID).read_text(encoding="utf-8").splitlines()[-1:]
        raise _FailedError("death", " ".join([f"exit code {code}", *last]))

    def close(self) -> None:
        """End it, and what it was asked for."""
        os.killpg(self._process.pid, SIGKILL)
        self._process.communicate()


class _FailedError(Exception):
    """A process did not answer: why, as a rule, and more of it."""

    def __init__(self, rule: str, detail: str) -> None:
        super().__init__(rule)
        self.detail = detail


@dataclass(frozen=True)
class Hunt:
    """What is done with each mutant.

    Attributes:
        ways: what may catch it, one after the other.
        limit: seconds of one core for one, but by `http`.
        repro: a folder in which the case that caught one is kept, as small as it gets in as many seconds.
        reached: by file and line the names of the steps and scenarios in which an unchanged copy reaches it; no other
            finds anything. None: nobody has looked.
        seen: by scenario the patterns that it shows.
    """

    ways: Sequence[str]
    limit: float
    repro: Path | None = None
    reached: Mapping[str, Mapping[int, Sequence[str]]] | None = None
    seen: Mapping[str, Sequence[str]] = field(default_factory=dict)

    def look(self, forked: Forks, file: Path) -> Hunt:
        """With `reached` of all files that generated mutants change, as long as another hunt of the guard.

        Args:
            file: keeps it for the next hunt of the same code.

        Raises:
            HybridKVError: the file cannot be written.
        """
        digest = sha256("".join(self.ways).encode())
        for path in sorted(PACKAGE.rglob("*.py")):
            digest.update(path.read_bytes())
        code = digest.hexdigest()
        known = json.loads(file.read_text(encoding="utf-8")) if file.exists() else {}
        if known.get("code") != code:
            known = {"code": code, **self._look(forked)}
            write_whole(file, json.dumps(known))
        reached = {name: {int(line): found for line, found in lines.items()} for name, lines in known["steps"].items()}
        return replace(self, reached=reached, seen=known["seen"])

    def _look(self, forked: Forks) -> dict[str, Any]:
        with tempfile.TemporaryDirectory() as folder:
            root = Path(folder)
            copy = plant(root, {})
            modules = [f"{PACKAGE.name}.{name.removesuffix('.py').replace('/', '.')}" for name in files(GUARD)]
            task = {"amount": REQUESTS, "files": [str(copy / name) for name in files(GUARD)], "modules": modules}
            try:
                found = forked.ask(root, "catch.reach", task, 3600)
            except _FailedError as error:
                raise HybridKVError(f"the guard of the unchanged code: {error}: {error.detail}") from None
            steps = {Path(name).relative_to(copy).as_posix(): lines for name, lines in found["steps"].items()}
            return {**found, "steps": steps}

    def ask(self, mutant: Mutant, forked: Forks) -> Row:
        """Plant one mutant and hunt it.

        Raises:
            ConfigError: the code has moved.
        """
        told = mutant.told()
        if TRITON in self.ways:
            return self._test(mutant, forked)
        reached = self._steps(mutant)
        if reached == []:
            return Row(mutant.id, False, "", "", "", 0, 0.0, **told)
        with tempfile.TemporaryDirectory() as folder:
            root = Path(folder)
            lines = mutant.plant(root)
            compiled = not any("import compiled" in Path(file).read_text(encoding="utf-8") for file in lines)
            left_out = self.seen.keys() - set(self.seen if reached is None else reached)
            seen = sorted({pattern for name in left_out for pattern in self.seen[name]})
            task = {"ways": self.ways, "lines": lines, "amount": REQUESTS, "reached": reached, "seen": seen}
            try:
                found = Row(mutant.id, **forked.ask(root, "catch.run", task, self.limit, compiled), **told)
            except _FailedError as error:
                return Row(mutant.id, False, RUN, str(error), error.detail, 0, self.limit, **told)
            case = root / forks.CASE
            if self.repro is None or not case.exists():
                return found
            try:
                task = {"folder": str(self.repro.absolute() / mutant.id)}
                made = Small(**forked.ask(root, "small.made_small", task, self.limit))
            except _FailedError as error:
                return replace(found, detail=f"{found.detail}; making it small failed: {error}: {error.detail}")
            return replace(found, small=replace(made, passes=not broken_rule(Path(made.file))))

    def _test(self, mutant: Mutant, forked: Forks) -> Row:
        told = mutant.told()
        with tempfile.TemporaryDirectory() as folder:
            mutant.plant(Path(folder))
            limit = min(LOOPS, self.limit)
            try:
                return Row(mutant.id, **_tested(Path(folder), mutant.changed(), forked, limit), **told)
            except _FailedError as error:
                return Row(mutant.id, None, RUN, str(error), error.detail, 0, limit, **told)

    def _steps(self, mutant: Mutant) -> list[str] | None:
        """The names of those that reach it, in their own order; None: all may, as they may what an import reaches."""
        if self.reached is None:
            return None
        changed = mutant.changed().items()
        steps = {step for file, (_, lines) in changed for line in lines for step in self.reached[file].get(line, ())}
        return None if IMPORT in steps else sorted(steps, key=_in_order)


def _tested(root: Path, files: Iterable[str], forked: Forks, limit: float) -> dict[str, Any]:
    """What the tests of files say of a copy."""
    task = {"checkout": str(PACKAGE.parent), "tests": folders_of(files)}
    found: dict[str, Any] = forked.ask(root, "interpreted.run", task, limit)
    return found


def _must_pass(mutants: Sequence[Mutant], forked: Forks) -> None:
    """
    Raises:
        HybridKVError: tests that are to see mutants fail without them, or cannot run.
    """
    with tempfile.TemporaryDirectory() as folder:
        plant(Path(folder), {})
        try:
            found = _tested(Path(folder), {file for mutant in mutants for file in mutant.changed()}, forked, 3600)
        except _FailedError as error:
            raise HybridKVError(f"the tests of the unchanged kernels: {error}: {error.detail}") from None
    if found["section"]:
        raise HybridKVError(f"a test of the unchanged kernels fails: {found['rule']}: {found['detail']}")


def _in_order(step: str) -> tuple[bool, int, str]:
    """Scenarios in the order of their numbers, then the rest."""
    number = step.removeprefix(SCENARIO)
    return (False, int(number), "") if number != step else (True, 0, step)


def _probe(mutant: Mutant) -> Row:
    from hybrid_kv.mutation.outside import ask  # with transformers, which the others do not need

    with tempfile.TemporaryDirectory() as folder:
        mutant.plant(Path(folder))
        found, seconds = ask(Path(folder))
        return Row(mutant.id, None, **asdict(found), seconds=seconds)


@contextmanager
def _forking(
    mutants: Sequence[Mutant], hunt: Hunt, jobs: int, look: Path | None
) -> Iterator[tuple[Executor, Callable[[Mutant], Row]]]:
    """A pool of threads, and what they do with a mutant: each asks a process of its own."""
    compile_loops()
    every, idle = [Forks() for _ in range(jobs)], SimpleQueue[Forks]()
    with ThreadPoolExecutor(jobs) as pool:
        try:
            if TRITON in hunt.ways:
                _must_pass(mutants, every[0])
            if look is not None:
                hunt = hunt.look(every[0], look)
            for one in every:
                idle.put(one)

            def take(mutant: Mutant) -> Row:
                forked = idle.get()
                try:
                    return hunt.ask(mutant, forked)
                finally:
                    idle.put(forked)

            yield pool, take
        finally:  # Threads end once those that they ask have ended.
            pool.shutdown(wait=False, cancel_futures=True)
            for one in every:
                one.close()


@contextmanager
def _asking(jobs: int) -> Iterator[tuple[Executor, Callable[[Mutant], Row]]]:
    """A pool of processes, each with oracles of its own, and what they do with a mutant."""
    with ProcessPoolExecutor(jobs, mp_context=get_context("spawn")) as pool:
        try:
            yield pool, _probe
        finally:
            pool.shutdown(cancel_futures=True)


def hunt_all(mutants: Sequence[Mutant], hunt: Hunt, jobs: int, look: Path | None = None) -> Iterator[Row]:
    """A row for each mutant, as they come.

    Args:
        look: the file of `Hunt.look`; None: each hunt is of the whole guard.

    Raises:
        HybridKVError: what hunts them fails without any.
    """
    if not mutants:
        return
    with _asking(jobs) if "http" in hunt.ways else _forking(mutants, hunt, jobs, look) as (pool, take):
        for task in as_completed([pool.submit(take, mutant) for mutant in mutants]):
            yield task.result()

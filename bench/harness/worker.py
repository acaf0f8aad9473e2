"""One process of `hybrid-kv compare`: it holds one version and times its cells on request.

The process that is started imports torch and then forks, so that both versions share its memory
layout, its hash seed and its core: what one such start favours, it favours on both sides. What they
do not share is what they allocate afterwards; `scatter` moves that by a random amount, so that it
is noise between pairs and never a constant bias towards one version.

A worker reads one JSON object per line and answers each with one line. It imports its version at
its first request, so that a waiting one costs nothing, and stops at the end of its input.
"""

from __future__ import annotations

import gc
import importlib
import json
import os
import random
import socket
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from importlib.machinery import ModuleSpec, PathFinder
from pathlib import Path
from types import ModuleType
from typing import Any

SLOW = 2e-3  # seconds per call from which the check has warmed a case enough
PRELOADED = ("numpy", "torch")  # what both versions import anyway, for 1.5 s
PROFILE_INTERVAL = 1e-3  # seconds
BUILTIN = "\0<built-in>"  # in what pyinstrument calls a frame: name, file and line between zeros
OWN = "own"  # below a version's folder: the `bench/` that it came with


def _line(error: Exception) -> str:
    return f"{type(error).__name__}: {' '.join(str(error).split())}"


def scatter(rng: random.Random) -> list[bytearray]:
    """Return memory of random sizes.

    Held while a worker lives, it shifts everything that is allocated after it.
    """
    return [bytearray(rng.randrange(16, 2048)) for _ in range(rng.randrange(1000))]


def busy_work(times: int) -> None:
    """Do work that takes time in proportion to `times`."""
    for _ in range(times):
        pass


def slowed(case: Any, fraction: float, timing: Any) -> Callable[[], object]:
    """Return the case's `run` with so much more work per call that it takes `fraction` longer."""
    of_run = timing.Subject(case.run, case.reset, 1)
    of_work = timing.Subject(lambda: busy_work(10_000))
    run_seconds, work_seconds = (
        sorted(one.sample(1) for _ in range(9))[4] for one in (of_run, of_work)
    )
    times = round(10_000 * fraction * run_seconds / work_seconds)
    case.reset()
    run = case.run

    def run_and_work() -> None:
        run()
        busy_work(times)

    return run_and_work


def _function(frame: str, folder: Path) -> str:
    """Return `file function` of a frame; of a file outside of `folder` the last two parts."""
    name, file, *_ = frame.split("\0")
    path = Path(file)
    path = path.relative_to(folder) if path.is_relative_to(folder) else Path(*path.parts[-2:])
    return f"{path.as_posix()} {name}"


class OnlyFrom:
    """Finds a module of the packages in `folders` in the folder given there, or nowhere.

    An editable install has a finder of its own, which would quietly lend the checkout's module to a
    version that lacks it.
    """

    def __init__(self, folders: dict[str, Path]) -> None:
        self.folders = folders

    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """Raise `ModuleNotFoundError`, so that no later finder is tried."""
        folder = self.folders.get(name.partition(".")[0])
        if folder is None:
            return None
        spec = PathFinder.find_spec(name, [str(folder)] if path is None else path, target)
        if spec is None:
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)
        return spec


class Benchmarks:
    """The suites of a folder `bench/`: today's, or those that the version came with.

    Only one folder can be the package `bench` at a time. While this one is, the other's modules are
    set aside.
    """

    def __init__(self, finder: OnlyFrom, folder: Path) -> None:
        self._finder = finder
        self._folder = folder
        self._modules: dict[str, ModuleType] = {}
        self.cells_of = cache(self._load)

    @contextmanager
    def imported(self) -> Iterator[None]:
        """Let `bench` be this folder."""
        others, folder = _set_aside(), self._finder.folders["bench"]
        sys.modules.update(self._modules)
        self._finder.folders["bench"] = self._folder
        try:
            yield
        finally:
            self._modules = _set_aside()
            sys.modules.update(others)
            self._finder.folders["bench"] = folder

    def _load(self, suite: str) -> dict[str, Any]:
        """Cells by key; a repeat needs few suites, and the others need not be imported."""
        with self.imported():
            return {cell.key: cell for cell in importlib.import_module(f"bench.{suite}").cells()}

    def cell(self, key: str) -> Any:
        return self.cells_of(key.partition("/")[0])[key]


def _set_aside() -> dict[str, ModuleType]:
    return {
        name: sys.modules.pop(name)
        for name in list(sys.modules)
        if name.partition(".")[0] == "bench"
    }


class Worker:
    """Answers requests about the cells of the `hybrid_kv` and `bench` in `folder`."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        finder = OnlyFrom({"hybrid_kv": folder, "bench": folder})
        sys.meta_path.insert(0, finder)
        sys.path.insert(0, str(folder))
        os.environ["PYTHONPATH"] = str(folder)  # of processes that a case starts
        os.chdir(folder)
        self._torch = importlib.import_module("torch")
        self._timing = importlib.import_module("hybrid_kv.measure.timing.clock")
        self._checked = importlib.import_module("hybrid_kv.measure.timing.case").checked
        self._today = Benchmarks(finder, folder)
        self._own = Benchmarks(finder, folder / OWN)
        self._case: Any = None
        self._subject: Any = None

    def cells(self, quick: bool) -> dict[str, Any]:
        """Return what this version can run, and why it cannot run the rest.

        `own`: by its own benchmarks, if it must.
        """
        with self._today.imported():
            registry = importlib.import_module("bench.harness.registry")
            unavailable = registry.unavailable()
            # Rivals are models of other engines in `bench/`, which is the same on both sides.
            mine = [cell for cell in registry.cells(quick) if cell.promise is None]
        return {
            "cells": [(cell.suite, cell.benchmark, cell.params, cell.tier) for cell in mine],
            "own": [key for suite in unavailable for key in self._own_keys(suite)],
            "unavailable": unavailable,
            "cuda": self._torch.cuda.is_available(),
        }

    def _own_keys(self, suite: str) -> Sequence[str]:
        try:
            return [*self._own.cells_of(suite)]
        except Exception:  # of whatever this version was like
            return []

    def _of_cell(self, key: str, work: Callable[[Any], dict[str, Any]]) -> dict[str, Any]:
        """Return what `work` says of today's cell.

        Where this version lacks what that needs, it is the version's own.
        """
        try:
            with self._today.imported():
                return work(self._today.cell(key))
        except AssertionError:  # A wrong result, which another benchmark does not mend.
            raise
        except Exception as error:
            if key not in self._own_keys(key.partition("/")[0]):
                raise
            with self._own.imported():
                return {**work(self._own.cell(key)), "own": _line(error)}

    def count(self, key: str) -> dict[str, Any]:
        """Return exact numbers, as lists of value, unit and which direction is better."""

        def work(cell: Any) -> dict[str, Any]:
            counts = cell.make()
            if inexact := [name for name, count in counts.items() if type(count.value) is not int]:
                raise TypeError(f"{', '.join(inexact)} of {key} must be int")
            return {"counts": counts}

        return self._of_cell(key, work)

    def make(self, key: str, inject: float = 0.0) -> dict[str, Any]:
        """Build the case, check and warm it; `seconds` is its time per call."""
        return self._of_cell(key, lambda cell: self._made(cell, inject))

    def _made(self, cell: Any, inject: float) -> dict[str, Any]:
        self._case = case = cell.make()
        max_error = self._checked("before it was timed", case)
        run = slowed(case, inject, self._timing) if inject else case.run
        kind = self._timing.DeviceSubject if cell.tier == "gpu" else self._timing.Subject
        self._subject = kind(run, case.reset, case.max_repeats)
        gc.collect()
        gc.freeze()
        seconds = self._subject.sample(1)
        if seconds < SLOW:
            seconds = min(self._subject.sample(min(3, case.max_repeats)) for _ in range(3))
        return {"max_error": max_error, "seconds": seconds, "max_repeats": case.max_repeats}

    def sample(self, repeats: int, blocks: int) -> dict[str, Any]:
        """Return seconds per call over `blocks` times `repeats` calls.

        There is a reset before each block.
        """
        gc.disable()  # whose pause would hit one side of a pair
        seconds = sum(self._subject.sample(repeats) for _ in range(blocks)) / blocks
        gc.enable()
        return {"seconds": seconds}

    def profile(self, calls: int) -> dict[str, Any]:
        """Return seconds per call of each function by itself, with the builtins that it calls.

        A profiler samples them.

        The profiler's are those on the wall, whatever else is on the core: they share out what the
        clock has measured.
        """
        from pyinstrument import Profiler

        # A thread that ticks: looking at the clock takes some machines 12 us.
        profiler = Profiler(
            interval=PROFILE_INTERVAL, use_timing_thread=True, async_mode="disabled"
        )
        most, spent = max(1, self._case.max_repeats), 0.0
        profiler.start()
        for begin in range(0, calls, most):
            repeats = min(most, calls - begin)
            spent += self._subject.sample(repeats) * repeats / calls
        shares: dict[str, float] = {}
        for stack, time in profiler.stop().frame_records:
            name = next(
                (
                    _function(frame, self._folder)
                    for frame in reversed(stack)
                    if BUILTIN not in frame
                ),
                "",
            )
            shares[name] = shares.get(name, 0.0) + time
        return {
            "functions": {
                name: spent * time / sum(shares.values()) for name, time in shares.items()
            }
        }

    def finish(self) -> dict[str, Any]:
        """Check again and let go of the case."""
        max_error = self._checked("after it was timed", self._case)
        self._case = self._subject = None
        return {"max_error": max_error, "clock_mhz": self._clock_mhz()}

    def _clock_mhz(self) -> int | None:
        """Return the clock of the GPU; not known without pynvml."""
        if not self._torch.cuda.is_initialized():
            return None
        try:
            return self._torch.cuda.clock_rate()
        except (ImportError, RuntimeError):
            return None

    def answer(self, request: dict[str, Any]) -> dict[str, Any]:
        """Return the answer to a request; an error is an answer too.

        It is `wrong` for a wrong result, `failed` for anything else.
        """
        arguments = dict(request)
        try:
            return getattr(self, arguments.pop("do"))(**arguments)
        except Exception as error:
            self._case = self._subject = None
            return {"wrong" if isinstance(error, AssertionError) else "failed": _line(error)}


def serve(folder: Path, connection: socket.socket, seed: int) -> None:
    held = scatter(random.Random(seed))
    worker = None
    with connection.makefile("rw", encoding="utf-8") as stream:
        for line in stream:
            try:
                worker = worker or Worker(folder)
                answer = worker.answer(json.loads(line))
            except Exception as error:
                answer = {"failed": _line(error)}
            stream.write(json.dumps(answer) + "\n")
            stream.flush()
    del held


def main(arguments: list[str]) -> None:
    """Run `worker.py JSON`: `core`, and for each side its `folder`, `fd` and `seed`.

    `fd` is that of a connected socket.
    """
    sys.path.pop(0)  # this folder: `bench/` holds names of its own, such as `memory`
    options = json.loads(arguments[0])
    if options["core"] is not None:
        os.sched_setaffinity(0, {options["core"]})
    for name in PRELOADED:
        importlib.import_module(name)
    importlib.import_module("torch").set_num_threads(1)
    gc.collect()
    gc.freeze()  # or each worker's first collection would copy torch's pages, 0.1 s of work
    connections = [socket.socket(fileno=side["fd"]) for side in options["sides"]]
    children = []
    for side, connection in zip(options["sides"], connections, strict=True):
        child = os.fork()
        if child == 0:
            for other in connections:
                if other is not connection:
                    other.close()  # or its reader would never see the end
            serve(Path(side["folder"]), connection, side["seed"])
            os._exit(0)
        children.append(child)
    for connection in connections:
        connection.close()
    for child in children:
        os.waitpid(child, 0)


if __name__ == "__main__":
    main(sys.argv[1:])

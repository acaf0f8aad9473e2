"""Processes of `hybrid-kv compare`: a start forks worker pairs and feeds them.

A pair has one process per version.
"""

from __future__ import annotations

import json
import os
import random
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any, TextIO

ANSWER_SECONDS = 600.0
END_SECONDS = 30.0
# One thread, as the clock sees only one. And memory that was freed stays with the process: glibc's
# own thresholds move with what was freed before, so that one process maps its buffers anew in each
# call and its duplicate does not (2.7 times the time of `causal_conv1d/prefill` were seen).
ENVIRONMENT = {
    **dict.fromkeys(("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS"), "1"),
    "MALLOC_MMAP_THRESHOLD_": str(1 << 25),
    "MALLOC_TRIM_THRESHOLD_": str(1 << 32),
    "MALLOC_TOP_PAD_": str(1 << 26),
    # Empty is off: each worker would compile the version anew, 1 s of work.
    "PYTHONDONTWRITEBYTECODE": "",
}

Answers = tuple[dict[str, Any], dict[str, Any]]  # of BASE and HEAD


class Pair:
    """A worker of each version. One answers at a time, since they share a core.

    Attributes:
        alive: until one of them died or did not answer.
    """

    def __init__(self, streams: Sequence[TextIO], rng: random.Random) -> None:
        self._streams = streams
        self._rng = rng
        self.alive = True

    def ask(self, side: int, do: str, **arguments: Any) -> dict[str, Any]:
        """Return the answer; `failed` is in it also if there is none."""
        stream = self._streams[side]
        try:
            stream.write(json.dumps({"do": do, **arguments}) + "\n")
            stream.flush()
            if line := stream.readline():
                return dict(json.loads(line))
            reason = "died; its last words, if any, are above"
        except TimeoutError:
            reason = f"did not answer within {ANSWER_SECONDS:.0f} s"
        except OSError:
            reason = "died; its last words, if any, are above"
        self.alive = False
        return {"failed": f"the worker, in {do}, {reason}"}

    def ask_both(
        self, do: str, *, only_head: Mapping[str, Any] | None = None, **arguments: Any
    ) -> Answers:
        """In random order; the answers of BASE and HEAD, which alone is given `only_head`."""
        arguments_of = (arguments, {**arguments, **(only_head or {})})
        first = self._rng.randrange(2)
        answers = {side: self.ask(side, do, **arguments_of[side]) for side in (first, 1 - first)}
        return answers[0], answers[1]

    def close(self) -> None:
        """Let both end, with the memory that they hold."""
        for stream in self._streams:
            _close(stream)


def _close(stream: TextIO) -> None:
    with suppress(OSError):  # what was left to write to a dead worker
        stream.close()


@contextmanager
def _ending(process: subprocess.Popen[bytes]) -> Iterator[None]:
    """Wait for a start whose connections are closed.

    A worker that hangs in a case, or was interrupted, is killed.
    """
    try:
        yield
        process.wait(timeout=END_SECONDS)
    except BaseException as error:
        with suppress(ProcessLookupError):  # all of them ended meanwhile
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        if not isinstance(error, subprocess.TimeoutExpired):
            raise


@contextmanager
def start(folders: Sequence[Path], pairs: int, rng: random.Random) -> Iterator[list[Pair]]:
    """One start with its worker pairs; what was not closed before ends with the context."""
    cores = sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else [None]
    # Closed connections end the workers, and only then there is something to wait for.
    with ExitStack() as processes, ExitStack() as connections:
        sides, streams, theirs = [], [], []
        for folder in list(folders) * pairs:
            ours, other = socket.socketpair()
            theirs.append(connections.enter_context(other))
            sides.append(
                {"folder": str(folder), "fd": other.fileno(), "seed": rng.randrange(2**32)}
            )
            ours.settimeout(ANSWER_SECONDS)
            streams.append(ours.makefile("rw", encoding="utf-8"))
            connections.callback(_close, streams[-1])
            ours.close()  # the stream keeps it open
        process = subprocess.Popen(
            [
                sys.executable,
                str(folders[0] / "bench" / "harness" / "worker.py"),
                json.dumps({"core": rng.choice(cores), "sides": sides}),
            ],
            # Hash seed and core are one start's: common to both sides of its pairs.
            env={**os.environ, **ENVIRONMENT, "PYTHONHASHSEED": str(rng.randrange(2**32))},
            pass_fds=[other.fileno() for other in theirs],
            stdin=subprocess.DEVNULL,
            start_new_session=True,  # one group to kill; Ctrl-C reaches the driver alone
        )
        processes.enter_context(_ending(process))
        for other in theirs:
            other.close()
        yield [Pair(streams[i : i + 2], rng) for i in range(0, len(streams), 2)]

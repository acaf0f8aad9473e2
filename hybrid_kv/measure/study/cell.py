"""One cell's run: a process with a folder of its own, whose rows come back as bytes."""

from __future__ import annotations

import os
import signal
import subprocess
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import CancelledError
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hybrid_kv.environment import child_environment
from hybrid_kv.errors import VOID

TAIL = 2000  # characters of a process's output that are kept


@dataclass(frozen=True)
class Done:
    """The result of a cell.

    Attributes:
        code: the exit code; -9 for a process that was ended because its time was up, None for one
            that was lost with its machine.
        files: the CSVs by name.
        tail: the end of its output.
        host: where it ran.
    """

    code: int | None
    files: dict[str, bytes]
    tail: str
    seconds: float
    host: str = ""

    @property
    def is_result(self) -> bool:
        """True if the cell ran to its end.

        A failed check is a result, and a void one.
        """
        return self.code in (0, 1, VOID)


class Running:
    """The processes of cells in threads, which get no Ctrl-C: they are ended together."""

    def __init__(self) -> None:
        self._processes: set[subprocess.Popen[bytes]] = set()
        self._is_over = False
        self._lock = threading.Lock()

    def start(self, command: Sequence[str], **options: Any) -> subprocess.Popen[bytes]:
        """Start a process with a group of its own.

        Raises:
            CancelledError: all have been ended.
        """
        with self._lock:
            if self._is_over:
                raise CancelledError
            process = subprocess.Popen(command, start_new_session=True, **options)
            self._processes.add(process)
        return process

    def end(self, process: subprocess.Popen[bytes]) -> None:
        """End a process, if it has not ended by itself, with all of its children."""
        with self._lock:
            self._processes.discard(process)
        _kill(process)
        process.wait()

    def end_all(self) -> None:
        """End all processes, and let no other start from here on."""
        with self._lock:
            self._is_over = True
            for process in self._processes:
                _kill(process)


def _kill(process: subprocess.Popen[bytes]) -> None:
    if process.poll() is None:
        with suppress(ProcessLookupError):  # Another thread saw it end meanwhile.
            os.killpg(process.pid, signal.SIGKILL)


def run_cell(
    command: Callable[[str], Sequence[str]],
    limit: float,
    threads: int,
    running: Running | None = None,
) -> Done:
    """Run a command; end it with all of its children after `limit` seconds, or with `running`.

    Args:
        command: the words, given the folder for the rows.

    Raises:
        CancelledError: `running` was ended before.
    """
    start = time.monotonic()
    running = running or Running()
    with tempfile.TemporaryDirectory() as folder, tempfile.TemporaryFile() as output:
        process = running.start(
            command(folder),
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            env=child_environment(OMP_NUM_THREADS=str(threads)),
        )
        try:
            code = process.wait(limit)
        except subprocess.TimeoutExpired:
            code = -signal.SIGKILL
        finally:
            # Also at the end of this process: a cell without its study would run on for an hour.
            running.end(process)
        output.seek(max(0, output.seek(0, os.SEEK_END) - 4 * TAIL))
        tail = output.read().decode(errors="replace")[-TAIL:]
        files = {path.name: path.read_bytes() for path in Path(folder).glob("*.csv")}
    return Done(code, files, tail, time.monotonic() - start, os.uname().nodename)

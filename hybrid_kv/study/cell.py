"""One cell, run: a process with a folder of its own, whose rows come back as bytes."""

from __future__ import annotations

import os
import signal
import subprocess
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

TAIL = 2000  # characters of what a process said that are kept


@dataclass(frozen=True)
class Done:
    """What became of a cell.

    Attributes:
        code: the exit code; -9 for a process that was ended because its time was up, None for one that was lost with
            its machine.
        files: the CSVs by name.
        said: the end of what it printed.
        host: where it ran.
    """

    code: int | None
    files: dict[str, bytes]
    said: str
    seconds: float
    host: str = ""

    @property
    def is_result(self) -> bool:
        """Whether it says something of what was asked; a check that failed does."""
        return self.code in (0, 1)


def run_cell(command: Callable[[str], Sequence[str]], limit: float, threads: int) -> Done:
    """Run a command, and end it with all of its children when `limit` seconds are over.

    Args:
        command: the words, given the folder for the rows.
    """
    start = time.monotonic()
    with tempfile.TemporaryDirectory() as folder, tempfile.TemporaryFile() as said:
        process = subprocess.Popen(
            command(folder),
            stdin=subprocess.DEVNULL,
            stdout=said,
            stderr=subprocess.STDOUT,
            start_new_session=True,
            env={**os.environ, "OMP_NUM_THREADS": str(threads)},
        )
        try:
            code = process.wait(limit)
        except subprocess.TimeoutExpired:
            code = -signal.SIGKILL
        finally:
            # Also where this process is told to end: a cell without its study would go on for an hour.
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()
        said.seek(max(0, said.seek(0, os.SEEK_END) - 4 * TAIL))
        text = said.read().decode(errors="replace")[-TAIL:]
        files = {path.name: path.read_bytes() for path in Path(folder).glob("*.csv")}
    return Done(code, files, text, time.monotonic() - start, os.uname().nodename)

"""A server that a target starts for itself, and ends."""

from __future__ import annotations

import ctypes
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path

from hybrid_kv.errors import deaf_to_ctrl_c

START_SECONDS = 600.0
END_SECONDS = 20.0
LOOK_SECONDS = 0.01  # between two looks at its log


class ServerProcess:
    """A server in a process of its own.

    Args:
        command: the program and its arguments.
        announces: a regular expression of what it says once it listens; the first group is its
            address.
        environment: all variables of the process.
        cwd: its working folder.

    Attributes:
        url: where it listens; empty: it ended, or said nothing for `START_SECONDS`.
    """

    def __init__(
        self,
        command: Sequence[str],
        announces: str,
        environment: Mapping[str, str],
        cwd: Path | None = None,
    ) -> None:
        # Appended to: who reads it must not move the place where the server writes.
        # It lives as long as the server.
        self._log = tempfile.TemporaryFile("a+", errors="replace")  # noqa: SIM115
        with deaf_to_ctrl_c():
            self._process = subprocess.Popen(
                [*command],
                stdin=subprocess.DEVNULL,
                stdout=self._log,
                stderr=self._log,
                cwd=cwd,
                preexec_fn=end_with_parent if sys.platform == "linux" else None,
                env=dict(environment),
            )
        self.url = self._heard(re.compile(announces))

    def _heard(self, announces: re.Pattern[str]) -> str:
        end = time.monotonic() + START_SECONDS
        while time.monotonic() < end:
            has_ended = self._process.poll() is not None
            if match := announces.search(self.said()):
                return match[1]
            if has_ended:
                break
            time.sleep(LOOK_SECONDS)
        return ""

    @property
    def is_running(self) -> bool:
        """Return whether the server has not ended."""
        return self._process.poll() is None

    @property
    def was_killed(self) -> bool:
        """Return whether a signal ended the server, as a failed assertion does."""
        return (self._process.poll() or 0) < 0

    def said(self) -> str:
        """Return its log."""
        self._log.seek(0)
        return self._log.read()

    def last_words(self) -> str:
        """Return the last line of its log."""
        return ([line.strip() for line in self.said().splitlines() if line.strip()] or ["nothing"])[
            -1
        ]

    def close(self) -> None:
        """End it and free what it holds; a server that does not end by itself is killed."""
        self._process.terminate()
        with suppress(subprocess.TimeoutExpired):
            self._process.wait(timeout=END_SECONDS)
        if self.is_running:
            self._process.kill()
            self._process.wait()
        self._log.close()


def end_with_parent() -> None:
    """End this process with its parent: a guard that is killed closes nothing.

    Linux then ends the server, whose port and memory would stay taken.
    """
    set_signal = 1  # PR_SET_PDEATHSIG of prctl(2)
    ctypes.CDLL(None).prctl(set_signal, signal.SIGTERM)

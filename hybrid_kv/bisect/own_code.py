"""A command of `hybrid-kv`, run by a commit's own code."""

from __future__ import annotations

import os
import subprocess
import sys

from hybrid_kv.bisect.history import Trees
from hybrid_kv.config import ConfigError, HybridKVError

LIMIT = 1800.0  # seconds; a shrunk scenario takes ten with its imports, 250 questions of a guard model a minute


class NotMeasurableError(HybridKVError):
    """A commit cannot run what it is asked."""


def run_own(trees: Trees, commit: str, *words: str) -> subprocess.CompletedProcess[str]:
    """`hybrid-kv WORDS` in the commit's folder.

    Raises:
        NotMeasurableError: it has no package, or was still at it after `LIMIT` seconds.
    """
    try:
        tree = trees.of(commit)
    except ConfigError as error:
        raise NotMeasurableError(str(error)) from None
    environment = {**os.environ, "PYTHONPATH": str(tree), "OMP_NUM_THREADS": "1"}
    command = (sys.executable, "-m", "hybrid_kv.cli", *words)
    try:
        return subprocess.run(
            command, cwd=tree, env=environment, timeout=LIMIT, capture_output=True, text=True,
            errors="backslashreplace",
        )  # fmt: skip
    except subprocess.TimeoutExpired:
        raise NotMeasurableError(f"still at it after {LIMIT:.0f} s") from None


def cannot_run(ran: subprocess.CompletedProcess[str]) -> str:
    """Why, in a line."""
    return f"cannot run: {last_line(ran.stderr) or last_line(ran.stdout) or f'exit code {ran.returncode}'}"


def last_line(text: str) -> str:
    return next((line for line in reversed(text.splitlines()) if line.strip()), "")

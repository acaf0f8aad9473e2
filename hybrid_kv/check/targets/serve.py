"""`hybrid-kv serve` in a process of its own, queried over HTTP alone: the control of all checks of servers."""

from __future__ import annotations

import ctypes
import signal
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path

from hybrid_kv.check.targets import ours
from hybrid_kv.check.targets.server import Server
from hybrid_kv.check.targets.target import Kind
from hybrid_kv.config import ConfigError
from hybrid_kv.environment import child_environment
from hybrid_kv.errors import deaf_to_ctrl_c

# Not only if asking shows it: salts that are mixed up look like no salts.
PROMISED = frozenset({"salt", "cached", "n", "seed", "seed in all settings", "reset", "preempt", "logprobs", "score"})


class Served(Server):
    """See `targets.target.Target`.

    Args:
        root: folder of another copy of this package, which the server runs instead.
    """

    def __init__(self, folder: str, settings: Mapping[str, str], root: Path | None = None) -> None:
        options = [
            f"--{name.replace('_', '-')}" + ("" if value is True else f"={value}")
            for name, value in ours.options_of(folder, settings).items()
        ]
        model = str(Path(folder).absolute())
        of_root = {"PYTHONPATH": str(root), "PYTHONDONTWRITEBYTECODE": "1"} if root else {}
        self._log = tempfile.TemporaryFile("w+")  # noqa: SIM115  (lives as long as the server)
        with deaf_to_ctrl_c():
            self._process = subprocess.Popen(
                [sys.executable, "-m", "hybrid_kv.cli", "serve", "--model", model, "--port=0", *options],
                stdout=subprocess.PIPE,
                stderr=self._log,
                text=True,
                # `-m` looks into the working folder before it looks into PYTHONPATH.
                cwd=root,
                preexec_fn=_end_with_parent if sys.platform == "linux" else None,
                # The client's oracle may work beside it; a small model needs no second thread.
                env=child_environment({"OMP_NUM_THREADS": "1"}, **of_root),
            )
        assert self._process.stdout is not None
        try:
            line = self._process.stdout.readline()
            if " at http" not in line:
                self._process.wait(timeout=60)
                self._log.seek(0)
                words = [one.strip() for one in self._log if one.strip()] or ["nothing"]
                raise ConfigError(f"hybrid-kv serve does not start; it said: {words[-1]}")
            super().__init__(line.split(" at ")[1].split(";")[0], settings)
            self.can |= PROMISED
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """See `Target.close`."""
        self._process.terminate()
        with suppress(subprocess.TimeoutExpired):
            self._process.wait(timeout=20)
        if self._process.poll() is None:
            self._process.kill()
            self._process.wait()
        assert self._process.stdout is not None
        self._process.stdout.close()
        self._log.close()


def _end_with_parent() -> None:
    """A guard that is killed closes nothing; Linux then ends the server, whose port and memory would stay taken."""
    set_signal = 1  # PR_SET_PDEATHSIG of prctl(2)
    ctypes.CDLL(None).prctl(set_signal, signal.SIGTERM)


KIND = Kind("serve", ours.KIND.factors, Served)

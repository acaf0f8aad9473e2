"""`hybrid-kv serve` in a process of its own, queried over HTTP alone.

It is the control of all checks of servers.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from pathlib import Path

from hybrid_kv.check.targets import ours
from hybrid_kv.check.targets.process import ServerProcess
from hybrid_kv.check.targets.server import ServerTarget
from hybrid_kv.check.targets.target import Kind
from hybrid_kv.config import ConfigError
from hybrid_kv.environment import child_environment

# Not only if asking shows it: salts that are mixed up look like no salts.
PROMISED = frozenset(
    {"salt", "cached", "n", "seed", "seed in all settings", "reset", "preempt", "logprobs", "score"}
)


class Served(ServerTarget):
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
        self._process = ServerProcess(
            [
                sys.executable,
                "-m",
                "hybrid_kv.cli",
                "serve",
                "--model",
                model,
                "--port=0",
                *options,
            ],
            r" at (http[^;\s]+)",
            # The client's oracle may work next to it; a small model needs no second thread.
            child_environment({"OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1"}, **of_root),
            cwd=root,  # `-m` looks into the working folder before it looks into PYTHONPATH
        )
        try:
            if not self._process.url:
                raise ConfigError(
                    f"hybrid-kv serve does not start; it said: {self._process.last_words()}"
                )
            super().__init__(self._process.url, settings)
            self.can |= PROMISED
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """See `Target.close`."""
        self._process.close()


KIND = Kind("serve", ours.KIND.factors, Served)

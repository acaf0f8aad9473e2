"""`hybrid-kv guard --target ENGINE --watch PATH`: the same run again whenever the engine's source changes."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from hybrid_kv.config import ConfigError
from hybrid_kv.errors import HybridKVError
from hybrid_kv.targets.remote import python_of, renew_loader
from hybrid_kv.targets.target import Kind

SECONDS = 0.2  # between two looks at the files


def watch(paths: Sequence[Path], kind: Kind, run: Callable[[], int]) -> None:
    """Run now and after each change of a Python file in one of these paths, until Ctrl-C.

    Raises:
        ConfigError: there is no such path, or the engine is not one that runs in an environment of its own.
    """
    if missing := [path for path in paths if not path.exists()]:
        raise ConfigError(f"--watch {missing[0]}: there is no such file or folder; name the source of your engine")
    if not hasattr(kind, "package"):
        raise ConfigError(f"--watch: {kind.name} has no environment of its own; use --target vllm or mlx")
    while True:
        begin, seen = time.perf_counter(), _stamps(paths)
        try:
            said = f"exit code {run()}"
        except HybridKVError as error:  # as a syntax error while a change is typed
            said = f"error: {error}"
        where = ", ".join(map(str, paths))
        print(f"{said} after {time.perf_counter() - begin:.0f} s; waits for a change in {where}", file=sys.stderr)
        renew_loader(kind.name, str(getattr(kind, "python", None) or python_of(kind.name, kind.package)))
        while not (changed := {*_stamps(paths).items()} ^ {*seen.items()}):
            time.sleep(SECONDS)
        print(f"changed: {', '.join(sorted({str(path) for path, _ in changed}))}", file=sys.stderr)


def _stamps(paths: Sequence[Path]) -> dict[Path, int]:
    """When each Python file was written last, in nanoseconds."""
    files = [file for path in paths for file in ([path] if path.is_file() else path.rglob("*.py"))]
    return {file: file.stat().st_mtime_ns for file in files if file.exists()}

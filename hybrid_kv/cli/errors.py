"""Where an error becomes a line on stderr and an exit code. Nowhere else does a command end for an error."""

from __future__ import annotations

import sys
from typing import Any, NoReturn


def leave(error: Exception) -> NoReturn:
    """Exit with 2 and one line, or with 1 and a sanitizer's report: a check that failed.

    Raises:
        Exception: `error` itself where it is neither a user's nor the system's, but a bug.
    """
    # Wrong usage, known by its method: click's classes are typer's own in some versions and click's in others.
    if hasattr(error, "format_message"):
        sys.exit(_print_usage_error(error))

    from hybrid_kv.config import HybridKVError  # Imports torch: not for --help.

    if isinstance(error, OSError) and error.filename:
        error = HybridKVError(f"{error.filename}: {error.strerror}")
    if isinstance(error, ModuleNotFoundError):
        error = HybridKVError(f"{error.name} is not installed; run: pip install -e '.[all]' in a checkout")
    if not isinstance(error, HybridKVError):
        from hybrid_kv.sanitizer import SanitizerError

        if not isinstance(error, SanitizerError):
            raise error
        print(error, file=sys.stderr)
        sys.exit(1)
    print(f"error: {' '.join(str(error).split())}", file=sys.stderr)
    sys.exit(2)


def _print_usage_error(error: Any) -> int:
    """One line with the value and where the options are, but for a command without arguments: its help was printed."""
    if message := " ".join(error.format_message().replace("Value error, ", "").split()).rstrip("."):
        # What pydantic, which newer versions of typer ask, was given: not in its message.
        for one in getattr(error.__cause__, "errors", list)():
            if repr(one["input"]) not in message:
                message += f", given {one['input']!r}"
        command = error.ctx.command_path if error.ctx else "hybrid-kv"
        print(f"error: {message}; see {command} --help", file=sys.stderr)
    return int(error.exit_code)

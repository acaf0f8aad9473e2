"""The end of a command, and its exit code.

0 fine, 1 a check failed, 2 it could not run, 3 nothing failed but a check was void. 130 is Ctrl-C,
143 SIGTERM. An error is one line on stderr.
"""

from __future__ import annotations

import io
import os
import re
import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from importlib import metadata
from importlib.util import find_spec
from typing import Any, NoReturn


class HybridKVError(Exception):
    """An error the user can act on: one line that names the value and the way out.

    The command line exits with 2.
    """


class CheckFailedError(Exception):
    """A check found what should not be: the message is its report, line by line.

    The command line exits with 1.
    """


class VoidError(Exception):
    """Nothing was judged: one line that says what was not there.

    The command line exits with 3.
    """


class ConfigError(HybridKVError, ValueError):
    """A setting, a model folder or a file that cannot be used."""


VOID = 3  # nothing is wrong, but something that had to happen did not
INTERRUPTED = 130  # 128 + SIGINT, as shells have it


def run_command(command: Callable[[], int | None]) -> NoReturn:
    """Exit with what `command` returns or raises.

    A sanitizer's report is a failed check: it keeps its lines, and the exit code is 1. A reader
    that left, such as `head`, gets no message.

    Raises:
        Exception: a bug of ours, as it was raised.
    """
    _open_streams()
    signals = _end_as_by_ctrl_c()
    try:
        code = _code(command)
        sys.stdout.flush()
    except KeyboardInterrupt:
        code = INTERRUPTED
    except BrokenPipeError:
        code = 2
    except OSError as error:
        code = _say(_reason(error), 2)
    except Exception as error:
        code = _ending(error)
    if code == INTERRUPTED:
        code = 128 + signals[0] if signals else INTERRUPTED
        _say("interrupted", code)
    _let_go_of_streams()
    sys.exit(code)


def require(*packages: str) -> None:
    """Raise for the first package that is not installed, before any work depends on it.

    Raises:
        ModuleNotFoundError: as an import of it would; `run_command` names the extra.
    """
    for name in packages:
        # None in sys.modules: an import of it is forbidden.
        if (name in sys.modules and sys.modules[name] is None) or (
            name not in sys.modules and not find_spec(name)
        ):
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)


@contextmanager
def deaf_to_ctrl_c() -> Iterator[None]:
    """Let processes that are started inside ignore Ctrl-C.

    Their parent alone says so and ends them.
    """
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)  # an exec keeps what is ignored
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


def _end_as_by_ctrl_c() -> list[int]:
    """Let SIGTERM and SIGHUP delete parts of files and end children, too.

    Returns a list that gets what came.
    """
    signals: list[int] = []

    def end(number: int, _: object) -> None:
        signals.append(number)
        raise KeyboardInterrupt

    for number in (signal.SIGTERM, signal.SIGHUP):
        if signal.getsignal(number) is not signal.SIG_IGN:  # by nohup
            signal.signal(number, end)
    return signals


def printable(text: str) -> str:
    """Return a text that is not ours without what a terminal obeys."""
    return "".join(letter if letter.isprintable() else "\ufffd" for letter in text)


def _open_streams() -> None:
    """Make every sign printable, and keep the places of standard streams that are closed.

    Else a file that is opened later would become one of them.
    """
    while (descriptor := os.open(os.devnull, os.O_RDWR)) <= 2:
        pass
    os.close(descriptor)
    if sys.stderr is None:
        sys.stderr = open(os.devnull, "w")  # noqa: SIM115  (it stays)
    if sys.stdout is None:
        sys.exit(_say("standard output is closed; redirect it to a file or to /dev/null", 2))
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")


def _code(command: Callable[[], int | None]) -> int:
    try:
        return command() or 0
    except SystemExit as left:
        # typer makes exit code 1, a failed check, of a pipe whose reader left.
        if isinstance(left.__context__, BrokenPipeError):
            raise left.__context__ from None
        if isinstance(left.code, int):
            return left.code
        return 0 if left.code is None else _say(str(left.code), 2)


def _ending(error: Exception) -> int:
    """Say what is wrong, or raise it again if it is a bug."""
    # Wrong usage, known by its method: click's classes are typer's own in some versions and click's
    # in others.
    if hasattr(error, "format_message"):
        return _usage(error)
    if isinstance(error, ModuleNotFoundError):
        return _say(_missing(error), 2)
    if isinstance(error, HybridKVError):
        return _say(str(error), 2)
    if isinstance(error, VoidError):
        return _say(str(error), VOID, "void")
    if isinstance(error, MemoryError):
        return _say(f"out of memory: {error}".rstrip(": "), 2)
    if isinstance(error, CheckFailedError):
        print(error, file=sys.stderr)
        return 1
    raise error


def _say(line: str, code: int, word: str = "error") -> int:
    line = " ".join(line.split())
    # A value of any length: the option is named before it, the way out after it
    if len(line) > 1000:
        line = f"{line[:600]} … {line[-400:]}"
    # What a terminal would obey is shown as an escape.
    line = "".join(
        sign if sign.isprintable() else sign.encode("unicode_escape").decode() for sign in line
    )
    with suppress(OSError):  # of a closed stream
        print(f"{word}:", line, file=sys.stderr, flush=True)
    return code


def _reason(error: OSError) -> str:
    what = error.strerror or str(error) or type(error).__name__
    return (
        f"{os.fsdecode(error.filename)}: {what}"
        if isinstance(error.filename, str | bytes)
        else what
    )


def _missing(error: ModuleNotFoundError) -> str:
    what = (
        f"{error.name} is not installed" if error.name else f"a package is not installed: {error}"
    )
    extra = _extra((error.name or "").partition(".")[0])
    return f"{what}; run: pip install 'hybrid_kv[{extra}]', in a checkout -e '.[{extra}]'"


def _extra(module: str) -> str:
    """Return the first extra of this package that has what a module is in, or `all`."""
    named = {"yaml": "pyyaml"}.get(module, module).replace("_", "-")
    with suppress(metadata.PackageNotFoundError):
        for text in metadata.requires("hybrid_kv") or ():
            package, _, extra = text.lower().replace("_", "-").partition("extra == ")
            name = re.match(r"[\w.-]+", package)
            if extra and name is not None and name[0] == named:
                return extra.strip("\"' ")
    return "all"


def _usage(error: Any) -> int:
    """Print one line with the value and where the options are.

    A command without arguments has printed its help instead.
    """
    message = " ".join(error.format_message().replace("Value error, ", "").split()).rstrip(".")
    if message:
        # The value that pydantic, which newer versions of typer use, rejects: not in its message.
        for problem in getattr(error.__cause__, "errors", list)():
            if repr(problem["input"]) not in message:
                message += f", given {problem['input']!r}"
        command = error.ctx.command_path if error.ctx else "hybrid-kv"
        _say(f"{message}; see {command} --help", 2)
    return int(error.exit_code)


def _let_go_of_streams() -> None:
    """Drop what cannot be written.

    At its end the interpreter would try again, and exit with 120.
    """
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except OSError:
            devnull = os.open(os.devnull, os.O_WRONLY)
            os.dup2(devnull, stream.fileno())
            os.close(devnull)

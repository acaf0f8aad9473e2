"""The command line in this process."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import typer

from hybrid_kv.cli import app, main


def run(capsys: pytest.CaptureFixture[str], *args: object) -> tuple[int, str, str]:
    """Exit code, standard output, standard error."""
    with pytest.raises(SystemExit) as left:
        main(list(map(str, args)))
    out, err = capsys.readouterr()
    return int(left.value.code or 0), out, err


def printed(capsys: pytest.CaptureFixture[str], *args: object, code: int = 0) -> str:
    """Standard output of a command that ends with this exit code."""
    left, out, err = run(capsys, *args)
    assert left == code, (left, err)
    return out


def refused(capsys: pytest.CaptureFixture[str], *args: object) -> str:
    """The one line on standard error of a command that cannot run; it prints nothing else."""
    code, out, err = run(capsys, *args)
    assert (code, out, err.count("\n")) == (2, "", 1) and err.startswith("error: "), (
        code,
        out,
        err,
    )
    return err


def commands() -> dict[str, Any]:
    """Every command by name, those of a checkout included."""
    group = typer.main.get_command(app)
    return {name: group.get_command(None, name) for name in group.list_commands(None)}  # type: ignore[attr-defined]


def raising(error: BaseException) -> Callable[..., Any]:
    """What fails with this error, however it is called."""

    def fail(*_: object, **__: object) -> Any:
        raise error

    return fail

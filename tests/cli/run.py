"""The command line in this process."""

from __future__ import annotations

from typing import Any

import pytest
import typer

from hybrid_kv.cli import app, main


def run(capsys: pytest.CaptureFixture[str], *args: str) -> tuple[int, str, str]:
    """Exit code, standard output, standard error."""
    with pytest.raises(SystemExit) as left:
        main(list(args))
    out, err = capsys.readouterr()
    return left.value.code, out, err  # type: ignore[return-value]


def commands() -> dict[str, Any]:
    """Every command by name, those of a checkout included."""
    group = typer.main.get_command(app)
    return {name: group.get_command(None, name) for name in group.list_commands(None)}  # type: ignore[attr-defined]

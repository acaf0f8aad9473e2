"""`hybrid-kv replay FILE`: a failing case, again."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from hybrid_kv.cli.options import Python


def replay(
    file: Annotated[
        Path, typer.Argument(help="A case of guard, check or fuzz.", show_default=False)
    ],
    python: Python = None,
) -> None:
    """Play a failing case of `guard`, `check` or `fuzz` again; exit code 1 while it fails."""
    raise typer.Exit(replay_file(file, python))


def replay_file(file: Path, python: Path | None) -> int:
    """Play a case of another engine, or a scenario of this one; return 1 while it fails."""
    from hybrid_kv.check.guard.cases import replay as replay_scenario
    from hybrid_kv.cli.target import is_case, replay_case

    return replay_case(file, python) if is_case(file) else replay_scenario(file)

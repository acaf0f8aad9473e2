"""The `hybrid-kv` command.

Exit code 0: fine; 1: a check failed; 2: it could not run, with one line on stderr; 3: nothing
failed, but a check was void.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Annotated

import typer

from hybrid_kv.cli import (
    accuracy,
    check,
    doctor,
    export,
    families,
    fuzz,
    generate,
    guard,
    help,
    plan,
    predict,
    red,
    replay,
    report,
    results,
    serve,
    study,
)
from hybrid_kv.cli.checkout import Commands
from hybrid_kv.errors import INTERRUPTED, run_command

app = typer.Typer(
    name="hybrid-kv",
    cls=Commands,
    help="See, test and time the cache of hybrid (attention + Mamba) language models.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
)


def _print_version(given: bool) -> None:
    if given:
        from importlib.metadata import version

        print(f"hybrid-kv {version('hybrid_kv')}")
        raise typer.Exit


@app.callback()
def _root(
    version: Annotated[
        bool,
        typer.Option(
            "--version", callback=_print_version, is_eager=True, help="Print the version."
        ),
    ] = False,
) -> None:
    pass  # Options of the program itself.


_PANELS: dict[str, tuple[Callable[..., object], ...]] = {
    help.CHECK: (guard.guard, check.check, replay.replay, fuzz.fuzz, export.export),
    help.MEASURE: (study.study, report.report, red.red, doctor.doctor),
    help.PLAN: (plan.plan, predict.predict, families.families),
    help.RUN: (generate.generate, serve.serve, families.checkpoint),
}
app.add_typer(accuracy.app, name="accuracy", cls=help.CommandGroup, rich_help_panel=help.MEASURE)
app.add_typer(results.app, name="results", rich_help_panel=help.MEASURE)
for _panel, _commands in _PANELS.items():
    for _command in _commands:
        app.command(cls=help.Command, rich_help_panel=_panel)(_command)


# Reading the signatures of all commands takes longer than most tests of one.
_click = cache(typer.main.get_command)


def main(args: list[str] | None = None) -> None:
    """Run the command line."""

    def command() -> int:
        try:
            group = _click(app)
            return group(args=args, prog_name="hybrid-kv", standalone_mode=False) or 0
        except typer.Abort:  # Ctrl-C, in older versions of typer.
            return INTERRUPTED

    run_command(command)

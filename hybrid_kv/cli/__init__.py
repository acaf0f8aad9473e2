"""The `hybrid-kv` command. Exit code 0: fine; 1: a check failed; 2: it could not run, with one line on stderr."""

from __future__ import annotations

import sys

import typer

from hybrid_kv.cli import accuracy, compare, generate, guard, kernels, plan, report, results
from hybrid_kv.cli.errors import leave

app = typer.Typer(
    name="hybrid-kv",
    help="See, test and time the cache of hybrid (attention + Mamba) language models.",
    add_completion=False,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
)
app.command()(plan.plan)
app.command()(guard.guard)
app.command()(generate.generate)
app.add_typer(accuracy.app, name="accuracy")
app.command()(results.results)
app.command()(kernels.kernels)
app.command()(compare.compare)
app.command()(report.report)


def main(args: list[str] | None = None) -> None:
    """Run the command line."""
    try:
        sys.exit(app(args=args, prog_name="hybrid-kv", standalone_mode=False) or 0)
    except Exception as error:
        leave(error)

"""`hybrid-kv results`: rows of CSVs and Parquet, printed, checked, merged."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import typer

from hybrid_kv.cli.help import Command, CommandGroup
from hybrid_kv.cli.options import AsJson, OutFile, Select, dataclass_options, show


class _ListByDefault(CommandGroup):
    @property
    def default(self) -> Any:
        return self.commands["list"]

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        return super().parse_args(
            ctx, args if args and args[0] in (*self.commands, "--help") else ["list", *args]
        )


app = typer.Typer(
    cls=_ListByDefault, help="Print rows of results, check them, or make Parquet of them."
)
Places = Annotated[
    list[Path] | None, typer.Argument(help="CSVs, data sets, or folders of them; default: results.")
]
Target = Annotated[
    Path, typer.Option("--to", help="The data set, a folder whose name ends in .parquet.")
]


@dataclass(frozen=True, kw_only=True)
class Filter:
    """The rows that are printed; None: all."""

    suite: Annotated[
        str | None, typer.Option(help="The whole name of a suite, such as accuracy.")
    ] = None
    select: Select = None
    metric: Annotated[str | None, typer.Option(help="A part of a metric's name.")] = None
    commit: Annotated[str | None, typer.Option(help="The start of a commit hash.")] = None
    machine: Annotated[str | None, typer.Option(help="A part of a machine's name.")] = None
    device: Annotated[str | None, typer.Option(help="A part of a device's name.")] = None
    since: Annotated[
        str | None, typer.Option(help="A day or moment in UTC, such as 2026-11-21.")
    ] = None
    last: Annotated[int | None, typer.Option(help="The newest so many rows.")] = None


@dataclass(frozen=True, kw_only=True)
class Form:
    """The form in which rows are printed."""

    as_json: AsJson = False
    out: OutFile = None
    as_csv: Annotated[bool, typer.Option("--csv", help="Print CSV only.")] = False


@app.command(name="list", cls=Command)
@dataclass_options
def list_rows(
    rows: Filter,
    form: Form,
    places: Places = None,
    check: Annotated[
        bool, typer.Option("--check", help="Check every row of the files instead.")
    ] = False,
) -> None:
    """Print rows, or check that later readers can rely on them: the command without a name."""
    from hybrid_kv.errors import ConfigError
    from hybrid_kv.files import check_outputs
    from hybrid_kv.measure.results.view import result_files

    if form.as_json and form.as_csv:
        raise ConfigError("--json and --csv exclude each other; give one of them")
    if check and any((*vars(rows).values(), *vars(form).values())):
        raise ConfigError(
            "--check looks at every row and prints lines; leave the other options out"
        )
    check_outputs(form.out)
    files = result_files(places or [Path("results")])
    if check:
        raise typer.Exit(_check(files))
    _list(files, rows, form)


def _check(files: list[Path]) -> int:
    """Print the problems of all rows; return 1 if there are any.

    Raises:
        VoidError: there is no row.
    """
    from hybrid_kv.errors import VoidError
    from hybrid_kv.measure.results import check_file
    from hybrid_kv.measure.results.store import opened

    problems = [problem for file in files for problem in check_file(file)]
    with opened([] if problems else files) as store:
        if not problems and not next(store.records("SELECT count(*) AS n FROM rows"))["n"]:
            raise VoidError(f"nothing was judged, {', '.join(map(str, files))} has no row")
    count = f"{len(problems)} problem{'s' * (len(problems) != 1)} in {len(files)} files"
    print(*problems, count, sep="\n")
    return 1 if problems else 0


def _list(files: list[Path], rows: Filter, form: Form) -> None:
    """Print the rows that a filter leaves."""
    from hybrid_kv.measure.results.store import opened
    from hybrid_kv.measure.results.view import documents, print_csv, print_rows, select_rows

    names = ("suite", "metric", "commit", "machine", "device")
    texts = {name: getattr(rows, name) for name in names}
    with opened(files) as store:
        selected = select_rows(store, rows.select or (), rows.last, since=rows.since, **texts)
        table = print_csv if form.as_csv else print_rows
        if form.as_json or form.out is not None:
            listed = list(selected)
            show(documents(listed), form.as_json, form.out, table, listed)
        else:
            table(selected)


@app.command(cls=Command)
def export(to: Target, places: Places = None) -> None:
    """Make a data set of Parquet files, one per suite and month, that holds each row once."""
    from hybrid_kv.measure.results.dataset import export_rows
    from hybrid_kv.measure.results.view import result_files

    count = export_rows(result_files(places or [Path("results")]), to)
    print(f"{to}: {count:,} rows")


@app.command(cls=Command)
def merge(to: Target, places: Places = None) -> None:
    """Add the rows that a data set lacks, such as those of other machines; the others stay."""
    from hybrid_kv.measure.results.dataset import merge_rows
    from hybrid_kv.measure.results.view import result_files

    count = merge_rows(result_files(places or [Path("results")]), to)
    print(f"{to}: {count:,} new rows")


@app.command(cls=Command)
def trim(files: Annotated[list[Path], typer.Argument(help="CSVs to cut.")]) -> None:
    """Cut CSVs to the newest run of each benchmark on each machine.

    `export` keeps the older rows as Parquet.
    """
    from hybrid_kv.errors import ConfigError
    from hybrid_kv.measure.results.dataset import trim_file
    from hybrid_kv.measure.results.store import DATASET

    others = [file for file in files if file.suffix == DATASET or not file.is_file()]
    if others:
        raise ConfigError(f"{others[0]} is not a CSV; name files such as results/guard.csv")
    for file in files:
        before, after = trim_file(file)
        print(f"{file}: {after:,} of {before:,} rows kept")

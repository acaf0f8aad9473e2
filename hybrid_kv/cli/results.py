"""`hybrid-kv results`: rows of CSVs and Parquet, printed, checked, merged."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from hybrid_kv.cli.help import Command, Group
from hybrid_kv.cli.options import AsJson, OutFile, Select, show


class _ListByDefault(Group):
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


@app.command(name="list", cls=Command)
def list_rows(
    places: Places = None,
    suite: Annotated[
        str | None, typer.Option(help="The whole name of a suite, such as accuracy.")
    ] = None,
    select: Select = None,
    metric: Annotated[str | None, typer.Option(help="A part of a metric's name.")] = None,
    commit: Annotated[str | None, typer.Option(help="The start of a commit hash.")] = None,
    machine: Annotated[str | None, typer.Option(help="A part of a machine's name.")] = None,
    device: Annotated[str | None, typer.Option(help="A part of a device's name.")] = None,
    since: Annotated[
        str | None, typer.Option(help="A day or moment in UTC, such as 2026-11-21.")
    ] = None,
    last: Annotated[int | None, typer.Option(help="The newest so many rows.")] = None,
    as_json: AsJson = False,
    out: OutFile = None,
    as_csv: Annotated[bool, typer.Option("--csv", help="Print CSV only.")] = False,
    check: Annotated[
        bool, typer.Option("--check", help="Check every row of the files instead.")
    ] = False,
) -> None:
    """Print rows, or check that they are what later readers rely on: the command without a name."""
    from hybrid_kv.errors import ConfigError, VoidError
    from hybrid_kv.files import check_outputs
    from hybrid_kv.measure.results import check_file
    from hybrid_kv.measure.results.store import opened
    from hybrid_kv.measure.results.view import (
        documents,
        print_csv,
        print_rows,
        result_files,
        select_rows,
    )

    if as_json and as_csv:
        raise ConfigError("--json and --csv exclude each other; give one of them")
    if check and (
        as_json or as_csv or any((out, suite, select, metric, commit, machine, device, since, last))
    ):
        raise ConfigError(
            "--check looks at every row and prints lines; leave the other options out"
        )
    check_outputs(out)
    files = result_files(places or [Path("results")])
    if check:
        problems = [problem for file in files for problem in check_file(file)]
        with opened([] if problems else files) as store:
            if not problems and not next(store.records("SELECT count(*) AS n FROM rows"))["n"]:
                raise VoidError(f"nothing was judged, {', '.join(map(str, files))} has no row")
        print(
            *problems,
            f"{len(problems)} problem{'s' * (len(problems) != 1)} in {len(files)} files",
            sep="\n",
        )
        raise typer.Exit(1 if problems else 0)
    with opened(files) as store:
        texts = {
            "suite": suite,
            "metric": metric,
            "commit": commit,
            "machine": machine,
            "device": device,
        }
        rows = select_rows(store, select or (), last, since=since, **texts)
        table = print_csv if as_csv else print_rows
        if as_json or out is not None:
            found = list(rows)
            show(documents(found), as_json, out, lambda: table(found))
        else:
            table(rows)


@app.command(cls=Command)
def export(to: Target, places: Places = None) -> None:
    """Make a data set of Parquet files, one per suite and month, that holds each row once."""
    from hybrid_kv.measure.results.dataset import export_rows
    from hybrid_kv.measure.results.view import result_files

    count = export_rows(result_files(places or [Path("results")]), to)
    print(f"{to}: {count:,} rows")


@app.command(cls=Command)
def merge(to: Target, places: Places = None) -> None:
    """Add the rows that a data set lacks, such as those of other machines; those that it has stay as they are."""
    from hybrid_kv.measure.results.dataset import merge_rows
    from hybrid_kv.measure.results.view import result_files

    count = merge_rows(result_files(places or [Path("results")]), to)
    print(f"{to}: {count:,} new rows")


@app.command(cls=Command)
def trim(files: Annotated[list[Path], typer.Argument(help="CSVs to cut.")]) -> None:
    """Cut CSVs to the newest run of each benchmark on each machine; `export` keeps the older rows as Parquet."""
    from hybrid_kv.errors import ConfigError
    from hybrid_kv.measure.results.dataset import trim_file
    from hybrid_kv.measure.results.store import DATASET

    if sets := [file for file in files if file.suffix == DATASET or not file.is_file()]:
        raise ConfigError(f"{sets[0]} is not a CSV; name files such as results/guard.csv")
    for file in files:
        before, after = trim_file(file)
        print(f"{file}: {after:,} of {before:,} rows kept")

"""`hybrid-kv results`: rows of the CSVs, printed or checked."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from hybrid_kv.cli.options import AsJson, OutFile, Select, show


def results(
    places: Annotated[list[Path] | None, typer.Argument(help="CSVs, or folders of them; default: results.")] = None,
    suite: Annotated[str | None, typer.Option(help="The whole name of a suite, such as accuracy.")] = None,
    select: Select = None,
    metric: Annotated[str | None, typer.Option(help="A part of a metric's name.")] = None,
    commit: Annotated[str | None, typer.Option(help="The start of a commit hash.")] = None,
    machine: Annotated[str | None, typer.Option(help="A part of a machine's name.")] = None,
    device: Annotated[str | None, typer.Option(help="A part of a device's name.")] = None,
    since: Annotated[str | None, typer.Option(help="A day or moment in UTC, such as 2026-11-21.")] = None,
    last: Annotated[int | None, typer.Option(help="The newest so many rows.")] = None,
    as_json: AsJson = False,
    out: OutFile = None,
    as_csv: Annotated[bool, typer.Option("--csv", help="Print CSV only.")] = False,
    check: Annotated[bool, typer.Option("--check", help="Check every row of the files instead.")] = False,
) -> None:
    """Print rows of results/, or check that they are what later readers rely on."""
    import pandas as pd

    from hybrid_kv.config import ConfigError
    from hybrid_kv.files import check_outputs
    from hybrid_kv.results import check_file, read_rows
    from hybrid_kv.results.view import documents, print_rows, result_files, select_rows

    if as_json and as_csv:
        raise ConfigError("--json and --csv exclude each other; give one of them")
    if check and (as_json or as_csv or any((out, suite, select, metric, commit, machine, device, since, last))):
        raise ConfigError("--check looks at every row and prints lines; leave the other options out")
    check_outputs(out)
    files = result_files(places or [Path("results")])
    if check:
        problems = [problem for file in files for problem in check_file(file)]
        print(*problems, f"{len(problems)} problem{'s' * (len(problems) != 1)} in {len(files)} files", sep="\n")
        raise typer.Exit(1 if problems else 0)
    frame = select_rows(
        pd.concat([read_rows(file) for file in files], ignore_index=True),
        equal={"suite": suite},
        select=select,
        containing={"metric": metric, "machine": machine, "device": device},
        commit=commit,
        since=since,
        last=last,
    )

    def table() -> None:
        if as_csv:
            print(frame.to_csv(index=False, lineterminator="\n"), end="")
        else:
            print_rows(frame)

    show(documents(frame) if as_json or out is not None else None, as_json, out, table)

"""`hybrid-kv mutants`: known bugs of other engines, planted, and what catches them."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated, Literal

import typer

from hybrid_kv.cli.options import AsJson, OutFile, Record, ResultsFolder, rows_file, show

Way = Literal["quick", "sanitizer", "full", "http"]


def mutants(
    ids: Annotated[
        list[str] | None, typer.Option("--id", help="Only this bug, as F16, or none; may be repeated.")
    ] = None,
    by: Annotated[Way, typer.Option(help="What hunts them; http: probes of a server.")] = "quick",
    jobs: Annotated[int, typer.Option(min=1, help="Bugs at a time, a process each.")] = 1,
    limit: Annotated[int, typer.Option(min=1, help="Seconds for one bug.")] = 300,
    repro: Annotated[
        Path | None, typer.Option(metavar="FOLDER", help="Make each case that caught one small, and keep it here.")
    ] = None,
    folder: Annotated[Path | None, typer.Option(help="Of the bugs; default: mutants/ of the checkout.")] = None,
    as_json: AsJson = False,
    out: OutFile = None,
    results: ResultsFolder = None,
    record: Record = False,
) -> None:
    """Plant bugs of other engines in copies of this one, one by one, and say which check sees each first."""
    from dataclasses import asdict

    from tqdm.auto import tqdm

    from hybrid_kv.errors import require
    from hybrid_kv.files import check_outputs
    from hybrid_kv.mutation.hunt import hunt_all
    from hybrid_kv.mutation.mutant import FOLDER, UNCHANGED, read_mutants
    from hybrid_kv.results import append_rows

    require("yaml", "safetensors", "tokenizers", "transformers", "lm_eval", "scipy")
    if by == "http":
        require("fastapi", "uvicorn", "prometheus_client", "httpx2")
    csv = rows_file("mutants.csv", results, record)
    check_outputs(out)
    chosen = read_mutants(folder or FOLDER, ids or ())
    rows = []
    for row in (bar := tqdm(hunt_all(chosen, by, jobs, limit, repro), total=len(chosen), unit="bug", desc="mutants")):
        rows.append(row)  # an hour's work is told and kept as it comes
        append_rows(csv, row.records(by))
        small = f"; {row.small}" if row.small else ""
        bar.write(f"{row.id}: {row.section or 'nothing'} {row.rule} after {row.seconds:.1f} s{small}", file=sys.stderr)
    rows.sort(key=lambda row: row.id)
    document = {"by": by, "mutants": [asdict(row) for row in rows]}

    def print_table() -> None:
        from rich.console import Console
        from rich.table import Table

        table = Table("id", "caught by", "rule", "requests", "seconds", "made small", "", box=None, pad_edge=False)
        for row in rows:
            requests = str(row.requests) if row.requests else ""
            small = str(row.small or "")
            table.add_row(row.id, row.section, row.rule, requests, f"{row.seconds:.1f}", small, row.problem)
        Console(width=160, highlight=False).print(table)
        bugs = [row for row in rows if row.id != UNCHANGED]
        print(f"{sum(row.caught for row in bugs)} of {len(bugs)} caught")

    show(document, as_json, out, print_table)
    if any(row.problem for row in rows):
        raise typer.Exit(1)

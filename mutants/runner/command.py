"""`hybrid-kv mutants`: known bugs of other engines, injected, or generated mutants, and what catches them."""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from hybrid_kv.cli.options import AsJson, JUnitFile, OutFile, Record, ResultsFolder, rows_file, show

if TYPE_CHECKING:
    from mutants.runner.mutant import Mutant
    from mutants.runner.run import Row

By = Literal["quick", "sanitizer", "full", "accuracy", "http", "weights", "tests"]


def mutants(
    ids: Annotated[
        list[str] | None,
        typer.Option("--id", help="Only this one: F16, none, a row's id; may be repeated."),
    ] = None,
    generated: Annotated[
        int | None,
        typer.Option(min=1, help="Run this many mutants that operators make of the code instead."),
    ] = None,
    seed: Annotated[int, typer.Option(help="Of the sample of generated ones.")] = 0,
    changed_since: Annotated[
        str | None,
        typer.Option(
            metavar="REVISION", help="Generated ones of lines that changed since, one of each."
        ),
    ] = None,
    again: Annotated[
        bool, typer.Option("--again", help="Also generated ones that survived before.")
    ] = False,
    by: Annotated[
        By | None,
        typer.Option(
            help="What is to kill them; default: the quick guard, and tests of units. Of generated ones only those of "
            "quick or of tests; accuracy: the guard models' answers alone; http: probes of a server; weights: exact "
            "weights alone."
        ),
    ] = None,
    jobs: Annotated[int, typer.Option(min=1, help="Mutants at a time, a process each.")] = 1,
    limit: Annotated[int, typer.Option(min=1, help="Seconds of one core for one mutant.")] = 300,
    repro: Annotated[
        Path | None,
        typer.Option(metavar="FOLDER", help="Reduce each case that caught one, and keep it here."),
    ] = None,
    folder: Annotated[
        Path | None, typer.Option(help="Of the known bugs; default: mutants/ of the checkout.")
    ] = None,
    prune_equivalent: Annotated[
        bool,
        typer.Option("--prune-equivalent", help="Only drop proofs of mutants whose code has gone."),
    ] = False,
    as_json: AsJson = False,
    out: OutFile = None,
    junit_xml: JUnitFile = None,
    results: ResultsFolder = None,
    record: Record = False,
) -> None:
    """Inject bugs of other engines into copies of this one, one by one, and report which check catches each first."""
    from dataclasses import asdict

    from hybrid_kv.check.ci import Verdict, published
    from hybrid_kv.check.progress import progress_bar
    from hybrid_kv.errors import ConfigError, VoidError, require
    from hybrid_kv.files import check_outputs
    from hybrid_kv.measure.results import append_rows
    from mutants.runner import run
    from mutants.runner.mutant import FOLDER, read_mutants
    from mutants.runner.sample import choose

    require(
        "yaml",
        "safetensors",
        "tokenizers",
        "transformers",
        "lm_eval",
        "scipy",
        "pytest",
        "hypothesis",
    )
    if by == "http":
        require("fastapi", "uvicorn", "prometheus_client", "httpx2")
    if prune_equivalent:
        return _prune()
    for given, option in ((changed_since, f"--changed-since {changed_since}"), (again, "--again")):
        if given and generated is None:
            raise ConfigError(
                f"{option} selects generated mutants: give --generated too, and how many at most"
            )
    if generated is not None and (ids or folder is not None):
        raise ConfigError(
            f"--generated {generated} draws its own mutants; leave out --id and --folder"
        )
    is_generated = generated is not None or any(":" in name for name in ids or ())
    if by not in (None, "quick") and (by == "tests") != is_generated:
        raise ConfigError(
            f"--by {by}: generated mutants are killed by quick or tests, known bugs by all but tests"
        )
    csv = rows_file("mutants.csv", results, record)
    check_outputs(out, junit_xml)
    rows: list[Row] = []
    chosen: Sequence[Mutant]
    if is_generated:
        require("cosmic_ray")
        chosen, rows = choose(by, generated, seed, changed_since, ids or (), csv, again)
    else:
        chosen = read_mutants(folder or FOLDER, ids or ())
        for mutant in chosen:
            # Code that has moved is reported before an hour's work, not in the middle of it.
            mutant.changed()
    if not chosen and not rows:
        lines = (
            "the code" if changed_since is None else f"the lines that differ from {changed_since}"
        )
        raise VoidError(f"nothing was judged, no mutant of {lines} is left to run")
    way = by or "quick"
    recorded = {mutant.id: "+".join(mutant.ways(way)) if is_generated else way for mutant in chosen}
    found = run.run_all(chosen, way, run.MutationRun(limit, repro), jobs)
    with published("hybrid-kv mutants", junit_xml) as keep:
        bar = progress_bar(found, total=len(chosen), unit="mutant", desc="mutants")
        for row in bar:
            rows.append(row)  # An hour's work is shown and kept as it comes.
            keep(
                [
                    Verdict(one.id, "failed" if one.problem else "ok", one.problem, one.seconds)
                    for one in rows
                ]
            )
            append_rows(csv, row.records(recorded[row.id]))
            case = f"; {row.reduced}" if row.reduced else ""
            what = f"{row.section or 'nothing'} {row.rule}".strip() + (
                f", {row.problem}" if row.problem else ""
            )
            bar.write(f"{row.id}: {what} after {row.seconds:.1f} s{case}", file=sys.stderr)
    rows.sort(key=lambda row: row.id)
    document = {"by": by or "default", "mutants": [asdict(row) for row in rows]}
    table = _print_survivors if is_generated else _print_table
    show(document, as_json, out, lambda: table(rows))
    if any(row.problem for row in rows):
        raise typer.Exit(1)


def _prune() -> None:
    from mutants.runner.equivalent import prune

    gone = prune()
    print(*gone, sep="\n", end="\n" * bool(gone))
    print(f"{len(gone)} proofs of code that has gone were dropped")


def _print_table(rows: Sequence[Row]) -> None:
    from rich.console import Console
    from rich.table import Table

    from mutants.runner.mutant import UNCHANGED

    table = Table(
        "id",
        "caught by",
        "rule",
        "requests",
        "seconds",
        "reduced case",
        "",
        box=None,
        pad_edge=False,
    )
    for row in rows:
        requests = str(row.requests) if row.requests else ""
        case = str(row.reduced or "")
        table.add_row(
            row.id, row.section, row.rule, requests, f"{row.seconds:.1f}", case, row.problem
        )
    Console(width=160, highlight=False, markup=False).print(table)
    bugs = [row for row in rows if row.id != UNCHANGED]
    print(f"{sum(row.caught for row in bugs)} of {len(bugs)} caught")


def _print_survivors(rows: Sequence[Row]) -> None:
    """Those that nothing caught, by their lines, and how many each section caught."""
    for row in rows:
        if row.problem:
            print(f"{row.id} ({row.problem})\n    {row.change}")
    sections = Counter(row.section for row in rows if row.caught)
    by_section = ", ".join(f"{section} {count}" for section, count in sections.most_common())
    print(f"{sections.total()} of {len(rows)} caught{': ' * bool(by_section)}{by_section}")

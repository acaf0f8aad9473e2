"""`hybrid-kv mutants`: known bugs of other engines, planted, or generated ones, and what catches them."""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from hybrid_kv.cli.options import AsJson, OutFile, Record, ResultsFolder, rows_file, show

if TYPE_CHECKING:
    from hybrid_kv.mutation.hunt import Row
    from hybrid_kv.mutation.mutant import Mutant

Way = Literal["quick", "sanitizer", "full", "accuracy", "http", "triton"]


def mutants(
    ids: Annotated[
        list[str] | None, typer.Option("--id", help="Only this one: F16, none, a row's id; may be repeated.")
    ] = None,
    generated: Annotated[
        int | None,
        typer.Option(min=1, help="Instead so many that operators make of the code."),
    ] = None,
    seed: Annotated[int, typer.Option(help="Of the sample of generated ones.")] = 0,
    changed_since: Annotated[
        str | None, typer.Option(metavar="REVISION", help="Generated ones of lines that changed since, one of each.")
    ] = None,
    again: Annotated[bool, typer.Option("--again", help="Also generated ones that survived before.")] = False,
    by: Annotated[
        Way,
        typer.Option(
            help="What hunts them; accuracy: the guard models' answers alone; http: probes of a server; triton: "
            "generated ones of Triton's kernels, by their tests."
        ),
    ] = "quick",
    jobs: Annotated[int, typer.Option(min=1, help="Bugs at a time, a process each.")] = 1,
    limit: Annotated[int, typer.Option(min=1, help="Seconds of one core for one bug.")] = 300,
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

    from hybrid_kv.errors import ConfigError, require
    from hybrid_kv.files import check_outputs
    from hybrid_kv.mutation.generated import GUARD, TRITON, WAYS
    from hybrid_kv.mutation.hunt import Hunt, hunt_all
    from hybrid_kv.mutation.mutant import FOLDER, read_mutants
    from hybrid_kv.mutation.sample import choose
    from hybrid_kv.results import append_rows

    require("yaml", "safetensors", "tokenizers", "transformers", "lm_eval", "scipy")
    if by == "http":
        require("fastapi", "uvicorn", "prometheus_client", "httpx2")
    if changed_since is not None and generated is None:
        raise ConfigError(f"--changed-since {changed_since}: give --generated too, and how many at most")
    if again and generated is None:
        raise ConfigError("--again is of generated mutants: give --generated too, or the id alone")
    if generated is not None and (ids or folder is not None):
        raise ConfigError(f"--generated {generated} draws its own mutants; leave out --id and --folder")
    is_generated = generated is not None or any(":" in name for name in ids or ())
    if is_generated and by not in WAYS:
        raise ConfigError(
            f"--by {by}: the quick guard and then the sanitizer hunt generated mutants; leave it out, or give --by "
            f"{TRITON} for those of Triton's kernels"
        )
    if by == TRITON and not is_generated:
        raise ConfigError(f"--by {TRITON}: the tests of Triton's kernels hunt generated mutants; give --generated too")
    csv = rows_file("mutants.csv", results, record)
    check_outputs(out)
    rows: list[Row] = []
    chosen: Sequence[Mutant]
    if is_generated:
        require("cosmic_ray", *(["triton", "pytest", "hypothesis"] if by == TRITON else []))
        chosen, rows = choose(by, generated, seed, changed_since, ids or (), csv, again)
    else:
        chosen = read_mutants(folder or FOLDER, ids or ())
        for mutant in chosen:
            mutant.changed()  # code that has moved is told of before an hour's work, not in the middle of it
    look = (results or Path("out")) / "reached.json" if generated is not None and by == GUARD else None
    hunt = Hunt(WAYS[by] if is_generated else (by,), limit, repro)
    found = hunt_all(chosen, hunt, jobs, look)
    for row in (bar := tqdm(found, total=len(chosen), unit="bug", desc="mutants")):
        rows.append(row)  # an hour's work is told and kept as it comes
        append_rows(csv, row.records("+".join(hunt.ways)))
        small = f"; {row.small}" if row.small else ""
        bar.write(f"{row.id}: {row.section or 'nothing'} {row.rule} after {row.seconds:.1f} s{small}", file=sys.stderr)
    rows.sort(key=lambda row: row.id)
    document = {"by": "+".join(hunt.ways), "mutants": [asdict(row) for row in rows]}
    table = _print_survivors if is_generated else _print_table
    show(document, as_json, out, lambda: table(rows))
    if any(row.problem for row in rows):
        raise typer.Exit(1)


def _print_table(rows: Sequence[Row]) -> None:
    from rich.console import Console
    from rich.table import Table

    from hybrid_kv.mutation.mutant import UNCHANGED

    table = Table("id", "caught by", "rule", "requests", "seconds", "made small", "", box=None, pad_edge=False)
    for row in rows:
        requests = str(row.requests) if row.requests else ""
        small = str(row.small or "")
        table.add_row(row.id, row.section, row.rule, requests, f"{row.seconds:.1f}", small, row.problem)
    Console(width=160, highlight=False).print(table)
    bugs = [row for row in rows if row.id != UNCHANGED]
    print(f"{sum(row.caught for row in bugs)} of {len(bugs)} caught")


def _print_survivors(rows: Sequence[Row]) -> None:
    """Those that nothing caught, by their lines, and how many each section caught."""
    for row in rows:
        if row.problem:
            print(f"{row.id} ({row.problem})\n    {row.change}")
    sections = Counter(row.section for row in rows if row.caught)
    told = ", ".join(f"{section} {count}" for section, count in sections.most_common())
    print(f"{sections.total()} of {len(rows)} caught: {told or 'none'}")

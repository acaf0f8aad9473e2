"""`hybrid-kv study`: a matrix of runs."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from hybrid_kv.cli.options import AsJson, OutFile, dataclass_options, show
from hybrid_kv.errors import VOID

if TYPE_CHECKING:
    from hybrid_kv.measure.study.cell import Done
    from hybrid_kv.measure.study.matrix import StudyCell

_WORDS = {0: "fine", 1: "failed", VOID: "void", None: "lost"}


@dataclass(frozen=True, kw_only=True)
class Workers:
    """The workers of a study, and their limits."""

    jobs: Annotated[int, typer.Option(min=1, help="Cells at a time on this machine.")] = 1
    ray: Annotated[
        str | None,
        typer.Option(metavar="ADDRESS|auto", help="Run the cells on this Ray cluster."),
    ] = None
    limit: Annotated[int, typer.Option(min=1, help="Seconds for one cell.")] = 3600
    retries: Annotated[
        int, typer.Option(min=0, help="Retries of a cell that died or was lost.")
    ] = 2


@dataclass_options
def study(
    context: typer.Context,
    file: Annotated[Path, typer.Argument(help="A YAML file of runs and axes.")],
    workers: Workers,
    folder: Annotated[
        Path | None,
        typer.Option(
            help="Folder of the results; rerun the command to resume; default: out/study/NAME."
        ),
    ] = None,
    dry: Annotated[
        bool, typer.Option("--dry", help="List the cells without running them.")
    ] = False,
    as_json: AsJson = False,
    out: OutFile = None,
) -> None:
    """Run every combination that a file declares, and gather the rows in one data set."""
    from hybrid_kv.errors import require
    from hybrid_kv.files import check_outputs

    require("yaml", "duckdb", *(("ray",) if workers.ray is not None else ()))
    from hybrid_kv.measure.study.matrix import read_study
    from hybrid_kv.measure.study.run import gather

    check_outputs(out)
    cells = read_study(file)
    _check_options(context.find_root().command, cells)
    if dry:
        listed = [{"id": cell.id, "command": cell.text} for cell in cells]
        show(listed, as_json, out, _print_cells, cells)
        return
    place = folder or Path("out/study") / file.stem
    records = _run(cells, place, workers)
    count = gather(place, cells)
    document = {"folder": str(place), "new_rows": count, "cells": records}
    show(document, as_json, out, _print, cells, records, place, count)
    codes: list[Any] = [record.get("code") for record in records.values()]
    if any(code not in (0, 1, VOID) for code in codes):
        raise typer.Exit(2)
    raise typer.Exit(1 if 1 in codes else max(codes))


def _run(cells: list[StudyCell], place: Path, workers: Workers) -> dict[str, dict[str, Any]]:
    """Run the cells that have no result yet, and report each; return the record of each."""
    from hybrid_kv.check.progress import progress_bar
    from hybrid_kv.measure.study.run import locally, over_ray, run_study

    if workers.ray is None:
        pool = locally(workers.jobs, workers.limit)
    else:
        pool = over_ray(workers.ray, workers.limit, workers.retries)
    with progress_bar(total=len(cells), unit="cell", desc="study") as bar:

        def report(cell: StudyCell, done: Done) -> None:
            bar.update(done.is_result)
            word = _WORDS.get(done.code, f"could not run ({done.code})")
            bar.write(f"{cell.text}: {word} after {done.seconds:.0f} s", file=sys.stderr)

        return run_study(cells, place, pool, workers.retries, report)


def _check_options(group: Any, cells: list[StudyCell]) -> None:
    """Raise wrong usage of a cell's command before hours of work.

    `bench`, which is not a part of it, raises its own.
    """
    for cell in cells:
        module, name, *words = cell.command("rows")[2:]
        if module == "hybrid_kv.cli":
            group.get_command(None, name).make_context(f"hybrid-kv {name}", words)


def _print_cells(cells: list[StudyCell]) -> None:
    for cell in cells:
        print(f"{cell.id}  {cell.text}")


def _print(
    cells: list[StudyCell], records: dict[str, dict[str, Any]], place: Path, count: int
) -> None:
    codes: list[Any] = [records[cell.id].get("code") for cell in cells]
    for cell, code in zip(cells, codes, strict=True):
        if code != 0:
            last = (records[cell.id].get("said") or "it was not run").strip().splitlines()[-1:]
            word = {1: "failed", VOID: "void"}.get(code, "could not run")
            print(f"{word}: {cell.text}: {' '.join(last)[:200]}")
    print(f"{codes.count(0)} of {len(cells)} cells fine, {codes.count(1)} failed")
    rows = place / "rows.parquet"
    print(f"{count:,} new rows in {rows}: hybrid-kv results {rows}")

"""`hybrid-kv mutants`: inject known bugs or generated mutants, and report what catches them."""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from hybrid_kv.cli.options import RowOutput, dataclass_options, rows_file, show

if TYPE_CHECKING:
    from mutants.runner.mutant import Mutant
    from mutants.runner.run import Row

By = Literal["quick", "sanitizer", "full", "accuracy", "http", "weights", "tests"]
# What the guard and the tests of units import, and a server's.
PACKAGES = (
    "yaml",
    "safetensors",
    "tokenizers",
    "transformers",
    "lm_eval",
    "scipy",
    "pytest",
    "hypothesis",
)
SERVER_PACKAGES = ("fastapi", "uvicorn", "prometheus_client", "httpx2")


@dataclass(frozen=True, kw_only=True)
class Choice:
    """The mutants of a run: known bugs, or generated ones."""

    ids: Annotated[
        list[str] | None,
        typer.Option("--id", help="Only this one: F16, none, a row's id; may be repeated."),
    ] = None
    folder: Annotated[
        Path | None, typer.Option(help="Of the known bugs; default: mutants/ of the checkout.")
    ] = None
    generated: Annotated[
        int | None,
        typer.Option(min=1, help="Run this many mutants that operators make of the code instead."),
    ] = None
    seed: Annotated[int, typer.Option(help="Of the sample of generated ones.")] = 0
    changed_since: Annotated[
        str | None,
        typer.Option(
            metavar="REVISION", help="Generated ones of lines that changed since, one of each."
        ),
    ] = None
    again: Annotated[
        bool, typer.Option("--again", help="Also generated ones that survived before.")
    ] = False

    @property
    def is_generated(self) -> bool:
        """Return whether the mutants are generated ones."""
        return self.generated is not None or any(":" in name for name in self.ids or ())


@dataclass(frozen=True, kw_only=True)
class Judges:
    """The checks that are to kill each mutant, and their limits."""

    by: Annotated[
        By | None,
        typer.Option(
            help="What is to kill them; default: the quick guard, and tests of units. Of generated "
            "ones only those of quick or of tests; accuracy: the guard models' answers alone; "
            "http: probes of a server; weights: exact weights alone."
        ),
    ] = None
    jobs: Annotated[int, typer.Option(min=1, help="Mutants at a time, a process each.")] = 1
    limit: Annotated[int, typer.Option(min=1, help="Seconds of one core for one mutant.")] = 300
    repro: Annotated[
        Path | None,
        typer.Option(metavar="FOLDER", help="Reduce each case that caught one, and keep it here."),
    ] = None


@dataclass_options
def mutants(
    choice: Choice,
    judges: Judges,
    output: RowOutput,
    prune_equivalent: Annotated[
        bool,
        typer.Option("--prune-equivalent", help="Only drop proofs of mutants whose code has gone."),
    ] = False,
) -> None:
    """Inject bugs of other engines into copies of this one; report which check catches each."""
    from dataclasses import asdict

    from hybrid_kv.errors import VoidError, require
    from hybrid_kv.files import check_outputs

    require(*PACKAGES, *(SERVER_PACKAGES if judges.by == "http" else ()))
    if prune_equivalent:
        return _prune()
    _check(choice, judges.by)
    csv = rows_file("mutants.csv", output.results, output.record)
    check_outputs(output.out, output.junit_xml)
    chosen, rows = _chosen(choice, judges.by, csv)
    if not chosen and not rows:
        lines = "the code"
        if choice.changed_since is not None:
            lines = f"the lines that differ from {choice.changed_since}"
        raise VoidError(f"nothing was judged, no mutant of {lines} is left to run")
    _judge(chosen, rows, judges, csv, output.junit_xml)
    rows.sort(key=lambda row: row.id)
    document = {"by": judges.by or "default", "mutants": [asdict(row) for row in rows]}
    table = _print_survivors if choice.is_generated else _print_table
    show(document, output.as_json, output.out, table, rows)
    if any(row.problem for row in rows):
        raise typer.Exit(1)


def _check(choice: Choice, by: By | None) -> None:
    """Raise `ConfigError` for options that exclude each other."""
    from hybrid_kv.errors import ConfigError

    changed_since, generated = choice.changed_since, choice.generated
    for given, option in (
        (changed_since, f"--changed-since {changed_since}"),
        (choice.again, "--again"),
    ):
        if given and generated is None:
            raise ConfigError(
                f"{option} selects generated mutants: give --generated too, and how many at most"
            )
    if generated is not None and (choice.ids or choice.folder is not None):
        raise ConfigError(
            f"--generated {generated} draws its own mutants; leave out --id and --folder"
        )
    if by not in (None, "quick") and (by == "tests") != choice.is_generated:
        raise ConfigError(
            f"--by {by}: generated mutants are killed by quick or tests, "
            "known bugs by all but tests"
        )


def _chosen(choice: Choice, by: By | None, csv: Path) -> tuple[Sequence[Mutant], list[Row]]:
    """Return the mutants to run, and the rows of generated ones that were run before."""
    from hybrid_kv.errors import require
    from mutants.runner.mutant import FOLDER, read_mutants
    from mutants.runner.sample import choose

    ids = choice.ids or ()
    if choice.is_generated:
        require("cosmic_ray")
        return choose(
            by, choice.generated, choice.seed, choice.changed_since, ids, csv, again=choice.again
        )
    known_bugs = read_mutants(choice.folder or FOLDER, ids)
    for mutant in known_bugs:
        # Code that has moved is reported before an hour's work, not in the middle of it.
        mutant.changed()
    return known_bugs, []


def _judge(
    chosen: Sequence[Mutant], rows: list[Row], judges: Judges, csv: Path, junit_xml: Path | None
) -> None:
    """Run mutants; add a row of each to `rows` and to the files.

    Rows are shown and kept as they come: they are an hour's work.
    """
    from hybrid_kv.check.ci import Verdict, published
    from hybrid_kv.check.progress import progress_bar
    from hybrid_kv.measure.results import append_rows
    from mutants.runner import run
    from mutants.runner.mutant import KnownBug

    way = judges.by or "quick"
    ways = {
        mutant.id: way if isinstance(mutant, KnownBug) else "+".join(mutant.ways(way))
        for mutant in chosen
    }
    judged = run.run_all(chosen, way, run.MutationRun(judges.limit, judges.repro), judges.jobs)
    with published("hybrid-kv mutants", junit_xml) as keep:
        bar = progress_bar(judged, total=len(chosen), unit="mutant", desc="mutants")
        for row in bar:
            rows.append(row)
            keep(
                [
                    Verdict(each.id, "failed" if each.problem else "ok", each.problem, each.seconds)
                    for each in rows
                ]
            )
            append_rows(csv, row.records(ways[row.id]))
            bar.write(_line(row), file=sys.stderr)


def _line(row: Row) -> str:
    """Return what caught a mutant and how soon, for the terminal."""
    catch = f"{row.section or 'nothing'} {row.rule}".strip()
    problem = f", {row.problem}" if row.problem else ""
    case = f"; {row.reduced}" if row.reduced else ""
    return f"{row.id}: {catch}{problem} after {row.seconds:.1f} s{case}"


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
    """Print those that nothing caught, by their lines, and how many each section caught."""
    for row in rows:
        if row.problem:
            print(f"{row.id} ({row.problem})\n    {row.change}")
    sections = Counter(row.section for row in rows if row.caught)
    by_section = ", ".join(f"{section} {count}" for section, count in sections.most_common())
    print(f"{sections.total()} of {len(rows)} caught{': ' * bool(by_section)}{by_section}")

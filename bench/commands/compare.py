"""`hybrid-kv compare`: two revisions, measured side by side."""

from __future__ import annotations

import secrets
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from hybrid_kv.cli.options import (
    RowOutput,
    Select,
    dataclass_options,
    require_at_least_one,
    rows_file,
    show,
)

if TYPE_CHECKING:
    from bench.harness.compare import Comparison
    from bench.harness.judgement import Design
    from bench.harness.verdicts import Outcome

Tier = Literal["count", "cpu", "gpu"]


@dataclass(frozen=True, kw_only=True)
class Compared:
    """The benchmarks that are compared, and how."""

    every: Annotated[
        bool, typer.Option("--all", help="All benchmarks, not only the quick ones: minutes.")
    ] = False
    select: Select = None
    tier: Annotated[
        Tier | None, typer.Option(help="Only counts, times of host code (cpu), or of a GPU.")
    ] = None
    pairs: Annotated[
        int,
        typer.Option(
            help="Pairs of processes of the first look. More are measured where a time is "
            "inconclusive."
        ),
    ] = 6
    threshold: Annotated[
        float, typer.Option(help="Call a time the same if its interval excludes this change.")
    ] = 0.05
    seed: Annotated[
        int | None, typer.Option(min=0, help="Of orders and memory layouts; default: a fresh one.")
    ] = None


@dataclass(frozen=True, kw_only=True)
class Trials:
    """The amount of a self-test."""

    self_test: Annotated[
        bool,
        typer.Option(
            "--self-test",
            help="Compare BASE with itself, as it is and slowed: rates of errors. Hours.",
        ),
    ] = False
    repetitions: Annotated[
        int, typer.Option(help="With --self-test: comparisons of equal code.")
    ] = 50
    trials: Annotated[
        int, typer.Option(help="With --self-test: comparisons per injected slowdown.")
    ] = 20


@dataclass(frozen=True, kw_only=True)
class Reports(RowOutput):
    """Places of a comparison's rows, verdicts, document and comment."""

    markdown: Annotated[
        Path | None, typer.Option(help="Also write a comment for a pull request here.")
    ] = None
    acknowledge: Annotated[
        str | None,
        typer.Option(help="Accept the changed counts for this reason: append to acknowledged.csv."),
    ] = None


@dataclass_options
def compare(
    compared: Compared,
    trials: Trials,
    output: Reports,
    base: Annotated[str, typer.Argument(help="A git revision; . is the working tree.")] = "HEAD",
    head: Annotated[
        str, typer.Argument(help="What may have become slower: a revision, or the working tree.")
    ] = ".",
) -> None:
    """Say whether HEAD is slower than BASE, or counts otherwise: both run side by side, now."""
    from bench.harness import verdicts
    from bench.harness.judgement import Design
    from hybrid_kv.config import ConfigError
    from hybrid_kv.errors import require
    from hybrid_kv.files import check_outputs, write_whole
    from hybrid_kv.measure.results import append_rows

    require("scipy")
    design = Design(pairs=compared.pairs, threshold=compared.threshold)
    if output.acknowledge is not None and not output.acknowledge.strip():
        raise ConfigError("--acknowledge needs a reason, such as 'one block more per request'")
    file = "operating_curve.csv" if trials.self_test else "compare.csv"
    rows = rows_file(file, output.results, output.record)
    check_outputs(output.out, output.markdown, output.junit_xml)
    if trials.self_test:
        return _self_test(base, rows, trials, design)
    comparison, outcomes = _measure(base, head, compared, design, output)
    try:
        append_rows(rows, list(verdicts.rows(comparison, outcomes)), commit=comparison.head.commit)
        if output.markdown is not None:
            write_whole(output.markdown, verdicts.markdown(comparison, outcomes))
    finally:
        document = verdicts.document(comparison, outcomes)
        show(document, output.as_json, output.out, _print, comparison, outcomes)
    if any(outcome.alarm for outcome in outcomes):
        raise typer.Exit(1)


def _self_test(base: str, rows: Path, trials: Trials, design: Design) -> None:
    """Compare a revision with itself and print the rates of errors."""
    from bench.harness import operating_curve
    from bench.harness.compare import ROOT

    require_at_least_one(repetitions=trials.repetitions, trials=trials.trials)
    summary = operating_curve.self_test(
        base,
        rows,
        root=ROOT,
        repetitions=trials.repetitions,
        injects=trials.trials,
        design=design,
    )
    operating_curve.print_rates(summary)


def _measure(
    base: str, head: str, compared: Compared, design: Design, output: Reports
) -> tuple[Comparison, list[Outcome]]:
    """Compare two revisions; acknowledge the changed counts, if a reason is given."""
    from bench.harness import verdicts
    from bench.harness.cells import TIERS
    from bench.harness.compare import ROOT, Selection
    from bench.harness.compare import compare as measure
    from hybrid_kv.check.ci import Verdict, published
    from hybrid_kv.measure.results import append_rows
    from hybrid_kv.measure.timing.fitness import MARK_SECONDS, examine

    known = ROOT / "results"  # what is acknowledged, and each benchmark's rate of false alarms
    seed = secrets.randbelow(2**31) if compared.seed is None else compared.seed
    tiers = TIERS if compared.tier is None else (compared.tier,)
    selection = Selection(not compared.every, compared.select or [""], tiers)
    with published("hybrid-kv compare", output.junit_xml) as keep:
        comparison = measure(base, head, selection, root=ROOT, design=design, seed=seed)
        comparison = replace(comparison, unfit=examine(MARK_SECONDS).unfit)
        outcomes = verdicts.outcomes_of(comparison, known)
        if output.acknowledge is not None:
            acknowledged = verdicts.acknowledging_rows(
                outcomes, output.acknowledge, comparison.base.commit
            )
            append_rows(known / "acknowledged.csv", acknowledged)
            outcomes = verdicts.outcomes_of(comparison, known)
        keep(
            [
                Verdict(
                    outcome.name,
                    "failed" if outcome.alarm else "ok",
                    verdicts.cells_of_table(outcome)[-1],
                )
                for outcome in outcomes
            ]
        )
    return comparison, outcomes


def _print(comparison: Comparison, outcomes: list[Outcome]) -> None:
    from bench.harness import verdicts

    verdicts.print_table(outcomes)
    print(verdicts.verdict_line(comparison, outcomes))

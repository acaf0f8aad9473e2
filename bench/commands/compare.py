"""`hybrid-kv compare`: two revisions, measured side by side."""

from __future__ import annotations

import secrets
from pathlib import Path
from typing import Annotated, Literal

import typer

from hybrid_kv.cli.options import (
    AsJson,
    JUnitFile,
    OutFile,
    Record,
    ResultsFolder,
    Select,
    require_at_least_one,
    rows_file,
    show,
)

Tier = Literal["count", "cpu", "gpu"]


def compare(
    base: Annotated[str, typer.Argument(help="A git revision; . is the working tree.")] = "HEAD",
    head: Annotated[
        str, typer.Argument(help="What may have become slower: a revision, or the working tree.")
    ] = ".",
    every: Annotated[
        bool, typer.Option("--all", help="All benchmarks, not only the quick ones: minutes.")
    ] = False,
    select: Select = None,
    tier: Annotated[
        Tier | None, typer.Option(help="Only counts, times of host code (cpu), or of a GPU.")
    ] = None,
    pairs: Annotated[
        int,
        typer.Option(
            help="Pairs of processes of the first look. More are measured where a time is inconclusive."
        ),
    ] = 6,
    threshold: Annotated[
        float, typer.Option(help="Call a time the same if its interval excludes this change.")
    ] = 0.05,
    seed: Annotated[
        int | None, typer.Option(min=0, help="Of orders and memory layouts; default: a fresh one.")
    ] = None,
    markdown: Annotated[
        Path | None, typer.Option(help="Also write a comment for a pull request here.")
    ] = None,
    acknowledge: Annotated[
        str | None,
        typer.Option(help="Accept the changed counts for this reason: append to acknowledged.csv."),
    ] = None,
    self_test: Annotated[
        bool,
        typer.Option(
            "--self-test",
            help="Compare BASE with itself, as it is and slowed: rates of errors. Hours.",
        ),
    ] = False,
    repetitions: Annotated[
        int, typer.Option(help="With --self-test: comparisons of equal code.")
    ] = 50,
    trials: Annotated[
        int, typer.Option(help="With --self-test: comparisons per injected slowdown.")
    ] = 20,
    as_json: AsJson = False,
    out: OutFile = None,
    junit_xml: JUnitFile = None,
    results: ResultsFolder = None,
    record: Record = False,
) -> None:
    """Say whether HEAD is slower than BASE, or counts otherwise: both run side by side, now, in a checkout."""
    from dataclasses import replace

    from bench.harness import operating_curve, verdicts
    from bench.harness.cells import TIERS
    from bench.harness.compare import ROOT
    from bench.harness.compare import compare as measure
    from bench.harness.judgement import Design
    from hybrid_kv.check.ci import Verdict, published
    from hybrid_kv.config import ConfigError
    from hybrid_kv.errors import require
    from hybrid_kv.files import check_outputs, write_whole
    from hybrid_kv.measure.results import append_rows
    from hybrid_kv.measure.timing.fitness import MARK_SECONDS, examine

    require("scipy")
    design = Design(pairs=pairs, threshold=threshold)
    known = ROOT / "results"  # what is acknowledged, and each benchmark's rate of false alarms
    if acknowledge is not None and not acknowledge.strip():
        raise ConfigError("--acknowledge needs a reason, such as 'one block more per request'")
    rows = rows_file("operating_curve.csv" if self_test else "compare.csv", results, record)
    check_outputs(out, markdown, junit_xml)
    if self_test:
        require_at_least_one(repetitions=repetitions, trials=trials)
        operating_curve.print_rates(
            operating_curve.self_test(
                base, rows, root=ROOT, repetitions=repetitions, injects=trials, design=design
            )
        )
        return
    seed = secrets.randbelow(2**31) if seed is None else seed
    tiers = TIERS if tier is None else (tier,)
    with published("hybrid-kv compare", junit_xml) as keep:
        comparison = measure(
            base,
            head,
            root=ROOT,
            quick=not every,
            select=select or [""],
            tiers=tiers,
            design=design,
            seed=seed,
        )
        comparison = replace(comparison, unfit=examine(MARK_SECONDS).unfit)
        outcomes = verdicts.outcomes_of(comparison, known)
        if acknowledge is not None:
            rows_of_it = verdicts.acknowledging_rows(outcomes, acknowledge, comparison.base.commit)
            append_rows(known / "acknowledged.csv", rows_of_it)
            outcomes = verdicts.outcomes_of(comparison, known)
        keep(
            [
                Verdict(one.name, "failed" if one.alarm else "ok", verdicts.cells_of_table(one)[-1])
                for one in outcomes
            ]
        )

    def table() -> None:
        verdicts.print_table(outcomes)
        print(verdicts.verdict_line(comparison, outcomes))

    try:
        append_rows(rows, list(verdicts.rows(comparison, outcomes)), commit=comparison.head.commit)
        if markdown is not None:
            write_whole(markdown, verdicts.markdown(comparison, outcomes))
    finally:
        show(verdicts.document(comparison, outcomes), as_json, out, table)
    if any(one.alarm for one in outcomes):
        raise typer.Exit(1)

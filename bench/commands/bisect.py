"""`hybrid-kv bisect`: which commit broke it."""

from __future__ import annotations

import hashlib
import json
import random
import sys
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from hybrid_kv.cli.options import (
    AsJson,
    OutFile,
    Record,
    ResultsFolder,
    require_at_least_one,
    rows_file,
    show,
)

if TYPE_CHECKING:
    from bench.bisect.question import Outcome, Question

# Options of `hybrid-kv accuracy` that the bisect sets itself, and those without which no samples
# are written.
TAKEN = (
    "--seed",
    "--samples",
    "--results",
    "--record",
    "--against",
    "--check-floor",
    "--json",
    "--out",
    "--help",
)


def bisect(
    good: Annotated[str, typer.Argument(help="A git revision at which it was right, or fast.")],
    bad: Annotated[str, typer.Argument(help="A later one at which it is not.")] = "HEAD",
    options: Annotated[
        list[str] | None,
        typer.Argument(metavar="-- OPTIONS", help="With --accuracy: of hybrid-kv accuracy."),
    ] = None,
    replay: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE", help="Failing scenario to bisect, a file written by the guard."
        ),
    ] = None,
    benchmark: Annotated[
        str | None,
        typer.Option(metavar="NAME", help="Benchmark that became slower, or whose counts changed."),
    ] = None,
    accuracy: Annotated[bool, typer.Option("--accuracy", help="Bisect lost answers.")] = False,
    seed: Annotated[
        int, typer.Option(min=0, help="Seed of the questions, or of the order of measurements.")
    ] = 0,
    cache: Annotated[
        Path, typer.Option(metavar="FOLDER", help="Cache folder; rerun the command to resume.")
    ] = Path("out/bisect"),
    self_test: Annotated[
        bool,
        typer.Option(
            "--self-test",
            help="Measure error rates on histories with a known first bad commit. Hours.",
        ),
    ] = False,
    repetitions: Annotated[
        int, typer.Option(help="With --self-test: random histories of each kind.")
    ] = 100,
    trials: Annotated[
        int, typer.Option(help="With --self-test: histories of each kind made in git.")
    ] = 5,
    as_json: AsJson = False,
    out: OutFile = None,
    results: ResultsFolder = None,
    record: Record = False,
) -> None:
    """Find the commit that broke something or made it slower, by halving the commits between GOOD and BAD."""
    from bench.bisect import report
    from bench.bisect.find import ENDS, Memory, find
    from bench.bisect.history import describe, read_history
    from bench.harness.compare import ROOT
    from bench.harness.versions import find_revision
    from hybrid_kv.config import ConfigError
    from hybrid_kv.errors import require
    from hybrid_kv.files import check_outputs, read_text

    require("scipy")
    if self_test:
        from bench.bisect import self_test as tests

        require_at_least_one(repetitions=repetitions)
        rows = rows_file("bisect.csv", results, record)
        tests.print_rates(
            tests.self_test(
                ROOT, find_revision(ROOT, good, by="bisect").commit, rows, repetitions, trials
            )
        )
        return
    if [replay is not None, benchmark is not None, accuracy].count(True) != 1:
        raise ConfigError(
            "name what failed with one of: --replay FILE, --benchmark NAME, --accuracy"
        )
    if options and not accuracy:
        raise ConfigError(
            f"{options[0]!r} is a third revision; options after -- are for --accuracy"
        )
    if taken := [word for word in options or () if word.split("=")[0] in TAKEN]:
        raise ConfigError(
            f"{taken[0]} after --: bisect sets it itself or does not use it; leave it out"
        )
    check_outputs(out, cache / "any.json")
    text = read_text(replay) if replay is not None else ""
    with tempfile.TemporaryDirectory(prefix="hybrid-kv-bisect-") as trees:
        question = _question(ROOT, Path(trees), replay, benchmark, options, seed)
        history = read_history(ROOT, good, bad)
        key = [history.good.commit, history.bad.commit, str(options), seed, text, benchmark]
        state = cache / f"{hashlib.sha256(json.dumps(key).encode()).hexdigest()[:12]}.json"
        memory = Memory(state)
        if num_known := len(memory.outcomes.keys() - {ENDS}):
            print(f"resuming: {num_known} commits are known", file=sys.stderr)

        def tell(key: str, outcome: Outcome, seconds: float) -> None:
            name = describe(ROOT, key).line if key in history.commits else key
            print(
                f"{name}: {outcome.answer}, {outcome.detail} ({seconds:.1f} s)",
                file=sys.stderr,
                flush=True,
            )

        finding = find(history.good.commit, history.commits, question, memory, tell)
    state.unlink(missing_ok=True)
    show(
        report.document(history, finding),
        as_json,
        out,
        lambda: report.print_finding(history, finding),
    )
    if finding.verdict != "found":
        raise typer.Exit(1)


def _question(
    root: Path,
    folder: Path,
    replay: Path | None,
    benchmark: str | None,
    options: list[str] | None,
    seed: int,
) -> Question:
    """The test of a commit, whose files go to `folder`; checks the user's input first."""
    from bench.bisect.history import Trees, fill_package

    if replay is not None:
        from bench.bisect.tokens import Tokens, played_by
        from hybrid_kv.check.guard.replay import from_json
        from hybrid_kv.files import read_text

        from_json(read_text(replay), str(replay))
        return Tokens(played_by(Trees(folder, fill_package(root)), replay), replay.name)
    if benchmark is not None:
        from bench.bisect.cells import Runs, fill_benchmarks, find_cell
        from bench.bisect.counts import Counts
        from bench.bisect.times import Times

        cell = find_cell(benchmark)
        runs = Runs(Trees(folder, fill_benchmarks(root)), cell, random.Random(seed))
        return Counts(runs.count) if cell.tier == "count" else Times(runs.measure, runs.profile)
    from bench.bisect.answers import Answers, answers_of

    return Answers(answers_of(Trees(folder, fill_package(root)), options or ()), seed)

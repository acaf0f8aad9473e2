"""`hybrid-kv bisect`: from red to culprit."""

from __future__ import annotations

import random
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from hybrid_kv.cli.options import AsJson, OutFile, Record, ResultsFolder, require_at_least_one, rows_file, show

if TYPE_CHECKING:
    from hybrid_kv.bisect.kinds import Question

# Of `hybrid-kv accuracy`, those that the bisect gives itself, and those that would let no samples be written.
TAKEN = ("--seed", "--samples", "--results", "--record", "--against", "--check-floor", "--json", "--out", "--help")


def bisect(
    good: Annotated[str, typer.Argument(help="A git revision at which it was right, or fast.")],
    bad: Annotated[str, typer.Argument(help="A later one at which it is not.")] = "HEAD",
    options: Annotated[
        list[str] | None, typer.Argument(metavar="-- OPTIONS", help="With --accuracy: of hybrid-kv accuracy.")
    ] = None,
    replay: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Who broke this scenario, which the guard wrote?")
    ] = None,
    benchmark: Annotated[
        str | None,
        typer.Option("--benchmark", metavar="NAME", help="Who made this benchmark slower, or changed its counts?"),
    ] = None,
    accuracy: Annotated[bool, typer.Option("--accuracy", help="Who lost answers?")] = False,
    seed: Annotated[int, typer.Option(min=0, help="Of the order of measurements, or of the questions.")] = 0,
    cache: Annotated[
        Path, typer.Option(metavar="FOLDER", help="For what was answered so far: the same command again goes on.")
    ] = Path("out/bisect"),
    self_test: Annotated[
        bool, typer.Option("--self-test", help="Bisect histories with a known culprit: rates of errors. Hours.")
    ] = False,
    repetitions: Annotated[int, typer.Option(help="With --self-test: histories of each kind that are drawn.")] = 100,
    trials: Annotated[int, typer.Option(help="With --self-test: histories of each kind that are made in git.")] = 5,
    as_json: AsJson = False,
    out: OutFile = None,
    results: ResultsFolder = None,
    record: Record = False,
) -> None:
    """Name the commit that broke something, or made it slower: halves the commits between GOOD and BAD."""
    from bench.harness.compare import ROOT
    from bench.harness.versions import find_revision
    from hybrid_kv.bisect.history import describe, read_history
    from hybrid_kv.bisect.memory import ENDS, Memory, Outcome, workplace
    from hybrid_kv.bisect.run import find
    from hybrid_kv.bisect.told import document, print_finding
    from hybrid_kv.config import ConfigError
    from hybrid_kv.errors import require
    from hybrid_kv.files import check_outputs

    require("scipy")
    if self_test:
        from hybrid_kv.bisect import self_test as tests

        require_at_least_one(repetitions=repetitions)
        rows = rows_file("bisect.csv", results, record)
        tests.print_rates(
            tests.self_test(ROOT, find_revision(ROOT, good, by="bisect").commit, rows, repetitions, trials)
        )
        return
    if [replay is not None, benchmark is not None, accuracy].count(True) != 1:
        raise ConfigError("say what went red, one of: --replay FILE, --benchmark NAME, --accuracy")
    if options and not accuracy:
        raise ConfigError(f"{options[0]!r} is a third revision; options after -- are for --accuracy")
    if taken := [word for word in options or () if word.split("=")[0] in TAKEN]:
        raise ConfigError(f"{taken[0]} after --: the bisect sets it itself, or has no use for it; leave it out")
    question = _question(ROOT, replay, benchmark, options, seed)
    check_outputs(out, cache / "any" / "state.json")
    history = read_history(ROOT, good, bad)
    asked = {
        "good": history.good.commit, "bad": history.bad.commit, "accuracy": str(options), "seed": str(seed),
        "replay": replay.read_text() if replay is not None else "", "benchmark": benchmark or "",
    }  # fmt: skip

    def tell(key: str, outcome: Outcome, seconds: float) -> None:
        name = describe(ROOT, key).line if key in history.commits else key
        print(f"{name}: {outcome.answer}, {outcome.detail} ({seconds:.1f} s)", file=sys.stderr, flush=True)

    with workplace(cache, asked) as place:
        memory = Memory(place / "state.json")
        if num_known := len(memory.outcomes.keys() - {ENDS}):
            print(f"goes on: {num_known} commits have answered before", file=sys.stderr)
        finding = find(history.good.commit, history.commits, question(place / "trees"), memory, tell)
    show(document(history, finding), as_json, out, lambda: print_finding(history, finding))
    if finding.verdict != "found":
        raise typer.Exit(1)


def _question(
    root: Path, replay: Path | None, benchmark: str | None, options: list[str] | None, seed: int
) -> Callable[[Path], Question]:
    """What is asked, given a folder for the commits' files; what the user gave is looked at first."""
    from hybrid_kv.bisect.history import Trees, fill_package

    if replay is not None:
        from hybrid_kv.bisect.replay import Replay, played_by
        from hybrid_kv.guard.replay import read_scenario

        read_scenario(replay)
        return lambda trees: Replay(played_by(Trees(trees, fill_package(root)), replay), replay.name)
    if benchmark is not None:
        from hybrid_kv.bisect.cells import Runs, fill_benchmarks, find_cell
        from hybrid_kv.bisect.counts import Counts
        from hybrid_kv.bisect.times import Times

        cell = find_cell(benchmark)

        def timed(trees: Path) -> Question:
            runs = Runs(Trees(trees, fill_benchmarks(root)), cell, random.Random(seed))
            return Counts(runs.count) if cell.tier == "count" else Times(runs.measure, runs.profile)

        return timed
    from hybrid_kv.bisect.answers import Answers, answers_of

    return lambda trees: Answers(answers_of(Trees(trees, fill_package(root)), options or ()), seed)

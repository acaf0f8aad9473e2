"""`hybrid-kv bisect`: which commit broke it."""

from __future__ import annotations

import hashlib
import json
import random
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from hybrid_kv.cli.options import (
    AsJson,
    OutFile,
    Record,
    ResultsFolder,
    dataclass_options,
    require_at_least_one,
    rows_file,
    show,
)

if TYPE_CHECKING:
    from bench.bisect.find import Finding
    from bench.bisect.history import History
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


@dataclass(frozen=True, kw_only=True)
class Symptom:
    """The failure whose commit is searched for."""

    replay: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE", help="Failing scenario to bisect, a file written by the guard."
        ),
    ] = None
    benchmark: Annotated[
        str | None,
        typer.Option(metavar="NAME", help="Benchmark that became slower, or whose counts changed."),
    ] = None
    accuracy: Annotated[bool, typer.Option("--accuracy", help="Bisect lost answers.")] = False
    seed: Annotated[
        int, typer.Option(min=0, help="Seed of the questions, or of the order of measurements.")
    ] = 0


@dataclass(frozen=True, kw_only=True)
class Trials:
    """The amount of a self-test."""

    self_test: Annotated[
        bool,
        typer.Option(
            "--self-test",
            help="Measure error rates on histories with a known first bad commit. Hours.",
        ),
    ] = False
    repetitions: Annotated[
        int, typer.Option(help="With --self-test: random histories of each kind.")
    ] = 100
    trials: Annotated[
        int, typer.Option(help="With --self-test: histories of each kind made in git.")
    ] = 5


@dataclass(frozen=True, kw_only=True)
class Places:
    """Places of a search's outcomes, document and rows."""

    cache: Annotated[
        Path, typer.Option(metavar="FOLDER", help="Cache folder; rerun the command to resume.")
    ] = Path("out/bisect")
    as_json: AsJson = False
    out: OutFile = None
    results: ResultsFolder = None
    record: Record = False


@dataclass_options
def bisect(
    symptom: Symptom,
    trials: Trials,
    places: Places,
    good: Annotated[str, typer.Argument(help="A git revision at which it was right, or fast.")],
    bad: Annotated[str, typer.Argument(help="A later one at which it is not.")] = "HEAD",
    options: Annotated[
        list[str] | None,
        typer.Argument(metavar="-- OPTIONS", help="With --accuracy: of hybrid-kv accuracy."),
    ] = None,
) -> None:
    """Find the commit that broke something or made it slower, between GOOD and BAD."""
    from bench.bisect import report
    from bench.bisect.history import read_history
    from bench.harness.compare import ROOT
    from hybrid_kv.errors import require
    from hybrid_kv.files import check_outputs

    require("scipy")
    if trials.self_test:
        return _self_test(good, trials, places)
    _check(symptom, options or ())
    check_outputs(places.out, places.cache / "any.json")
    with tempfile.TemporaryDirectory(prefix="hybrid-kv-bisect-") as trees:
        question = _question(ROOT, Path(trees), symptom, options or ())
        history = read_history(ROOT, good, bad)
        finding = _find(history, question, _state(history, symptom, options, places.cache))
    document = report.document(history, finding)
    show(document, places.as_json, places.out, report.print_finding, history, finding)
    if finding.verdict != "found":
        raise typer.Exit(1)


def _self_test(good: str, trials: Trials, places: Places) -> None:
    """Bisect histories on top of a revision and print the rates of errors."""
    from bench.bisect import self_test as tests
    from bench.harness.compare import ROOT
    from bench.harness.versions import find_revision

    require_at_least_one(repetitions=trials.repetitions)
    rows = rows_file("bisect.csv", places.results, places.record)
    commit = find_revision(ROOT, good, by="bisect").commit
    tests.print_rates(tests.self_test(ROOT, commit, rows, trials.repetitions, trials.trials))


def _check(symptom: Symptom, options: Sequence[str]) -> None:
    """Raise `ConfigError` unless one symptom is named, with options that it takes."""
    from hybrid_kv.config import ConfigError

    named = [symptom.replay is not None, symptom.benchmark is not None, symptom.accuracy]
    if named.count(True) != 1:
        raise ConfigError(
            "name what failed with one of: --replay FILE, --benchmark NAME, --accuracy"
        )
    if options and not symptom.accuracy:
        raise ConfigError(
            f"{options[0]!r} is a third revision; options after -- are for --accuracy"
        )
    if taken := [word for word in options if word.split("=")[0] in TAKEN]:
        raise ConfigError(
            f"{taken[0]} after --: bisect sets it itself or does not use it; leave it out"
        )


def _state(history: History, symptom: Symptom, options: list[str] | None, folder: Path) -> Path:
    """Return the file of a search's outcomes: another one for each search."""
    from hybrid_kv.files import read_text

    text = read_text(symptom.replay) if symptom.replay is not None else ""
    ends = [history.good.commit, history.bad.commit]
    key = [*ends, str(options), symptom.seed, text, symptom.benchmark]
    return folder / f"{hashlib.sha256(json.dumps(key).encode()).hexdigest()[:12]}.json"


def _find(history: History, question: Question, state: Path) -> Finding:
    """Search a history, from the outcomes that a file has; they are gone with the answer."""
    from bench.bisect.find import ENDS, Memory, find
    from bench.bisect.history import describe

    memory = Memory(state)
    if num_known := len(memory.outcomes.keys() - {ENDS}):
        print(f"resuming: {num_known} commits are known", file=sys.stderr)

    def tell(key: str, outcome: Outcome, seconds: float) -> None:
        name = describe(history.root, key).line if key in history.commits else key
        print(
            f"{name}: {outcome.answer}, {outcome.detail} ({seconds:.1f} s)",
            file=sys.stderr,
            flush=True,
        )

    finding = find(history.good.commit, history.commits, question, memory, tell)
    state.unlink(missing_ok=True)
    return finding


def _question(root: Path, folder: Path, symptom: Symptom, options: Sequence[str]) -> Question:
    """Return the test of a commit, whose files go to `folder`; check the user's input first."""
    from bench.bisect.history import Trees, fill_package

    replay = symptom.replay
    if replay is not None:
        from bench.bisect.tokens import Tokens, played_by
        from hybrid_kv.check.guard.replay import from_json
        from hybrid_kv.files import read_text

        from_json(read_text(replay), str(replay))
        return Tokens(played_by(Trees(folder, fill_package(root)), replay), replay.name)
    if symptom.benchmark is not None:
        from bench.bisect.cells import Runs, fill_benchmarks, find_cell
        from bench.bisect.counts import Counts
        from bench.bisect.times import Times

        cell = find_cell(symptom.benchmark)
        trees = Trees(folder, fill_benchmarks(root))
        runs = Runs(trees, cell, random.Random(symptom.seed))
        return Counts(runs.count) if cell.tier == "count" else Times(runs.measure, runs.profile)
    from bench.bisect.answers import Answers, answers_of

    return Answers(answers_of(Trees(folder, fill_package(root)), options), symptom.seed)

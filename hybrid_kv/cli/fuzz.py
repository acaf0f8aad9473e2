"""`hybrid-kv fuzz`: random scenarios of the exact model, for hours."""

from __future__ import annotations

import secrets
import sys
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from hybrid_kv.cli.options import (
    MAX_TRAFFIC_SEED,
    AsJson,
    Jobs,
    OutFile,
    Record,
    Repro,
    ResultsFolder,
    dataclass_options,
    rows_file,
    show,
)

if TYPE_CHECKING:
    from hybrid_kv.measure.study.swarm import Tally
    from hybrid_kv.measure.study.work import Pool

MOST_HOURS = 24 * 366


@dataclass(frozen=True, kw_only=True)
class FuzzOptions:
    """The time, the seeds and the places of a swarm.

    Attributes:
        hours: time to play.
        seed: the first seed; None: a fresh one.
        jobs: processes; None: one per core, at most 8.
        ray: address of a cluster, instead of processes.
        repro: folder for failing cases.
        as_json: print JSON instead of a table.
        out: file that also gets the JSON.
        results: folder whose CSV gets the rows.
        record: append the rows to the project's own.
    """

    hours: Annotated[
        float, typer.Option(metavar="HOURS", help="Play for so long, or until Ctrl-C.")
    ] = 1.0
    seed: Annotated[
        int | None,
        typer.Option(min=0, max=MAX_TRAFFIC_SEED, help="First seed; default: a fresh one."),
    ] = None
    jobs: Jobs = None
    ray: Annotated[
        str | None,
        typer.Option(metavar="ADDRESS|auto", help="On this cluster, not on --jobs processes."),
    ] = None
    repro: Repro = Path("repro")
    as_json: AsJson = False
    out: OutFile = None
    results: ResultsFolder = None
    record: Record = False


@dataclass_options
def fuzz(options: FuzzOptions) -> None:
    """Play random scenarios of the exact model for hours, and reduce each that breaks a rule.

    Exit code 0: no rule was broken. 1: one was. 2: it could not run. 3: nothing was played.
    """
    raise typer.Exit(play_swarm("fuzz --hours", options))


def play_swarm(spelling: str, options: FuzzOptions) -> int:
    """Play random scenarios until the time is over or Ctrl-C; return the exit code.

    Args:
        spelling: the command and its option for hours, as messages name them.

    Raises:
        HybridKVError: an invalid option, or no scenario could be played.
    """
    from hybrid_kv.check.guard.traffic import SEEDS_PER_BATCH
    from hybrid_kv.check.progress import progress_bar
    from hybrid_kv.config import ConfigError
    from hybrid_kv.errors import VOID, require
    from hybrid_kv.files import check_outputs
    from hybrid_kv.measure.results import append_rows
    from hybrid_kv.measure.study.swarm import SEEDS_FILE, Swarm

    csv = rows_file("swarm.csv", options.results, options.record)
    flag = spelling.split()[-1]
    hours = options.hours
    if not 0 < hours <= MOST_HOURS:
        raise ConfigError(f"{flag} {hours:g} must be more than 0 hours, and {MOST_HOURS:,} at most")
    if options.ray is not None:
        require("ray")
    seeds_file = options.repro / SEEDS_FILE
    check_outputs(options.out, seeds_file)
    first = options.seed
    if first is None:
        first = secrets.randbelow(2**31) * SEEDS_PER_BATCH
    print(f"the same seeds again: hybrid-kv {spelling} {hours:g} --seed {first}", file=sys.stderr)
    seconds = 3600 * hours
    with progress_bar(
        total=seconds,
        desc="swarm",
        bar_format="{desc}: {percentage:3.0f}%|{bar}| {elapsed}{postfix}",
    ) as bar:

        def report(tally: Tally) -> None:
            counts = f"{tally.requests:,} requests, {len(tally.findings)} rules broken"
            bar.set_postfix_str(counts, refresh=False)
            bar.update(min(bar.format_dict["elapsed"], seconds) - bar.n)

        def keep(tally: Tally, is_over: bool) -> None:
            append_rows(csv, tally.rows(is_over))

        tally = Swarm(first, seconds, options.repro, report, keep).run(_pool(options))
    document = _document(tally, first)
    show(document, options.as_json, options.out, _print, tally, first, seeds_file)
    if tally.findings:
        return 1
    return 0 if tally.seeds else VOID


def _pool(options: FuzzOptions) -> Pool:
    """Return the workers that the options choose: a cluster, processes, or this process."""
    from hybrid_kv.check.guard.workers import num_workers
    from hybrid_kv.measure.study.swarm import here, in_processes
    from hybrid_kv.measure.study.work import over_ray

    if options.ray is not None:
        return over_ray(options.ray, retries=2)
    workers = num_workers(options.jobs)
    return here if workers == 1 else in_processes(workers)


def _document(tally: Tally, first: int) -> dict[str, Any]:
    findings = [
        {**asdict(finding), "file": str(finding.file)} for finding in tally.findings.values()
    ]
    return {
        "passed": not findings,
        "first_seed": first,
        "seeds": tally.seeds,
        "requests": tally.requests,
        "requests_per_cpu_second": tally.requests_per_cpu_second,
        "patterns": tally.num_patterns,
        "settings": tally.num_settings,
        "lost_tasks": tally.lost,
        "findings": findings,
    }


def _print(tally: Tally, first: int, seeds: Path) -> None:
    from hybrid_kv.check.guard.patterns import REQUIRED
    from hybrid_kv.check.guard.traffic import required_combinations

    for finding in tally.findings.values():
        count = f"{finding.seeds:,} scenarios, the first is {finding.first_seed}"
        print(f"{finding.rule}: {count}\n{finding.story}\n")
    print(f"{tally.seeds:,} scenarios from {first} on, {tally.requests:,} requests, ", end="")
    print(f"{tally.requests_per_cpu_second:.1f} per CPU second")
    num_combinations = len(required_combinations())
    print(f"{tally.num_patterns} of {len(REQUIRED)} request patterns, ", end="")
    print(f"{tally.num_settings:,} of {num_combinations:,} pairs and triples of settings")
    if tally.lost:
        print(f"{tally.lost:,} tasks were lost with their workers")
    failed = sum(finding.seeds for finding in tally.findings.values())
    place = f": {seeds}" if failed else ""
    print(f"{failed:,} scenarios failed, {len(tally.findings)} rules broken{place}")

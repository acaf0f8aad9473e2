"""`hybrid-kv guard --swarm`: seeds without end."""

from __future__ import annotations

import secrets
import sys
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hybrid_kv.cli.options import show

if TYPE_CHECKING:
    from hybrid_kv.measure.study.swarm import Tally

MOST_HOURS = 24 * 366


def guard_swarm(
    hours: float,
    seed: int | None,
    jobs: int | None,
    ray: str | None,
    repro: Path,
    as_json: bool,
    out: Path | None,
    csv: Path,
) -> int:
    """Play random scenarios until the time is over or Ctrl-C, and say what failed; returns the exit code.

    Raises:
        HybridKVError: an invalid option, or no scenario could be played.
    """
    from hybrid_kv.check.guard.traffic import SEEDS_PER_BATCH
    from hybrid_kv.check.guard.workers import num_workers
    from hybrid_kv.check.progress import progress_bar
    from hybrid_kv.config import ConfigError
    from hybrid_kv.errors import VOID, require
    from hybrid_kv.files import check_outputs
    from hybrid_kv.measure.results import append_rows
    from hybrid_kv.measure.study.swarm import SEEDS_FILE, Swarm, here, in_processes
    from hybrid_kv.measure.study.work import over_ray

    if not 0 < hours <= MOST_HOURS:
        raise ConfigError(f"--swarm {hours:g} must be more than 0 hours, and {MOST_HOURS:,} at most")
    if ray is not None:
        require("ray")
    check_outputs(out, repro / SEEDS_FILE)
    first = secrets.randbelow(2**31) * SEEDS_PER_BATCH if seed is None else seed
    print(f"the same seeds again: hybrid-kv guard --swarm {hours:g} --seed {first}", file=sys.stderr)
    workers = num_workers(jobs)
    pool = over_ray(ray, retries=2) if ray is not None else here if workers == 1 else in_processes(workers)
    seconds = 3600 * hours
    with progress_bar(
        total=seconds,
        desc="swarm",
        bar_format="{desc}: {percentage:3.0f}%|{bar}| {elapsed}{postfix}",
    ) as bar:

        def report(tally: Tally) -> None:
            bar.set_postfix_str(f"{tally.requests:,} requests, {len(tally.findings)} rules broken", refresh=False)
            bar.update(min(bar.format_dict["elapsed"], seconds) - bar.n)

        def keep(tally: Tally, is_over: bool) -> None:
            append_rows(csv, tally.rows(is_over))

        tally = Swarm(first, seconds, repro, report, keep).run(pool)
    show(_document(tally, first), as_json, out, lambda: _print(tally, first, repro / SEEDS_FILE))
    return 1 if tally.findings else 0 if tally.seeds else VOID


def _document(tally: Tally, first: int) -> dict[str, Any]:
    findings = [{**asdict(one), "file": str(one.file)} for one in tally.findings.values()]
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

    for one in tally.findings.values():
        print(f"{one.rule}: {one.seeds:,} scenarios, the first is {one.first_seed}\n{one.story}\n")
    print(f"{tally.seeds:,} scenarios from {first} on, {tally.requests:,} requests, ", end="")
    print(f"{tally.requests_per_cpu_second:.1f} per CPU second")
    print(f"{tally.num_patterns} of {len(REQUIRED)} request patterns, ", end="")
    print(f"{tally.num_settings:,} of {len(required_combinations()):,} pairs and triples of settings")
    if tally.lost:
        print(f"{tally.lost:,} tasks were lost with their workers")
    failed = sum(one.seeds for one in tally.findings.values())
    print(f"{failed:,} scenarios failed, {len(tally.findings)} rules broken" + (f": {seeds}" if failed else ""))

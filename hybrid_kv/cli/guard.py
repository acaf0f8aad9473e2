"""`hybrid-kv guard`: is the cache right and fast?"""

from __future__ import annotations

import secrets
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from hybrid_kv.cli.options import AsJson, OutFile, Record, ResultsFolder, Select, rows_file, show

if TYPE_CHECKING:
    from hybrid_kv.guard.registry import Size


def guard(
    quick: Annotated[bool, typer.Option("--quick", help="A minute instead of five.")] = False,
    long: Annotated[
        bool, typer.Option("--long", help="100,000 requests, of a fresh seed unless one is given.")
    ] = False,
    seed: Annotated[int | None, typer.Option(min=0, help="Another seed is other traffic; default: 0.")] = None,
    select: Select = None,
    only: Annotated[
        list[str] | None,
        typer.Option(
            metavar="SECTION|FACTOR=LEVEL",
            help="As -k, or only engines with this setting, as mode=align; may be repeated.",
        ),
    ] = None,
    fail_fast: Annotated[bool, typer.Option("--fail-fast", help="Stop at the first section that fails.")] = False,
    jobs: Annotated[
        int | None, typer.Option(min=1, help="Processes at a time; default: one per core, at most 8.")
    ] = None,
    replay: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Play one case that failed, and nothing else.")
    ] = None,
    repro: Annotated[
        Path, typer.Option(metavar="FOLDER", help="Where a case that fails is written, as small as it gets.")
    ] = Path("repro"),
    swarm: Annotated[
        float | None,
        typer.Option(metavar="HOURS", help="Random scenarios of the exact model, for so long, or to Ctrl-C."),
    ] = None,
    ray: Annotated[
        str | None, typer.Option(metavar="ADDRESS|auto", help="With --swarm: on this cluster, not on --jobs processes.")
    ] = None,
    target: Annotated[str | None, typer.Option(metavar="ENGINE", help="Guard another engine, from outside.")] = None,
    model: Annotated[
        str, typer.Option(metavar="FAMILY|FOLDER|HUB", help="What the target runs; a family's weights are made.")
    ] = "qwen3_5_text",
    against: Annotated[
        str | None, typer.Option(metavar="ENGINE", help="Whose answers are right, instead of transformers' float64.")
    ] = None,
    matrix: Annotated[
        list[str] | None,
        typer.Option(metavar="FACTOR=LEVEL,…", help="Settings: all combinations in a text; may be repeated."),
    ] = None,
    device: Annotated[Literal["cpu", "cuda"], typer.Option(help="What the guard model runs on.")] = "cpu",
    as_json: AsJson = False,
    out: OutFile = None,
    results: ResultsFolder = None,
    record: Record = False,
) -> None:
    """Say whether the cache is right and fast: engine against oracles, accuracy, cost of block ids. Needs no GPU."""
    import torch

    from hybrid_kv.cli.swarm import guard_swarm
    from hybrid_kv.cli.target import guard_target, is_case, replay_case
    from hybrid_kv.config import ConfigError
    from hybrid_kv.files import check_outputs
    from hybrid_kv.guard.cases import replay as replay_own
    from hybrid_kv.guard.report import document, print_results, result_rows
    from hybrid_kv.guard.run import amounts, run_guard
    from hybrid_kv.results import append_rows

    if replay is not None:
        if quick or long or select or only or target or swarm is not None:
            raise ConfigError(
                f"--replay {replay} plays one case; leave --quick, --long, --swarm, --target, -k, --only out"
            )
        raise typer.Exit(replay_case(replay) if is_case(replay) else replay_own(replay))
    select = [*(select or ()), *(one for one in only or () if "=" not in one)]
    levels = dict(one.split("=", 1) for one in only or () if "=" in one)
    if swarm is not None:
        if quick or long or select or levels or fail_fast or target or against or matrix or device != "cpu":
            raise ConfigError(
                f"--swarm {swarm:g} is a run of its own; leave --quick, --long, -k, --only, --fail-fast, --device, "
                "--target, --against, --matrix out"
            )
        raise typer.Exit(
            guard_swarm(swarm, seed, jobs, ray, repro, as_json, out, rows_file("swarm.csv", results, record))
        )
    if ray is not None:
        raise ConfigError(f"--ray {ray} is for --swarm")
    if quick and long:
        raise ConfigError("--quick and --long exclude each other; give one of them")
    size: Size = "quick" if quick else "long" if long else "full"
    if target is not None:
        if levels or record or results or device != "cpu":
            raise ConfigError(f"--target {target}: leave --only FACTOR=LEVEL, --record, --results and --device out")
        check_outputs(out, repro / "case.json")
        raise typer.Exit(
            guard_target(target, model, against, matrix, select, seed or 0, size, jobs, repro, as_json, out)
        )
    if against or matrix:
        raise ConfigError("--against and --matrix are about another engine; name it with --target")
    if record and (select or levels):
        raise ConfigError("--record keeps the verdict of the whole guard; leave -k and --only out")
    if device == "cuda" and not torch.cuda.is_available():
        raise ConfigError("--device cuda: torch sees no GPU here; use cpu")
    rows = rows_file("guard.csv", results, record)
    check_outputs(out, repro / "scenario.json")
    if seed is None:
        seed = secrets.randbelow(2**31) if long else 0
    if long:
        print(f"the same run again: hybrid-kv guard --long --seed {seed}", file=sys.stderr)
    checks = run_guard(
        amounts(size),
        seed,
        device=device,
        select=select,
        only=levels,
        repro=repro,
        fail_fast=fail_fast,
        jobs=jobs,
    )
    try:
        append_rows(rows, result_rows(checks))
    finally:
        show(document(checks, seed), as_json, out, lambda: print_results(checks))
    if not all(check.passed for check in checks):
        raise typer.Exit(1)

"""`hybrid-kv guard`: is the cache right and fast?"""

from __future__ import annotations

import secrets
import sys
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from hybrid_kv.cli.options import (
    AsJson,
    JUnitFile,
    OutFile,
    Record,
    ResultsFolder,
    Select,
    given_options,
    rows_file,
    show,
)

if TYPE_CHECKING:
    from hybrid_kv.check.guard.registry import CheckResult, Size

MAX_TRAFFIC_SEED = 2**42 - 1  # times a million, plus a request's number, it has 64 bits
_TARGET = ("model", "python", "against", "matrix", "weights", "exact", "watch", "publish")
_SHARED = {"seed", "jobs", "repro", "as_json", "out"}
# By the option that chooses another kind of run, the options that go with it.
_KINDS = {
    "replay": {"replay", "python"},
    "swarm": {"swarm", "ray", "results", "record", *_SHARED},
    "target": {"target", *_TARGET, "junit_xml", "verbose", "quick", "long", "select", "only", *_SHARED},
}
# The settings of an engine that are factors of the exact traffic.
_FACTORS = {
    "mamba_cache_mode": "mode",
    "state_scheme": "scheme",
    "num_speculative_tokens": "K",
    "attention_backend": "backend",
}


def guard(
    context: typer.Context,
    quick: Annotated[bool, typer.Option("--quick", help="A minute instead of four.")] = False,
    long: Annotated[
        bool, typer.Option("--long", help="100,000 requests, of a fresh seed unless one is given.")
    ] = False,
    seed: Annotated[int | None, typer.Option(min=0, max=MAX_TRAFFIC_SEED, help="Of the traffic; default: 0.")] = None,
    select: Select = None,
    only: Annotated[
        list[str] | None,
        typer.Option(
            metavar="SECTION|SETTING=LEVEL",
            help="As -k, or only engines with this setting, such as mamba_cache_mode=align; may be repeated.",
        ),
    ] = None,
    fail_fast: Annotated[bool, typer.Option("--fail-fast", help="Stop at the first section that fails.")] = False,
    jobs: Annotated[int | None, typer.Option(min=1, help="Processes; default: one per core, at most 8.")] = None,
    replay: Annotated[Path | None, typer.Option(metavar="FILE", help="Replay one failing case.")] = None,
    repro: Annotated[
        Path, typer.Option(metavar="FOLDER", help="Folder for failing cases, reduced as far as possible.")
    ] = Path("repro"),
    swarm: Annotated[
        float | None,
        typer.Option(metavar="HOURS", help="Random scenarios of the exact model, for so long or until Ctrl-C."),
    ] = None,
    ray: Annotated[
        str | None, typer.Option(metavar="ADDRESS|auto", help="With --swarm: on this cluster, not on --jobs processes.")
    ] = None,
    target: Annotated[str | None, typer.Option(metavar="ENGINE", help="Guard another engine, from outside.")] = None,
    model: Annotated[
        str, typer.Option(metavar="FAMILY|FOLDER|HUB", help="Model of the target; a family gets random weights.")
    ] = "qwen3_5_text",
    python: Annotated[Path | None, typer.Option(help="The target's Python; default: that in .venv-TARGET.")] = None,
    against: Annotated[
        str | None, typer.Option(metavar="PYTHON|ENGINE", help="Its old build: report what is new; or a reference.")
    ] = None,
    matrix: Annotated[
        list[str] | None,
        typer.Option(metavar="FACTOR=LEVEL,…", help="Settings: all combinations in a text; may be repeated."),
    ] = None,
    weights: Annotated[
        Literal["exact", "random"] | None,
        typer.Option(help="Of the target's model: exact integers, random numbers; default: both (--matrix: random)."),
    ] = None,
    exact: Annotated[bool, typer.Option("--exact", help="As --weights exact.")] = False,
    watch: Annotated[
        list[Path] | None,
        typer.Option(metavar="PATH", help="Run again whenever a Python file of the target changes here, until Ctrl-C."),
    ] = None,
    publish: Annotated[
        Path | None,
        typer.Option(metavar="FOLDER", help="Keep rows of the target here, and a page of its releases and settings."),
    ] = None,
    device: Annotated[Literal["cpu", "cuda"], typer.Option(help="Device of the guard model.")] = "cpu",
    verbose: Annotated[bool, typer.Option("--verbose", "-v", help="Print each check, not only its section.")] = False,
    as_json: AsJson = False,
    out: OutFile = None,
    junit_xml: JUnitFile = None,
    results: ResultsFolder = None,
    record: Record = False,
) -> None:
    """Check that the cache is right and fast: engine against oracles, accuracy, cost of block ids. Needs no GPU.

    Exit code 0: all is well. 1: a check failed, an answer was wrong. 2: it could not run. 3: nothing was wrong, but a
    check was void: something that it must see did not happen.
    """
    import torch
    from tqdm.auto import tqdm

    from hybrid_kv.check.ci import published
    from hybrid_kv.check.guard.cases import replay as replay_own
    from hybrid_kv.check.guard.report import (
        document,
        exit_code,
        print_closing,
        section_text,
        verdicts,
    )
    from hybrid_kv.check.guard.run import amounts, run_guard
    from hybrid_kv.check.targets.kinds import kind_of
    from hybrid_kv.cli.publish import FILE as ROWS
    from hybrid_kv.cli.swarm import guard_swarm
    from hybrid_kv.cli.target import guard_target, is_case, replay_case
    from hybrid_kv.cli.target import watch as watch_files
    from hybrid_kv.config import ConfigError
    from hybrid_kv.files import check_outputs
    from hybrid_kv.measure import guard_checks  # noqa: F401  (registers them)
    from hybrid_kv.measure.results import append_rows, check_writable, provenance
    from hybrid_kv.measure.results.guard_rows import result_rows, whole_row

    _check_combination(given_options(context))
    if replay is not None:
        raise typer.Exit(replay_case(replay, python) if is_case(replay) else replay_own(replay))
    if swarm is not None:
        csv = rows_file("swarm.csv", results, record)
        raise typer.Exit(guard_swarm(swarm, seed, jobs, ray, repro, as_json, out, csv))
    select = [*(select or ()), *(one for one in only or () if "=" not in one)]
    settings = [one.split("=", 1) for one in only or () if "=" in one]
    levels = {_FACTORS.get(name, name): level for name, level in settings}
    size: Size = "quick" if quick else "long" if long else "full"
    if target is not None:
        if levels:
            raise ConfigError(f"--target {target}: give settings with --matrix, not with --only")
        check_outputs(out, junit_xml, repro / "case.json")
        if publish is not None:
            check_writable(publish / ROWS)
        with published(f"hybrid-kv guard --target {target}", junit_xml) as keep:
            run = partial(
                guard_target, target, model, python, against, matrix, "exact" if exact else weights, select, seed or 0,
                size, 1 if watch else jobs, repro, verbose, as_json, out, publish, keep,
            )  # fmt: skip
            if watch:
                watch_files(watch, kind_of(target, python), run)
            code = run()
        raise typer.Exit(code)
    if record and (select or levels):
        raise ConfigError("--record keeps the verdict of the whole guard; leave -k and --only out")
    if device == "cuda" and not torch.cuda.is_available():
        raise ConfigError("--device cuda: torch sees no GPU here; use cpu")
    rows = rows_file("guard.csv", results, record)
    check_outputs(out, junit_xml, repro / "scenario.json")
    if seed is None:
        seed = secrets.randbelow(2**31) if long else 0
    if long:
        print(f"the same run again: hybrid-kv guard --long --seed {seed}", file=sys.stderr)
    checks: list[CheckResult] = []

    def report(found: list[CheckResult]) -> None:
        """What has ended is on disk, whatever becomes of the rest."""
        if found and not as_json:
            tqdm.write(section_text(found, verbose))
        checks.extend(found)
        keep(verdicts(checks))
        show(document(checks, seed, asdict(provenance()), complete=False), False, out, lambda: None)
        append_rows(rows, result_rows(found))

    with published("hybrid-kv guard", junit_xml) as keep:
        checks = run_guard(
            amounts(size), seed, device=device, select=select, only=levels, repro=repro, fail_fast=fail_fast, jobs=jobs,
            report=report,
        )  # fmt: skip
    if not (select or levels or fail_fast):
        append_rows(rows, [whole_row(size, checks)])
    show(document(checks, seed, asdict(provenance())), as_json, out, lambda: print_closing(checks))
    raise typer.Exit(exit_code(checks))


def _check_combination(given: dict[str, str]) -> None:
    """Raise `ConfigError` for options that exclude each other."""
    from hybrid_kv.config import ConfigError

    if given.keys() >= {"quick", "long"}:
        raise ConfigError("--quick and --long exclude each other; give one of them")
    if given.keys() >= {"weights", "exact"}:
        raise ConfigError("--weights and --exact exclude each other; give one of them")
    kind = next((name for name in _KINDS if name in given), None)
    if kind is not None and (others := [flag for name, flag in given.items() if name not in _KINDS[kind]]):
        raise ConfigError(f"--{kind} does not go with {', '.join(others)}; leave one of them out")
    if kind is None and "ray" in given:
        raise ConfigError("--ray needs --swarm")
    if kind is None and (others := [given[name] for name in _TARGET if name in given]):
        raise ConfigError(f"{others[0]} is about another engine; name it with --target")

"""`hybrid-kv guard`: a check of this engine, of its answers and its speed."""

from __future__ import annotations

import secrets
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, TypeVar

import typer

from hybrid_kv.cli.check import check_engine, refuse_pairs
from hybrid_kv.cli.fuzz import FuzzOptions, play_swarm
from hybrid_kv.cli.options import (
    Amount,
    Output,
    Record,
    ResultsFolder,
    SubjectOptions,
    dataclass_options,
    given_options,
    rows_file,
    show,
    write_document,
)
from hybrid_kv.cli.replay import replay_file

if TYPE_CHECKING:
    from hybrid_kv.check.ci import Verdict
    from hybrid_kv.check.guard.registry import CheckResult, Size

Options = TypeVar("Options")

_SUBJECT = tuple(field.name for field in fields(SubjectOptions))
_SHARED = {"seed", "jobs", "repro", "as_json", "out"}
# By the option that chooses another kind of run, the options that go with it.
_KINDS = {
    "replay": {"replay", "python"},
    "swarm": {"swarm", "ray", "results", "record", *_SHARED},
    "target": {
        "target",
        *_SUBJECT,
        *("junit_xml", "verbose", "quick", "long", "select", "only"),
        *_SHARED,
    },
}
# The settings of an engine that are factors of the exact traffic.
_FACTORS = {
    "mamba_cache_mode": "mode",
    "state_scheme": "scheme",
    "num_speculative_tokens": "K",
    "attention_backend": "backend",
}


@dataclass(frozen=True, kw_only=True)
class GuardOptions:
    """Sections, device and rows of a guard of this engine.

    Attributes:
        only: parts of sections' names, and settings that engines must have.
        fail_fast: stop at the first section that fails.
        device: of the guard model.
        results: folder whose CSV gets the rows.
        record: append the rows to the project's own.
    """

    only: Annotated[
        list[str] | None,
        typer.Option(
            metavar="SECTION|SETTING=LEVEL",
            help="As -k, or only engines with this setting, such as mamba_cache_mode=align; may be "
            "repeated.",
        ),
    ] = None
    fail_fast: Annotated[
        bool, typer.Option("--fail-fast", help="Stop at the first section that fails.")
    ] = False
    device: Annotated[Literal["cpu", "cuda"], typer.Option(help="Device of the guard model.")] = (
        "cpu"
    )
    results: ResultsFolder = None
    record: Record = False

    @property
    def sections(self) -> list[str]:
        """Parts of names of sections that `only` has."""
        return [choice for choice in self.only or () if "=" not in choice]

    @property
    def levels(self) -> dict[str, str]:
        """Levels that `only` has, by the name of a factor of the exact traffic."""
        settings = [choice.split("=", 1) for choice in self.only or () if "=" in choice]
        return {_FACTORS.get(name, name): level for name, level in settings}


_Text = Annotated[str | None, typer.Option(hidden=True)]
_File = Annotated[Path | None, typer.Option(hidden=True)]


@dataclass(frozen=True, kw_only=True)
class OlderSpellings:
    """Options of `replay`, `fuzz` and `check` that `guard` takes, too; its help does not list them.

    Those not named here are the ones of `hybrid_kv.cli.options.SubjectOptions`.

    Attributes:
        replay: the file of `hybrid-kv replay`.
        swarm: the hours of `hybrid-kv fuzz`.
        ray: its cluster.
        target: the engine of `hybrid-kv check`.
    """

    replay: _File = None
    swarm: Annotated[float | None, typer.Option(hidden=True)] = None
    ray: _Text = None
    target: _Text = None
    model: Annotated[str, typer.Option(hidden=True)] = SubjectOptions.model
    python: Annotated[Path | None, typer.Option("--python", "--server", hidden=True)] = None
    against: _Text = None
    matrix: Annotated[list[str] | None, typer.Option(hidden=True)] = None
    weights: Annotated[Literal["exact", "random"] | None, typer.Option(hidden=True)] = None
    exact: Annotated[bool, typer.Option("--exact", hidden=True)] = False
    watch: Annotated[list[Path] | None, typer.Option(hidden=True)] = None
    publish: _File = None


@dataclass_options
def guard(
    context: typer.Context,
    amount: Amount,
    options: GuardOptions,
    output: Output,
    older: OlderSpellings,
) -> None:
    """Check that the cache is right and fast: engine against oracles, accuracy, cost of block ids.

    Needs no GPU; `hybrid-kv check` is for other engines. Exit code 0: all is well. 1: a check
    failed, an answer was wrong. 2: it could not run. 3: nothing was wrong, but a check was void:
    something that it must see did not happen.
    """
    from hybrid_kv.config import ConfigError

    _check_combination(given_options(context))
    if older.replay is not None:
        raise typer.Exit(replay_file(older.replay, older.python))
    if older.swarm is not None:
        swarm = _taken(FuzzOptions, older, options, amount, output, hours=older.swarm)
        raise typer.Exit(play_swarm("guard --swarm", swarm))
    amount = replace(amount, select=[*(amount.select or ()), *options.sections])
    if older.target is not None:
        if options.levels:
            raise ConfigError(
                f"--target {older.target}: give settings with --matrix, not with --only"
            )
        subject = _taken(SubjectOptions, older)
        title = f"hybrid-kv guard --target {older.target}"
        raise typer.Exit(check_engine(title, older.target, subject, amount, output))
    raise typer.Exit(guard_this_engine(amount, options, output))


def guard_this_engine(amount: Amount, options: GuardOptions, output: Output) -> int:
    """Run the sections of the guard, and keep and print their results; return the exit code.

    Raises:
        HybridKVError: it cannot run with these options.
    """
    from hybrid_kv.check.ci import published
    from hybrid_kv.check.guard.report import document, exit_code, print_closing
    from hybrid_kv.check.guard.run import GuardRunOptions, amounts, run_guard
    from hybrid_kv.files import check_outputs
    from hybrid_kv.measure import guard_checks  # noqa: F401  (registers them)
    from hybrid_kv.measure.results import append_rows, provenance
    from hybrid_kv.measure.results.guard_rows import whole_row

    is_part = bool(amount.select or options.levels)
    _check_device(options, is_part)
    rows = rows_file("guard.csv", options.results, options.record)
    check_outputs(output.out, output.junit_xml, output.repro / "scenario.json")
    size = _size(amount)
    seed = amount.seed
    if seed is None:
        seed = secrets.randbelow(2**31) if amount.long else 0
    if amount.long:
        print(f"the same run again: hybrid-kv guard --long --seed {seed}", file=sys.stderr)
    with published("hybrid-kv guard", output.junit_xml) as keep:
        checks = run_guard(
            amounts(size),
            GuardRunOptions(
                seed,
                device=options.device,
                select=amount.select or (),
                only=options.levels,
                repro=output.repro,
                fail_fast=options.fail_fast,
                jobs=amount.jobs,
            ),
            report=_reporter(rows, seed, output, keep),
        )
    if not (is_part or options.fail_fast):
        append_rows(rows, [whole_row(size, checks)])
    result = document(checks, seed, asdict(provenance()))
    show(result, output.as_json, output.out, print_closing, checks)
    return exit_code(checks)


def _check_device(options: GuardOptions, is_part: bool) -> None:
    import torch

    from hybrid_kv.config import ConfigError

    if options.record and is_part:
        raise ConfigError("--record keeps the verdict of the whole guard; leave -k and --only out")
    if options.device == "cuda" and not torch.cuda.is_available():
        raise ConfigError("--device cuda: torch sees no GPU here; use cpu")


def _size(amount: Amount) -> Size:
    if amount.quick:
        return "quick"
    return "long" if amount.long else "full"


def _reporter(
    rows: Path, seed: int, output: Output, keep: Callable[[Sequence[Verdict]], None]
) -> Callable[[list[CheckResult]], None]:
    """Return a function that prints a section and keeps all results so far.

    A section that has ended is on disk, whatever becomes of the rest.
    """
    from tqdm.auto import tqdm

    from hybrid_kv.check.guard.report import document, section_text, verdicts
    from hybrid_kv.measure.results import append_rows, provenance
    from hybrid_kv.measure.results.guard_rows import result_rows

    checks: list[CheckResult] = []

    def report(results: list[CheckResult]) -> None:
        if results and not output.as_json:
            tqdm.write(section_text(results, output.verbose))
        checks.extend(results)
        keep(verdicts(checks))
        partial_document = document(checks, seed, asdict(provenance()), complete=False)
        write_document(partial_document, output.out)
        append_rows(rows, result_rows(results))

    return report


def _taken(kind: Callable[..., Options], *groups: Any, **values: Any) -> Options:
    """Make options of another command of the values that this one has, by name."""
    names = [field.name for field in fields(kind)]  # type: ignore[arg-type]  # kind is a dataclass
    for group in groups:
        values |= {name: getattr(group, name) for name in names if hasattr(group, name)}
    return kind(**values)


def _check_combination(given: dict[str, str]) -> None:
    """Raise `ConfigError` for options that exclude each other."""
    from hybrid_kv.config import ConfigError

    refuse_pairs(given)
    kind = next((name for name in _KINDS if name in given), None)
    if kind is not None:
        others = [flag for name, flag in given.items() if name not in _KINDS[kind]]
        if others:
            raise ConfigError(
                f"--{kind} does not go with {', '.join(others)}; leave one of them out"
            )
        return
    if "ray" in given:
        raise ConfigError("--ray is an option of hybrid-kv fuzz")
    foreign = [given[name] for name in _SUBJECT if name in given]
    if foreign:
        raise ConfigError(f"{foreign[0]} is about another engine: hybrid-kv check ENGINE")

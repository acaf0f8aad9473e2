"""Options that several commands share, the place of their rows, and JSON instead of a table.

Options are the fields of dataclasses: of the configuration, or of groups such as `Output`.
"""

from __future__ import annotations

import inspect
import json
from collections.abc import Callable, Collection, Sequence
from dataclasses import MISSING, Field, dataclass, fields, is_dataclass
from functools import wraps
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar, get_args, get_origin, get_type_hints

import typer

from hybrid_kv.config import PARTS, EngineConfig

Command = TypeVar("Command", bound=Callable[..., object])

MAX_SEED = 2**63 - 1  # of torch, and of an integer in a row
MAX_TRAFFIC_SEED = 2**42 - 1  # times a million, plus a request's number, it has 64 bits

Model = Annotated[
    str | None,
    typer.Option(
        help="Checkpoint folder, or an embedded model: guard_model (the default) or "
        "guard_model_qwen3_5."
    ),
]
Select = Annotated[
    list[str] | None,
    typer.Option("-k", help="Only what has this in its name; may be repeated."),
]
Jobs = Annotated[
    int | None, typer.Option(min=1, help="Processes; default: one per core, at most 8.")
]
TrafficSeed = Annotated[
    int | None,
    typer.Option(
        min=0,
        max=MAX_TRAFFIC_SEED,
        help="Of the traffic; default: 0, or a fresh one for guard --long.",
    ),
]
Repro = Annotated[
    Path,
    typer.Option(metavar="FOLDER", help="Folder for failing cases, reduced as far as possible."),
]
Python = Annotated[
    Path | None,
    typer.Option(
        "--python",
        "--server",
        help="Python that has the engine, or a llama-server; default: that in .venv-ENGINE.",
    ),
]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON instead of a table.")]
OutFile = Annotated[Path | None, typer.Option("--out", help="Also write the JSON to this file.")]
JUnitFile = Annotated[
    Path | None,
    typer.Option(
        "--junit-xml",
        metavar="FILE",
        help="Also write the verdicts to this file, as JUnit XML.",
    ),
]
ResultsFolder = Annotated[
    Path | None,
    typer.Option(
        "--results", help="Folder whose CSV gets the rows; default: out, which git ignores."
    ),
]
Record = Annotated[
    bool, typer.Option("--record", help="Append the rows to the project's own, in results.")
]


@dataclass(frozen=True, kw_only=True)
class SubjectOptions:
    """The model and the settings in which an engine is checked.

    Attributes:
        model: a family, which gets random weights, a folder, or a model of the hub.
        python: the Python that has the engine.
        against: the Python of its old build, or a reference engine.
        matrix: settings; None: the engine's usual ones.
        weights: of the model; None: both.
        exact: weights exact.
        watch: files whose changes repeat the run.
        publish: folder for rows and a page of the engine.
    """

    model: Annotated[
        str,
        typer.Option(
            metavar="FAMILY|FOLDER|HUB", help="Model of the engine; a family gets random weights."
        ),
    ] = "qwen3_5_text"
    python: Python = None
    against: Annotated[
        str | None,
        typer.Option(
            metavar="PYTHON|ENGINE", help="Its old build: report what is new; or a reference."
        ),
    ] = None
    matrix: Annotated[
        list[str] | None,
        typer.Option(
            metavar="FACTOR=LEVEL,…",
            help="Settings: all combinations in a text; may be repeated.",
        ),
    ] = None
    weights: Annotated[
        Literal["exact", "random"] | None,
        typer.Option(
            help="Of the model: exact integers, random numbers; default: both (--matrix: random)."
        ),
    ] = None
    exact: Annotated[bool, typer.Option("--exact", help="As --weights exact.")] = False
    watch: Annotated[
        list[Path] | None,
        typer.Option(
            metavar="PATH",
            help="Run again whenever a Python file of the engine changes here, until Ctrl-C.",
        ),
    ] = None
    publish: Annotated[
        Path | None,
        typer.Option(
            metavar="FOLDER", help="Keep rows here, and a page of the engine's releases by setting."
        ),
    ] = None


@dataclass(frozen=True, kw_only=True)
class Amount:
    """The traffic of a run: its size, seed and parts.

    Attributes:
        quick: a minute instead of four.
        long: 100,000 requests of the guard, ten rounds of a check.
        seed: of the traffic; None: 0, or a fresh one of a long run.
        select: parts of names; None: everything.
        jobs: processes; None: one per core, at most 8.
    """

    quick: Annotated[bool, typer.Option("--quick", help="A minute instead of four.")] = False
    long: Annotated[
        bool,
        typer.Option("--long", help="100,000 requests of guard; ten rounds of check."),
    ] = False
    seed: TrafficSeed = None
    select: Select = None
    jobs: Jobs = None


@dataclass(frozen=True, kw_only=True)
class Output:
    """Places of a run's results, and their form.

    Attributes:
        repro: folder for failing cases.
        verbose: print each check.
        as_json: print JSON instead of a table.
        out: file that also gets the JSON.
        junit_xml: file that gets the verdicts.
    """

    repro: Repro = Path("repro")
    verbose: Annotated[
        bool, typer.Option("--verbose", "-v", help="Print each check, not only its section.")
    ] = False
    as_json: AsJson = False
    out: OutFile = None
    junit_xml: JUnitFile = None


@dataclass(frozen=True, kw_only=True)
class RowOutput:
    """Places of a run's rows, verdicts and document.

    Attributes:
        as_json: print JSON instead of a table.
        out: file that also gets the JSON.
        junit_xml: file that gets the verdicts.
        results: folder whose CSV gets the rows.
        record: append the rows to the project's own.
    """

    as_json: AsJson = False
    out: OutFile = None
    junit_xml: JUnitFile = None
    results: ResultsFolder = None
    record: Record = False


def derived_options(*configs: Any, only: Collection[str] = ()) -> Callable[[Command], Command]:
    """Give a command an option for each field of these configurations that has a help text.

    The command gets the given ones as keywords; its parameters replace options of the same name.

    Args:
        configs: dataclasses, such as `CacheConfig`.
        only: names of fields; default: all.
    """

    def decorate(command: Command) -> Command:
        written = {parameter.name: parameter for parameter in _parameters(command)}
        derived = {
            name: option
            for config in configs
            for name, option in _derived(config).items()
            if name not in written and (not only or name in only)
        }

        @wraps(command)
        def run(**arguments: Any) -> object:
            given = {
                name: value
                for name, value in arguments.items()
                if name in written or value is not None
            }
            return command(**given)

        return _with_parameters(run, [*written.values(), *derived.values()])

    return decorate


def dataclass_options(command: Command) -> Command:
    """Give a command an option for each field of its parameters that are dataclasses.

    The command gets an instance of each of them; its other parameters stay as they are.
    """
    every = _parameters(command)
    groups: dict[str, Any] = {
        parameter.name: parameter.annotation
        for parameter in every
        if is_dataclass(parameter.annotation)
    }
    options = [
        option
        for parameter in every
        for option in (
            _field_options(parameter.annotation) if parameter.name in groups else [parameter]
        )
    ]

    @wraps(command)
    def run(**arguments: Any) -> object:
        for name, group in groups.items():
            values = {field.name: arguments.pop(field.name) for field in fields(group)}
            arguments[name] = group(**values)
        return command(**arguments)

    return _with_parameters(run, options)


def _parameters(command: Command) -> list[inspect.Parameter]:
    """Return the named parameters of a command."""
    every = inspect.signature(command, eval_str=True).parameters.values()
    return [each for each in every if each.kind is not inspect.Parameter.VAR_KEYWORD]


def _with_parameters(run: Any, parameters: Sequence[inspect.Parameter]) -> Any:
    """Let typer see these parameters in place of a function's."""
    run.__signature__ = inspect.Signature(
        [each.replace(kind=inspect.Parameter.KEYWORD_ONLY) for each in parameters]
    )
    run.__annotations__ = {each.name: each.annotation for each in parameters}
    return run


def _field_options(group: Any) -> list[inspect.Parameter]:
    """Return a parameter for each field of a dataclass, with the field's type and default."""
    hints = get_type_hints(group, include_extras=True)
    return [_parameter(field, hints[field.name]) for field in fields(group)]


def _parameter(field: Field[Any], annotation: Any) -> inspect.Parameter:
    default = inspect.Parameter.empty if field.default is MISSING else field.default
    return inspect.Parameter(
        field.name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=annotation
    )


def _derived(config: Any) -> dict[str, inspect.Parameter]:
    """Return a parameter for each field that has a help text.

    None, the default of each, leaves the field at its default.
    """
    options = {}
    hints = get_type_hints(config, include_extras=True)
    for field in fields(config):
        if get_origin(hints[field.name]) is Annotated:
            kind, text = get_args(hints[field.name])
            if get_origin(kind) is tuple:
                kind = str  # JSON
            if field.default not in (None, ()):
                text = f"{text[:-1]}; default: {field.default}."
            option = typer.Option(help=text, rich_help_panel=config.__name__)
            options[field.name] = inspect.Parameter(
                field.name,
                inspect.Parameter.KEYWORD_ONLY,
                default=None,
                annotation=Annotated[kind | None, option],
            )
    return options


engine_options = derived_options(*PARTS.values(), EngineConfig)


def given_options(context: typer.Context) -> dict[str, str]:
    """Return by parameter the flag of each option that was given on the command line."""
    flags = {
        parameter.name: parameter.opts[0] for parameter in context.command.params if parameter.name
    }
    sources = {name: context.get_parameter_source(name) for name in flags}
    return {
        name: flag
        for name, flag in flags.items()
        if getattr(sources[name], "name", "") == "COMMANDLINE"
    }


def require_at_least_one(**options: int | None) -> None:
    """Raise `ConfigError` for an option that was given and is less than one."""
    from hybrid_kv.errors import ConfigError

    for name, value in options.items():
        if value is not None and value < 1:
            raise ConfigError(f"{name}={value!r} must be an integer >= 1")


def rows_file(name: str, folder: Path | None, record: bool) -> Path:
    """Return the CSV called `name` that a command appends its rows to; it can be written.

    Raises:
        HybridKVError: it cannot, or both `--results` and `--record` were given.
    """
    from hybrid_kv.errors import ConfigError
    from hybrid_kv.measure.results import check_writable

    if record and folder is not None:
        raise ConfigError(f"--record and --results {folder} exclude each other; give one of them")
    if folder is not None and folder.suffix == ".parquet":
        raise ConfigError(
            f"--results {folder}: a CSV would spoil this data set; "
            "name another folder, then merge it"
        )
    file = (Path("results") if record else folder or Path("out")) / name
    check_writable(file)
    return file


def show(
    document: Any,
    as_json: bool,
    out: Path | None,
    table: Callable[..., None],
    *arguments: object,
) -> None:
    """Write the document to `out`, and print it as JSON, or the table, even if that fails.

    Args:
        table: prints the table, given `arguments`.
    """
    try:
        write_document(document, out)
    finally:
        if as_json:
            print(json.dumps(document, indent=2))
        else:
            table(*arguments)


def write_document(document: Any, out: Path | None) -> None:
    """Write a document as JSON to `out`, if that is a file."""
    from hybrid_kv.files import write_whole

    if out is not None:
        write_whole(out, json.dumps(document, indent=2) + "\n")

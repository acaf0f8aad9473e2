"""What several commands share: options derived from the configuration, where rows go, and JSON instead of a table."""

from __future__ import annotations

import inspect
import json
from collections.abc import Callable, Collection
from dataclasses import fields
from functools import wraps
from pathlib import Path
from typing import Annotated, Any, TypeVar, get_args, get_origin, get_type_hints

import typer

from hybrid_kv.config import PARTS, EngineConfig

Command = TypeVar("Command", bound=Callable[..., object])

MAX_SEED = 2**63 - 1  # of torch, and of an integer in a row

Model = Annotated[
    str | None,
    typer.Option(help="Checkpoint folder, or an embedded model: guard_model (the default) or guard_model_qwen3_5."),
]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON instead of a table.")]
OutFile = Annotated[Path | None, typer.Option("--out", help="Also write the JSON to this file.")]
JUnitFile = Annotated[
    Path | None, typer.Option("--junit-xml", metavar="FILE", help="Also write the verdicts to this file, as JUnit XML.")
]
Select = Annotated[list[str] | None, typer.Option("-k", help="Only what has this in its name; may be repeated.")]
ResultsFolder = Annotated[
    Path | None, typer.Option("--results", help="Folder whose CSV gets the rows; default: out, which git ignores.")
]
Record = Annotated[bool, typer.Option("--record", help="Append the rows to the project's own, in results.")]


def derived_options(*configs: Any, only: Collection[str] = ()) -> Callable[[Command], Command]:
    """Give a command an option for each field of these configurations that has a help text.

    The command gets the given ones as keywords; its own parameters replace options of the same name.

    Args:
        configs: dataclasses, such as `CacheConfig`.
        only: names of fields; default: all.
    """

    def decorate(command: Command) -> Command:
        own = {
            name: parameter
            for name, parameter in inspect.signature(command, eval_str=True).parameters.items()
            if parameter.kind is not inspect.Parameter.VAR_KEYWORD
        }
        options = {
            name: option
            for config in configs
            for name, option in _options(config).items()
            if name not in own and (not only or name in only)
        }

        @wraps(command)
        def run(**arguments: Any) -> object:
            return command(**{name: value for name, value in arguments.items() if name in own or value is not None})

        every = {**own, **options}
        run.__signature__ = inspect.Signature(list(every.values()))  # type: ignore[attr-defined]
        run.__annotations__ = {name: parameter.annotation for name, parameter in every.items()}
        return run  # type: ignore[return-value]

    return decorate


def _options(config: Any) -> dict[str, inspect.Parameter]:
    """By field; None, the default of each, leaves the field at its own."""
    found = {}
    hints = get_type_hints(config, include_extras=True)
    for field in fields(config):
        if get_origin(hints[field.name]) is Annotated:
            kind, text = get_args(hints[field.name])
            if field.default is not None:
                text = f"{text[:-1]}; default: {field.default}."
            option = typer.Option(help=text, rich_help_panel=config.__name__)
            found[field.name] = inspect.Parameter(
                field.name, inspect.Parameter.KEYWORD_ONLY, default=None, annotation=Annotated[kind | None, option]
            )
    return found


engine_options = derived_options(*PARTS.values(), EngineConfig)


def given_options(context: typer.Context) -> dict[str, str]:
    """By parameter, the flag of each option that was given on the command line."""
    found = {parameter.name: parameter.opts[0] for parameter in context.command.params if parameter.name}
    sources = {name: context.get_parameter_source(name) for name in found}
    return {name: flag for name, flag in found.items() if getattr(sources[name], "name", "") == "COMMANDLINE"}


def require_at_least_one(**options: int | None) -> None:
    from hybrid_kv.errors import ConfigError

    for name, value in options.items():
        if value is not None and value < 1:
            raise ConfigError(f"{name}={value!r} must be an integer >= 1")


def rows_file(name: str, folder: Path | None, record: bool) -> Path:
    """The CSV called `name` that a command appends its rows to; it can be written.

    Raises:
        HybridKVError: it cannot, or both `--results` and `--record` were given.
    """
    from hybrid_kv.errors import ConfigError
    from hybrid_kv.measure.results import check_writable

    if record and folder is not None:
        raise ConfigError(f"--record and --results {folder} exclude each other; give one of them")
    if folder is not None and folder.suffix == ".parquet":
        raise ConfigError(f"--results {folder}: a CSV would spoil this data set; name another folder, then merge it")
    file = (Path("results") if record else folder or Path("out")) / name
    check_writable(file)
    return file


def show(document: Any, as_json: bool, out: Path | None, table: Callable[[], None]) -> None:
    """Print the table or the JSON document, and write the document to `out`; it is printed even if that fails."""
    from hybrid_kv.files import write_whole

    text = json.dumps(document, indent=2) if as_json or out is not None else ""
    try:
        if out is not None:
            write_whole(out, text + "\n")
    finally:
        if as_json:
            print(text)
        else:
            table()

"""What several commands take and do alike: options with one meaning, where rows go, and JSON instead of a table."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from hybrid_kv.cache.modes import MODES

if TYPE_CHECKING:
    CacheMode = str
else:
    CacheMode = Literal[tuple(MODES)]
SCHEME_HELP = "How drafts are undone: a state after each token (slots), or one state and a ring of inputs (replay)."

AsJson = Annotated[bool, typer.Option("--json", help="Print JSON instead of a table.")]
OutFile = Annotated[Path | None, typer.Option("--out", help="Also write the JSON to this file.")]
Select = Annotated[list[str] | None, typer.Option("-k", help="Only what has this in its name; may be repeated.")]
ResultsFolder = Annotated[
    Path | None, typer.Option("--results", help="Folder whose CSV gets the rows; default: out, which git ignores.")
]
Record = Annotated[bool, typer.Option("--record", help="Append the rows to the project's own, in results.")]


def require_at_least_one(**options: int | None) -> None:
    from hybrid_kv.config import ConfigError

    for name, value in options.items():
        if value is not None and value < 1:
            raise ConfigError(f"{name}={value!r} must be an integer >= 1")


def rows_file(name: str, folder: Path | None, record: bool) -> Path:
    """The CSV called `name` that a command appends its rows to; it can be written.

    Raises:
        HybridKVError: it cannot, or both `--results` and `--record` were given.
    """
    from hybrid_kv.config import ConfigError
    from hybrid_kv.results import check_writable

    if record and folder is not None:
        raise ConfigError(f"--record and --results {folder} exclude each other; give one of them")
    file = (Path("results") if record else folder or Path("out")) / name
    check_writable(file)
    return file


def show(document: Any, as_json: bool, out: Path | None, table: Callable[[], None]) -> None:
    """Print the table or the JSON document, and write the document to `out`, which must not cost what is printed."""
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

"""`hybrid-kv families` and `hybrid-kv checkpoint`: models that run, and small checkpoints."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated, Any, Literal

import typer

from hybrid_kv.cli.options import MAX_SEED, AsJson, OutFile, show


def families(as_json: AsJson = False, out: OutFile = None) -> None:
    """List the model types that run here, with their references, and those only planned."""
    import hybrid_kv.models.families  # noqa: F401  (registers them)
    from hybrid_kv.files import check_outputs
    from hybrid_kv.models.registry import overview

    check_outputs(out)
    entries = overview()
    show(entries, as_json, out, _print, entries)


def _print(entries: list[dict[str, Any]]) -> None:
    from rich import box
    from rich.console import Console
    from rich.table import Table

    table = Table(
        "model_type", "runs", "draft head", "checkpoints", "checked against", box=box.SIMPLE
    )
    for entry in entries:
        table.add_row(
            entry["model_type"],
            "yes" if entry["runs"] else "planned only",
            "mtp" if entry["draft_head"] else "",
            ", ".join(entry["sizes"]),
            entry["checked_against"],
        )
    # Into a file rich would fold the table at 80 columns.
    Console(markup=False, width=None if sys.stdout.isatty() else 140).print(table)


def checkpoint(
    family: Annotated[
        str | None,
        typer.Argument(help="A model_type; `hybrid-kv families` lists them.", show_default=False),
    ] = None,
    folder: Annotated[
        Path | None,
        typer.Argument(
            help="Where to write; made if it is not there, empty if it is.", show_default=False
        ),
    ] = None,
    size: Annotated[
        Literal["tiny", "small"], typer.Option(help="tiny: 100 KB; small: worth timing.")
    ] = "tiny",
    exact: Annotated[
        bool,
        typer.Option("--exact", help="No random weights: every operation is exact, in any engine."),
    ] = False,
    verify: Annotated[
        Path | None,
        typer.Option(metavar="FOLDER", help="Write nothing: is every operation of this one exact?"),
    ] = None,
    tokens: Annotated[
        int, typer.Option(min=1, max=2048, help="Of the longest texts of --verify.")
    ] = 70,
    seed: Annotated[int, typer.Option(min=0, max=MAX_SEED, help="Of the weights.")] = 0,
) -> None:
    """Write a checkpoint with random weights and a tokenizer.

    It is for tests here and for every other engine. Margins between the best two tokens are wide,
    and states remember: a wrong one shows.
    """
    from hybrid_kv.config import ConfigError
    from hybrid_kv.errors import require

    require("safetensors", "tokenizers", "transformers")
    if verify is not None:
        if family is not None:
            raise ConfigError(f"--verify {verify} writes no checkpoint; leave {family} out")
        raise typer.Exit(_verify(verify, seed, tokens))
    if family is None or folder is None:
        raise ConfigError("name a family and a folder, or a checkpoint with --verify")
    print(_written(family, folder, "exact" if exact else size, seed))


def _written(family: str, folder: Path, size: str, seed: int) -> str:
    from hybrid_kv.files import new_folder
    from hybrid_kv.models.exact_weights.checkpoint import write_exact_weights
    from hybrid_kv.models.random_checkpoint import write_checkpoint

    with new_folder(folder) as made:
        if size == "exact":
            count = write_exact_weights(family, made, seed)
        else:
            model = write_checkpoint(family, made, size, seed)
            count = sum(parameter.numel() for parameter in model.parameters())
    return f"{folder}: {family}, {size}, {count:,} weights in float32, seed {seed}"


def _verify(folder: Path, seed: int, length: int) -> int:
    """Print whether a checkpoint is exact in each way of computing it; return 1 if it is not."""
    from hybrid_kv.models.exact_weights.verify import verify
    from hybrid_kv.models.loader import resolve_folder

    code = 0
    for result in verify(resolve_folder(str(folder)), seed, length):
        verdict = (
            "equal to the bit" if result.difference is None else f"not exact: {result.difference}"
        )
        print(f"{result.dtype}, {result.way}: {result.num_tokens} tokens {verdict}", flush=True)
        code = code or int(result.difference is not None)
    return code

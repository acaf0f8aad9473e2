"""`hybrid-kv families` and `hybrid-kv checkpoint`: what runs, and a small one of it with random weights."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated, Any, Literal

import typer

from hybrid_kv.cli.options import MAX_SEED, AsJson, OutFile, show


def families(as_json: AsJson = False, out: OutFile = None) -> None:
    """List the model types that run here and what each was checked against, and those that can only be planned."""
    import hybrid_kv.models.families  # noqa: F401  (registers them)
    from hybrid_kv.files import check_outputs
    from hybrid_kv.models.registry import overview

    check_outputs(out)
    found = overview()
    show(found, as_json, out, lambda: _print(found))


def _print(found: list[dict[str, Any]]) -> None:
    from rich import box
    from rich.console import Console
    from rich.table import Table

    table = Table("model_type", "runs", "draft head", "checkpoints", "checked against", box=box.SIMPLE)
    for entry in found:
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
    family: Annotated[str, typer.Argument(help="A model_type; `hybrid-kv families` lists them.")],
    folder: Annotated[Path, typer.Argument(help="Where to write; made if it is not there, empty if it is.")],
    size: Annotated[Literal["tiny", "small"], typer.Option(help="tiny: 100 KB; small: worth timing.")] = "tiny",
    seed: Annotated[int, typer.Option(min=0, max=MAX_SEED, help="Of the weights.")] = 0,
) -> None:
    """Write a checkpoint with random weights and a tokenizer, for tests here and for every other engine.

    Margins between the best two tokens are wide, and states remember: a wrong one shows.
    """
    from hybrid_kv.errors import require

    require("safetensors", "tokenizers", "transformers")
    from hybrid_kv.files import new_folder
    from hybrid_kv.models.random_checkpoint import write_checkpoint

    with new_folder(folder) as made:
        model = write_checkpoint(family, made, size, seed)
    weights = sum(parameter.numel() for parameter in model.parameters())
    print(f"{folder}: {family}, {size}, {weights:,} weights in float32, seed {seed}")

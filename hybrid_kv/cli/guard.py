"""`hybrid-kv guard`: is the cache right and fast?"""

from __future__ import annotations

import secrets
from pathlib import Path
from typing import Annotated, Literal

import typer

from hybrid_kv.cli.options import require_folder


def guard(
    quick: Annotated[bool, typer.Option("--quick", help="A minute instead of five.")] = False,
    long: Annotated[
        bool, typer.Option("--long", help="100,000 requests, of a fresh seed unless one is given.")
    ] = False,
    seed: Annotated[int | None, typer.Option(min=0, help="Another seed is other traffic; default: 0.")] = None,
    json_file: Annotated[
        Path | None, typer.Option("--json", help="Also write every check with its figure here.")
    ] = None,
    results: Annotated[Path, typer.Option(help="Folder whose guard.csv gets a row per check.")] = Path("results"),
    device: Annotated[Literal["cpu", "cuda"], typer.Option(help="What the guard model runs on.")] = "cpu",
) -> None:
    """Say whether the cache is right and fast: engine against oracles, accuracy, cost of block ids. Needs no GPU."""
    import torch

    from hybrid_kv.config import ConfigError
    from hybrid_kv.guard.report import FULL, LONG, QUICK, print_results, result_rows, run_guard, write_json
    from hybrid_kv.results import append_rows, check_writable

    if quick and long:
        raise ConfigError("--quick and --long exclude each other; give one of them")
    if device == "cuda" and not torch.cuda.is_available():
        raise ConfigError("--device cuda: torch sees no GPU here; use cpu")
    rows_file = results / "guard.csv"
    check_writable(rows_file)
    if json_file is not None:
        require_folder(json_file)
    if seed is None:
        seed = secrets.randbelow(2**31) if long else 0
    if long:
        print(f"the same run again: hybrid-kv guard --long --seed {seed}")
    checks = run_guard(QUICK if quick else LONG if long else FULL, seed, device=device)
    print_results(checks)
    append_rows(rows_file, result_rows(checks))
    if json_file is not None:
        write_json(checks, json_file)
    if not all(check.passed for check in checks):
        raise typer.Exit(1)

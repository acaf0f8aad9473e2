"""`hybrid-kv doctor`: what to trust on this machine."""

from __future__ import annotations

from typing import Annotated

import typer

from hybrid_kv.cli.options import AsJson, OutFile, show


def doctor(
    seconds: Annotated[
        float, typer.Option(min=0.1, max=600, help="How long equal work is timed.")
    ] = 5.0,
    as_json: AsJson = False,
    out: OutFile = None,
) -> None:
    """Say in six lines what to trust on this machine now; exit code 1: no times."""
    from dataclasses import asdict

    from hybrid_kv.files import check_outputs
    from hybrid_kv.measure.timing.fitness import examine

    check_outputs(out)
    found = examine(seconds)
    document = {**asdict(found), "noise": found.noise, "unfit": found.unfit}
    show(document, as_json, out, lambda: print(*found.lines(), sep="\n"))
    if found.unfit:
        raise typer.Exit(1)

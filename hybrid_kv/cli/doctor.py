"""`hybrid-kv doctor`: a look at what this machine can time."""

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
    fitness = examine(seconds)
    document = {**asdict(fitness), "noise": fitness.noise, "unfit": fitness.unfit}
    show(document, as_json, out, print, "\n".join(fitness.lines()))
    if fitness.unfit:
        raise typer.Exit(1)

"""Showing what was compiled: a table for people, a document for programs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from bench.static.gate import Verdict
from hybrid_kv.measure.results import provenance

_MIX = ("global", "shared", "tensor", "float", "integer")
# Metrics and their headings.
_SHOWN = {
    "registers": "regs",
    "spill_bytes": "spill",
    "shared_bytes": "shared",
    "blocks_per_sm": "blocks",
    "load_bits": "load",
    "store_bits": "store",
    "isa": "code",
    "instructions": "instr.",
}


def print_table(verdicts: Sequence[Verdict]) -> None:
    """Print a line per case and target, and below what is wrong."""
    from rich.console import Console
    from rich.table import Table

    # A terminal may wrap a line; rich would cut the metrics off.
    console = Console(highlight=False, markup=False, soft_wrap=True, width=240)
    table = Table(box=None, pad_edge=False)
    for name in (
        "kernel",
        "shape",
        "dtype",
        "target",
        *_SHOWN.values(),
        "/byte",
        " ".join(_MIX),
        "",
    ):
        left = name in ("kernel", "shape", "dtype", "target", "code", "")
        table.add_column(name, justify="left" if left else "right", no_wrap=True)
    before: tuple[str, ...] = ()
    for verdict in verdicts:
        one = verdict.measurement
        case, metrics = one.key[:3], one.metrics
        cells = [""] * (len(_SHOWN) + 2)
        if metrics is not None:
            per_byte, mix = metrics.instructions_per_byte, metrics.mix[metrics.isa]
            cells = [str(getattr(metrics, name)) for name in _SHOWN] + [
                "" if per_byte is None else f"{per_byte:.2f}"
            ]
            cells.append(" ".join(f"{mix.get(name, 0):{len(name)}}" for name in _MIX))
        table.add_row(*(("", "", "") if case == before else case), one.target, *cells, verdict.word)
        before = case
    console.print(table)
    for verdict in verdicts:
        kernel, shape, dtype, target = verdict.measurement.key
        for line in verdict.failures + [f"warning: {text}" for text in verdict.warnings]:
            console.print(f"{kernel} ({shape}, {dtype}) on {target}: {line}")
    failed = sum(bool(verdict.failures) for verdict in verdicts)
    new = sum(verdict.is_new for verdict in verdicts)
    notes = [f"{len(verdicts)} compiled with Triton {provenance().triton}, {failed} failed"]
    notes += [f"{new} without a baseline: --update records them"] if new else []
    console.print("\n" + "; ".join(notes))


def document(verdicts: Sequence[Verdict], peers: Sequence[Verdict] = ()) -> dict[str, Any]:
    """Return every measurement with its metrics and verdict, and their origin, for JSON.

    Those of other packages are apart.
    """
    found: dict[str, Any] = {
        "passed": not any(verdict.failures for verdict in verdicts),
        "provenance": asdict(provenance()),
        "kernels": [asdict(verdict) for verdict in verdicts],
    }
    if peers:
        found["peers"] = [asdict(verdict.measurement) for verdict in peers]
    return found

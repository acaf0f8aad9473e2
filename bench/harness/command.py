"""The command `python -m bench`: it measures, prints and appends."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from dataclasses import asdict
from itertools import groupby
from typing import Any

from bench import peers
from bench.harness.arguments import ArgumentParser
from bench.harness.cells import TIERS, Cell, WrongResultError
from bench.harness.measurement import (
    QUICK_ROUNDS,
    ROUNDS,
    Counted,
    Measurement,
    groups,
    measure_together,
    runs_here,
)
from bench.harness.registry import cells, suites, unavailable
from hybrid_kv.errors import CheckFailedError, HybridKVError
from hybrid_kv.measure.dashboard.words import duration
from hybrid_kv.measure.results import append_rows, check_writable
from hybrid_kv.measure.timing.case import ENGINE

Results = Sequence[Measurement] | Sequence[Counted]


def _columns(results: Results) -> dict[str, str]:
    """Return the columns after the parameters of a group of cells."""
    shown: dict[str, str] = {}
    for one in results:
        if isinstance(one, Counted):
            shown |= {
                f"{name}, {count.unit}": f"{count.value:,}" for name, count in one.counts.items()
            }
        elif "subject" in one.cell.params:
            ratio = (
                f" ({one.ratio.value:.2f}; {one.ratio.low:.2f} to {one.ratio.high:.2f})"
                if one.ratio
                else ""
            )
            shown[str(one.cell.params["subject"])] = duration(1e9 * one.time.value) + ratio
        else:
            half = (one.time.high - one.time.low) / 2 / one.time.value
            error = one.receipt.max_error
            shown |= {
                "time": duration(1e9 * one.time.value),
                "± %": f"{100 * half:.1f}",
                "largest error": f"{error:.1g}",
            }
    return shown


def _print_table(rows: Sequence[Results]) -> None:
    import pandas as pd

    first = rows[0][0].cell
    kind = "exact" if first.tier == "count" else f"{first.tier} time"
    title = f"{first.suite}/{first.benchmark}, {kind}"
    if "subject" in first.params:
        title += f" (how many times that of {ENGINE})"
    where = [name for name in first.params if name != "subject"]
    lines = [
        {name: str(results[0].cell.params[name]) for name in where} | _columns(results)
        for results in rows
    ]
    print(title, pd.DataFrame(lines).fillna("").to_string(index=False), "", sep="\n")


def _chosen(
    quick: bool, chosen: Sequence[str], tiers: Sequence[str], select: Sequence[str] = ()
) -> list[Cell]:
    """Return the cells to measure; say what is left out.

    Raises:
        HybridKVError: no cell is left.
    """
    found = [
        cell
        for cell in cells(quick)
        if cell.suite in (chosen or suites())
        and cell.tier in (tiers or TIERS)
        and (not select or any(part.lower() in cell.key.lower() for part in select))
    ]
    for suite, reason in unavailable().items():
        if not chosen or suite in chosen:
            print(f"no {suite}: {reason}", file=sys.stderr)
    here = [cell for cell in found if runs_here(cell)]
    if len(here) < len(found):
        print(f"{len(found) - len(here)} cells need a GPU and are left out", file=sys.stderr)
    if not here:
        raise HybridKVError(
            f"no cell of {', '.join([*chosen, *tiers, *select]) or 'any suite'} runs on this "
            "machine"
        )
    return here


def measure(chosen: Sequence[Cell], rounds: int, out: str | None, as_json: bool = False) -> int:
    """Measure, append, and print a table as soon as its benchmark is done.

    Returns 1 if a promise is broken, else 0.

    Raises:
        CheckFailedError: a wrong result.
        HybridKVError: the rows cannot be written.
    """
    if out:
        check_writable(out)
    failed: list[Measurement] = []
    documents: list[dict[str, Any]] = []
    for _, together in groupby(groups(chosen), lambda group: (group[0].suite, group[0].benchmark)):
        table: list[Results] = []
        for group in together:
            try:
                table.append(measure_together(group, rounds))
            except WrongResultError as error:
                raise CheckFailedError(f"error: {error}; nothing was timed") from None
            rows = [row for one in table[-1] for row in one.rows()]
            if out:
                append_rows(out, rows)
            documents += [asdict(row) for row in rows]
            failed += [
                one for one in table[-1] if isinstance(one, Measurement) and one.verdict == "fail"
            ]
        if not as_json:
            _print_table(table)
    if as_json:
        print(json.dumps(documents, indent=2))
    for one in failed:
        assert one.ratio is not None
        line = (
            f"fail: {one.cell.key}: {one.ratio.value:.2f} times the engine path, "
            f"needs {one.cell.promise}"
        )
        print(line, file=sys.stderr if as_json else sys.stdout)
    return int(bool(failed))


def main(arguments: Sequence[str] | None = None) -> int:
    """See `measure`."""
    parser = ArgumentParser("python -m bench")
    parser.add_argument("--quick", action="store_true", help="a few cells of every suite")
    parser.add_argument(
        "--suite",
        action="append",
        default=[],
        choices=suites(),
        help="only this one; may be repeated",
    )
    parser.add_argument(
        "--tier", action="append", default=[], choices=TIERS, help="only this one; may be repeated"
    )
    parser.add_argument(
        "-k",
        dest="select",
        action="append",
        default=[],
        help="only what has this in its name; may be repeated",
    )
    parser.add_argument("--json", action="store_true", help="print JSON instead of tables")
    parser.add_argument("--out", metavar="CSV", help="append one row per measurement")
    parser.add_argument(
        "--peers", nargs="+", default=[], metavar="FOLDER", help="unpacked wheels to compare with"
    )
    options = parser.parse_args(arguments)
    peers.use(options.peers)
    chosen = _chosen(options.quick, options.suite, options.tier, options.select)
    return measure(chosen, QUICK_ROUNDS if options.quick else ROUNDS, options.out, options.json)

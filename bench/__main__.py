"""`python -m bench [--quick] [--suite kernel_blocks] [--out results/microbench.csv]`."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

from bench import kernel_blocks
from hybrid_kv.config import HybridKVError
from hybrid_kv.results import append_rows, check_writable


def _print_tables(measurements: Sequence[Sequence[kernel_blocks.Measurement]]) -> None:
    from rich.console import Console
    from rich.table import Table

    console = Console(width=None if sys.stdout.isatty() else 150)
    for benchmark, title in (
        ("expand", "One append: CPU time in ns (how many times the engine path)"),
        (
            "step",
            "One step: CPU time in us (how many times the engine path); device: with write and gather",
        ),
    ):
        cells = [cell for cell in measurements if cell[0].benchmark == benchmark]
        if not cells:
            continue
        scale, digits = (1e9, 0) if benchmark == "expand" else (1e6, 1)
        table = Table(title=title)
        where = [name for name in cells[0][0].params if name not in ("subject", "num_groups")]
        for name in where:
            table.add_column(name)
        for one in cells[0]:
            table.add_column(one.params["subject"], justify="right")
        for cell in cells:
            table.add_row(
                *(str(cell[0].params[name]) for name in where),
                *(f"{one.time.value * scale:,.{digits}f} ({one.ratio.value:.1f})" for one in cell),
            )
        console.print(table)


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure, print, append. Returns 0, 1 (a promise is broken) or 2 (could not run)."""
    parser = argparse.ArgumentParser(prog="python -m bench")
    parser.add_argument("--quick", action="store_true", help="a few cells, about 10 seconds")
    parser.add_argument("--suite", choices=["kernel_blocks"], default="kernel_blocks")
    parser.add_argument("--out", metavar="CSV", help="append one row per measurement")
    options = parser.parse_args(arguments)
    try:
        if options.out:
            check_writable(options.out)
        cells = []
        for cell in kernel_blocks.run(options.quick):
            cells.append(cell)
            if options.out:
                append_rows(options.out, [row for one in cell for row in one.rows()])
    except HybridKVError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except kernel_blocks.WrongResultError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    _print_tables(cells)
    failed = [one for cell in cells for one in cell if one.verdict == "fail"]
    for one in failed:
        needed = kernel_blocks.required_ratio(one.benchmark, one.params)
        print(f"fail: {one.benchmark} {one.params}: {one.ratio.value:.2f} times the engine path, needs {needed}")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())

"""Cut a CSV of results to its newest rows: what is kept in git."""

from __future__ import annotations

from pathlib import Path

from hybrid_kv.files import write_whole
from hybrid_kv.results.store import read_rows

STATIC_SUITE = "kernels"  # of which only what changed is appended


def trim_file(file: Path) -> tuple[int, int]:
    """Keep the rows of the newest run of each benchmark on each machine; returns how many there were and are.

    Of static kernel metrics the newest row of each is kept. Nothing may append to the file meanwhile.

    Raises:
        HybridKVError: the file cannot be read or written.
    """
    rows = read_rows(file)
    header, *lines = file.read_bytes().split(b"\n")
    benchmark = ["suite", "benchmark", "machine", "device"]
    of_newest = rows["run_id"] == rows.groupby(benchmark)["run_id"].transform("last")
    is_last = ~rows.duplicated([*benchmark, "params", "metric"], keep="last")
    kept = of_newest.where(rows["suite"] != STATIC_SUITE, is_last)
    chosen = [line for line, keep in zip(lines, kept, strict=False) if keep]
    write_whole(file, b"\n".join([header, *chosen, b""]))
    return len(rows), len(chosen)

"""`python -m bench.harness.history N`: asv over the last N commits, quick cells only, and its pages.

Each commit is built as a wheel, from a clone that asv makes: what is not committed is not measured. The benchmarks
themselves are those of this folder. A commit that lacks an interface loses the benchmarks that need it and no others.
"""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import torch

from bench.harness import asv_classes
from bench.harness.cells import Cell
from bench.harness.measurement import runs_here
from bench.harness.registry import cells
from hybrid_kv.errors import HybridKVError, run_command
from hybrid_kv.results import provenance

ROOT = Path(__file__).resolve().parents[2]
PEAKS = r"^end_to_end\.peakmem_generate\('(reference|all)'\)$"


def machine_name() -> str:
    """Of this hardware and what runs on it: asv would draw one line through a change of either."""
    here = provenance()
    parts = [here.machine]
    if torch.cuda.is_available():
        query = ("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader")
        driver = subprocess.run(query, capture_output=True, text=True, check=True).stdout.split()[0]
        parts = [here.device, f"driver {driver}"]
    parts += [f"torch {here.torch}", f"triton {here.triton or 'none'}"]
    return re.sub(r"[^a-z0-9.+]+", "-", " ".join(parts).lower()).strip("-")


def chosen() -> list[Cell]:
    """One quick cell of every suite and tier, without rivals: each costs a process per commit, which imports torch."""
    found: dict[tuple[str, str], Cell] = {}
    for cell in cells(quick=True):
        first = found.get((cell.suite, cell.tier), cell)
        if runs_here(cell) and cell.promise is None and cell.benchmark == first.benchmark:
            found[cell.suite, cell.tier] = cell
    return list(found.values())


def pattern(chosen_cells: Sequence[Cell]) -> str:
    """For asv's `--bench`; of exact numbers the first of a cell."""
    names = [
        asv_classes.asv_name(cell, method)
        for cell in chosen_cells
        for method in list(asv_classes.method_names(cell))[: 1 if cell.tier == "count" else None]
    ]
    return "|".join([PEAKS, *(f"^{re.escape(name)}$" for name in names)])


def _asv(*arguments: str, given: str = "") -> int:
    """Its exit code. Ctrl-C ends it with the processes that it started, which would otherwise go on."""
    command = (sys.executable, "-m", "asv", *arguments)
    with subprocess.Popen(command, cwd=ROOT, stdin=subprocess.PIPE, text=True, start_new_session=True) as process:
        try:
            process.communicate(given)
        except BaseException:
            os.killpg(process.pid, signal.SIGKILL)
            raise
    return process.returncode


def main(arguments: Sequence[str] | None = None) -> int:
    """Returns 0, or 2 if asv failed; a benchmark that failed on some commit is a gap in its line.

    Raises:
        HybridKVError: wrong usage, or no checkout.
    """
    given = sys.argv[1:] if arguments is None else arguments
    number = "".join(given) or "5"
    if len(given) > 1 or not re.fullmatch(r"[1-9]\d*", number):
        raise HybridKVError(f"{' '.join(given)!r} is no number of commits; give one of 1 or more")
    log = subprocess.run(("git", "rev-list", f"-n{number}", "HEAD"), cwd=ROOT, capture_output=True, text=True)
    if log.returncode:
        raise HybridKVError(f"{ROOT} is no git checkout with a commit; clone hybrid-kv and run this there")
    machine = machine_name()
    run = ("run", "--machine", machine, "--bench", pattern(chosen()), "-a", "rounds=1", "HASHFILE:-")
    for step in (("machine", "--yes", "--machine", machine), run, ("publish",)):
        # 2 is asv's word for a benchmark that failed.
        if _asv(*step, given=log.stdout if step is run else "") not in (0, 2):
            return 2
    print(f"{ROOT / '.asv' / 'html'}: asv preview shows it")
    return 0


if __name__ == "__main__":
    run_command(main)

"""asv's quick benchmarks over commits, as rows.

    python -m bench.harness.history [N] [--range A..B] [--steps n]

asv builds each commit, from a clone that it makes: what is not committed is not measured. The
benchmarks are those of this folder. A commit that lacks an interface loses the benchmarks that need
it and no others. What asv has measured already is not measured again, so an interrupted run goes on
where it was.
"""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from argparse import Namespace
from collections.abc import Sequence
from pathlib import Path

import torch

from bench.harness.arguments import ArgumentParser
from bench.harness.history_rows import DATA_SET, keep_rows
from hybrid_kv.errors import HybridKVError, run_command
from hybrid_kv.measure.results import provenance

ROOT = Path(__file__).resolve().parents[2]
# A few that touch every layer: a commit takes half a minute.
BENCHMARKS = (
    "block_tables.Step.time_step('nemotron-3-nano', 'decode 64')",
    "block_tables.Total.time_total('16 of 256 append, width 40', 'engine')",
    "scheduler.Decode.time_decode('none', 0, 16)",
    "scheduler.Decode.time_decode('all', 3, 16)",
    "scheduler.Admit.time_admit('all', 3, 16)",
    "engine_step.DecodeBlock.time_decode_block('none', 0, 4)",
    "engine_step.DecodeBlock.time_decode_block('all', 3, 4)",
    "end_to_end.Nemotron.time_nemotron('all', 4)",
    "kernel_blocks.Step.time_step('decode, 16 of 256 append 1', 8, 'engine')",
    "rivals.Lead.track_ratio('decode, 16 of 256 append 1', 8, 'vllm 0.32 V2')",
    "prefix_lookup.Hit.time_hit('all', 8192, 'all')",
    "state_update.Slots.time_slots('nemotron-3-nano-tp8', 2, 3)",
    "memory.Held.track_most('all', 3)",
    "memory.Plan.track_bytes_per_request('nemotron-3-nano', 'all', 3)",
)
ON_A_GPU = (
    "block_tables.UpdateKernel.time_update_kernel_sync('nemotron-3-nano', 'decode 64')",
    "kernel_blocks.ExpandDevice.time_expand_device_sync(1024, 34, 'engine')",
)
BENCHMARK_FAILED = 2  # asv's exit code; of a commit that lacks an interface it is a gap


def machine_name() -> str:
    """Return a name of this hardware and what runs on it.

    asv would draw one line through a change of either.
    """
    here = provenance()
    parts = [here.machine]
    if torch.cuda.is_available():
        query = ("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader")
        driver = subprocess.run(query, capture_output=True, text=True, check=True).stdout.split()[0]
        parts = [here.device, f"driver {driver}"]
    parts += [f"torch {here.torch}", f"triton {here.triton or 'none'}"]
    return re.sub(r"[^a-z0-9.+]+", "-", " ".join(parts).lower()).strip("-")


def pattern() -> str:
    """Return what asv's `--bench` takes for the benchmarks that this machine can run."""
    names = BENCHMARKS + (ON_A_GPU if torch.cuda.is_available() else ())
    return "|".join(f"^{re.escape(name)}$" for name in names)


def parsed(arguments: Sequence[str] | None) -> Namespace:
    """Return the options."""
    parser = ArgumentParser(
        prog="python -m bench.harness.history", description="asv's quick benchmarks over commits"
    )
    parser.add_argument(
        "number", nargs="?", default="5", help="of the last commits; default: %(default)s"
    )
    parser.add_argument(
        "--range", dest="commits", default="", help="commits A..B instead, of the first parents"
    )
    parser.add_argument("--steps", default="", help="measure so many of them, at equal distances")
    options = parser.parse_args(arguments)
    for name in ("number", "steps"):
        value = getattr(options, name)
        if value and not re.fullmatch(r"[1-9]\d*", value):
            raise HybridKVError(f"{value!r} is no number of commits; give one of 1 or more")
    return options


def commits_of(options: Namespace) -> list[str]:
    """Return the chosen commits, newest first.

    Raises:
        HybridKVError: git knows no such commits, or this is no checkout.
    """
    wanted = [options.commits] if options.commits else [f"-n{options.number}", "HEAD"]
    command = ("git", "rev-list", "--first-parent", *wanted, "--")
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    commits = done.stdout.split()
    if done.returncode or not commits:
        what = options.commits or "HEAD"
        raise HybridKVError(
            f"git has no commits {what} in {ROOT}; clone hybrid-kv whole, and give A..B or a number"
        )
    return picked(commits, int(options.steps or len(commits)))


def picked(commits: Sequence[str], steps: int) -> list[str]:
    """Return so many commits at equal distances, the first and the last among them."""
    if steps >= len(commits):
        return list(commits)
    if steps == 1:
        return [commits[0]]
    last = len(commits) - 1
    return [commits[round(index * last / (steps - 1))] for index in range(steps)]


def run_asv(*arguments: str, given: str = "") -> int:
    """Return asv's exit code.

    Ctrl-C ends it with the processes that it started, which would otherwise go on.
    """
    command = (sys.executable, "-m", "asv", *arguments)
    with subprocess.Popen(
        command, cwd=ROOT, stdin=subprocess.PIPE, text=True, start_new_session=True
    ) as process:
        try:
            process.communicate(given)
        except BaseException:
            os.killpg(process.pid, signal.SIGKILL)
            raise
    return process.returncode


def main(arguments: Sequence[str] | None = None) -> int:
    """Return 0, 1 if asv measured none of the commits, or 2 if it failed.

    Raises:
        HybridKVError: wrong usage, or no checkout.
    """
    commits = commits_of(parsed(arguments))
    machine = machine_name()
    if run_asv("machine", "--yes", "--machine", machine):
        return 2
    options = ("--machine", machine, "--skip-existing", "--bench", pattern())
    if run_asv("run", *options, "HASHFILE:-", given="\n".join(commits) + "\n") not in (
        0,
        BENCHMARK_FAILED,
    ):
        return 2
    count = keep_rows(machine, commits)
    if not count:
        print(f"error: asv measured none of {len(commits)} commits", file=sys.stderr)
        return 1
    print(f"{count} rows of {len(commits)} commits are in {DATA_SET}")
    if run_asv("publish", "--no-pull"):
        return 2
    print(f"{ROOT / '.asv' / 'html'}: asv preview shows it")
    return 0


if __name__ == "__main__":
    run_command(main)

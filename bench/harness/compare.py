"""`hybrid-kv compare`: is HEAD slower than BASE? Both versions run side by side, now, on this machine.

Only `hybrid_kv/` differs between the sides: the benchmarks are those of the working tree, for both. Where an older
version lacks what one of them needs, it runs the benchmark of the same name that it came with, and the table says so;
a benchmark that times something else than before therefore gets another name.

How a time is compared. A *start* is a process that imports torch and forks *worker pairs*, one process per version,
on one core, fed alternately in random order (`worker`). One pair gives one log-ratio per cell, and pairs are the
unit of inference (`inference`): two processes of equal code differ by what memory they got, by 1 to 5 %, and no
number of samples inside one pair averages that away. Forking from one start shares most of the layout: the spread
between pairs of equal code fell from 2.2 to 1.6 % on average over 14 benchmarks, from 5.2 to 1.5 % for the worst. Over
6 starts of 6 pairs no benchmark varied more between starts than its pairs do (F test, 5 %), so all pairs of a look come
from one start.

When it is an alarm. The first look at all cells only picks suspects. They are measured again, in fresh processes, with
twice the pairs and three times the samples; that repeat alone is evidence, Holm's procedure over the suspects bounds
the chance of any false alarm in it by `alpha`, and what the first look selected cannot bias it. A change below
`min_effect` is none.

Launches on a GPU are compared in the same way, by the device's events; nights do that with the last commit that passed
(`make gpu-compare`). It has never run on a GPU: its error rates there are unknown until nights without a new commit,
which compare equal code, have counted them. Creeping by less than `min_effect` a night is left to the history's steps.
"""

from __future__ import annotations

import io
import json
import math
import os
import random
import shutil
import signal
import socket
import subprocess
import sys
import zipfile
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, TextIO

from tqdm import tqdm

from bench.harness import worker
from bench.harness.inference import center, log_ratio, p_faster, p_slower, typical
from hybrid_kv.config import ConfigError, HybridKVError

ROOT = Path(__file__).resolve().parents[2]
WORKING_TREE = "."
SIDES = ("BASE", "HEAD")
ANSWER_SECONDS = 600.0
END_SECONDS = 30.0
# One thread, as the clock sees only one. And memory that was freed stays with the process: glibc's own thresholds move
# with what was freed before, so that one process maps its buffers anew in each call and its twin does not (2.7 times
# the time of `causal_conv1d/prefill` were seen).
ENVIRONMENT = {
    **dict.fromkeys(("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS"), "1"),
    "MALLOC_MMAP_THRESHOLD_": str(1 << 25),
    "MALLOC_TRIM_THRESHOLD_": str(1 << 32),
    "MALLOC_TOP_PAD_": str(1 << 26),
    # Empty is off: each worker would compile the version anew, 1 s of work.
    "PYTHONDONTWRITEBYTECODE": "",
}
GPU_SAMPLES = 40  # launches: each is short


@dataclass(frozen=True)
class Design:
    """How much is measured, and what is an alarm.

    Attributes:
        pairs: worker pairs of the first look; the repeat has twice as many.
        samples: of each side in a worker pair; the repeat takes three times as many. They matter on a busy machine:
            with 10 processes on 2 cores the standard deviation between pairs of equal code was 3.1, 2.5 and 1.7 % for
            8, 16 and 32, on average over the benchmarks that `bench.harness.operating_curve` plants in.
        sample_seconds: that one sample should take.
        cell_seconds: of samples of one side in a worker pair; a slow cell has fewer samples, at least 2.
        min_effect: a relative change that does not matter.
        screen: p-value below which the first look makes a suspect.
        alpha: chance of any false alarm in a repeat.
    """

    pairs: int = 6
    samples: int = 16
    sample_seconds: float = 1.5e-3
    cell_seconds: float = 0.05
    min_effect: float = 0.01
    screen: float = 0.1
    alpha: float = 0.01

    def __post_init__(self) -> None:
        if self.pairs < 3:
            raise ConfigError(f"--pairs {self.pairs}: fewer than 3 worker pairs have no interval; give 3 or more")


# ---- versions ----


@dataclass(frozen=True)
class Revision:
    """A version of `hybrid_kv`: what the user called it and the commit that it is, or that it was edited from."""

    name: str
    commit: str
    dirty: bool = False

    def __str__(self) -> str:
        if self.name != WORKING_TREE:
            return self.name if self.commit.startswith(self.name) else f"{self.name} ({self.commit[:9]})"
        return f"working tree ({self.commit[:9]}{', dirty' if self.dirty else ''})"


def _git(root: Path, *arguments: str) -> bytes | None:
    try:
        done = subprocess.run(("git", *arguments), cwd=root, capture_output=True, check=True)
    except (OSError, subprocess.CalledProcessError):
        return None
    return done.stdout


def find_revision(root: Path, name: str) -> Revision:
    """Look a revision up.

    Raises:
        ConfigError: git does not know it, or `root` is no checkout.
    """
    top = _git(root, "rev-parse", "--show-toplevel")
    if top is None or Path(os.fsdecode(top.strip())).resolve() != root.resolve():
        raise ConfigError("compare needs a git checkout of hybrid-kv; clone it and run pip install -e . there")
    wanted = "HEAD" if name == WORKING_TREE else name
    commit = _git(root, "rev-parse", "--verify", "--quiet", "--end-of-options", f"{wanted}^{{commit}}")
    if commit is None:
        raise ConfigError(f"git knows no revision {name!r}; give a commit, tag or branch, or . for the working tree")
    dirty = name == WORKING_TREE and bool(_git(root, "status", "--porcelain", "--", "hybrid_kv"))
    return Revision(name, commit.decode().strip(), dirty)


def place(root: Path, revision: Revision, folder: Path) -> None:
    """Put the revision's `hybrid_kv/` into `folder` with the working tree's `bench/`, and its own `bench/` into `own`.

    What measures, `hybrid_kv/timing`, is the working tree's as well: one clock for both sides. Copies, so that an edit
    during the run cannot mix two versions.

    Raises:
        ConfigError: the revision has no folder `hybrid_kv`.
    """
    copied = ["bench", "hybrid_kv/timing"]
    if revision.name == WORKING_TREE:
        copied = ["bench", "hybrid_kv"]
    else:
        if not _extract(root, revision, "hybrid_kv", folder):
            raise ConfigError(f"revision {revision} has no folder hybrid_kv; give a later one")
        _extract(root, revision, "bench", folder / worker.OWN)
    for name in copied:
        if (root / name).is_dir():
            ignored = shutil.ignore_patterns("__pycache__")
            shutil.copytree(root / name, folder / name, ignore=ignored, dirs_exist_ok=True)


def _extract(root: Path, revision: Revision, name: str, folder: Path) -> bool:
    """Put a folder of the revision into `folder`; False if it has none of that name."""
    archive = _git(root, "archive", "--format=zip", revision.commit, name)
    if archive is None:
        return False
    with zipfile.ZipFile(io.BytesIO(archive)) as files:
        files.extractall(folder)
    return True


# ---- workers ----


Answers = tuple[dict[str, Any], dict[str, Any]]  # of BASE and HEAD


class Pair:
    """A worker of each version. One answers at a time, since they share a core.

    Attributes:
        alive: until one of them died or did not answer.
    """

    def __init__(self, streams: Sequence[TextIO], rng: random.Random) -> None:
        self._streams = streams
        self._rng = rng
        self.alive = True

    def ask(self, side: int, do: str, **arguments: Any) -> dict[str, Any]:
        """The answer; `failed` in it also if there is none."""
        stream = self._streams[side]
        try:
            stream.write(json.dumps({"do": do, **arguments}) + "\n")
            stream.flush()
            if line := stream.readline():
                return dict(json.loads(line))
            reason = "died; its last words, if any, are above"
        except TimeoutError:
            reason = f"did not answer within {ANSWER_SECONDS:.0f} s"
        except OSError:
            reason = "died; its last words, if any, are above"
        self.alive = False
        return {"failed": f"the worker, asked to {do}, {reason}"}

    def ask_both(self, do: str, *, only_head: Mapping[str, Any] | None = None, **arguments: Any) -> Answers:
        """In random order; the answers of BASE and HEAD, which alone is given `only_head`."""
        arguments_of = (arguments, {**arguments, **(only_head or {})})
        first = self._rng.randrange(2)
        answers = {side: self.ask(side, do, **arguments_of[side]) for side in (first, 1 - first)}
        return answers[0], answers[1]

    def close(self) -> None:
        """Let both end, with the memory that they hold."""
        for stream in self._streams:
            _close(stream)


def _close(stream: TextIO) -> None:
    with suppress(OSError):  # what was left to write to a dead worker
        stream.close()


def _end(process: subprocess.Popen[bytes]) -> None:
    """Wait for a start whose connections are closed; a worker that hangs in a case would never notice."""
    try:
        process.wait(timeout=END_SECONDS)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()


@contextmanager
def start(folders: Sequence[Path], pairs: int, rng: random.Random) -> Iterator[list[Pair]]:
    """One start with its worker pairs; what was not closed before ends with the context."""
    cores = sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else [None]
    # Closed connections end the workers, and only then there is something to wait for.
    with ExitStack() as processes, ExitStack() as connections:
        sides, streams, theirs = [], [], []
        for folder in list(folders) * pairs:
            ours, other = socket.socketpair()
            theirs.append(connections.enter_context(other))
            sides.append({"folder": str(folder), "fd": other.fileno(), "seed": rng.randrange(2**32)})
            ours.settimeout(ANSWER_SECONDS)
            streams.append(ours.makefile("rw", encoding="utf-8"))
            connections.callback(_close, streams[-1])
            ours.close()  # the stream keeps it open
        process = subprocess.Popen(
            [
                sys.executable,
                str(folders[0] / "bench" / "harness" / "worker.py"),
                json.dumps({"core": rng.choice(cores), "sides": sides}),
            ],
            # Hash seed and core are one start's: common to both sides of its pairs.
            env={**os.environ, **ENVIRONMENT, "PYTHONHASHSEED": str(rng.randrange(2**32))},
            pass_fds=[other.fileno() for other in theirs],
            stdin=subprocess.DEVNULL,
            start_new_session=True,  # one group to kill; an interrupt reaches them as the end of their input
        )
        processes.callback(_end, process)
        for other in theirs:
            other.close()
        yield [Pair(streams[i : i + 2], rng) for i in range(0, len(streams), 2)]


# ---- measuring ----


@dataclass(frozen=True)
class CellInfo:
    """What the driver knows of a cell; `make` stays with the workers."""

    suite: str
    benchmark: str
    params: Mapping[str, Any]
    tier: str
    key: str


@dataclass(frozen=True)
class Failure:
    """Why a cell has no times: `wrong result`, `broken at HEAD` (BASE can run it) or `not comparable`."""

    verdict: str
    reason: str


@dataclass
class Times:
    """What worker pairs said about one cell."""

    log_ratios: list[float] = field(default_factory=list)
    seconds: list[tuple[float, float]] = field(default_factory=list)  # per call, of each side
    max_error: float = 0.0
    clock_mhz: list[tuple[int | None, int | None]] = field(default_factory=list)
    own: str = ""  # see `own_benchmarks`

    def suspicious(self, design: Design) -> bool:
        """Whether a first look deserves a repeat; either direction."""
        enough = abs(center(self.log_ratios)) > math.log1p(design.min_effect)
        return enough and min(p_slower(self.log_ratios, 0), p_faster(self.log_ratios, 0)) < design.screen


@dataclass
class Measured:
    """All that was measured of two versions."""

    cells: list[CellInfo]
    first: dict[str, Times] = field(default_factory=dict)
    repeat: dict[str, Times] = field(default_factory=dict)
    counts: dict[str, Answers] = field(default_factory=dict)
    failures: dict[str, Failure] = field(default_factory=dict)


def _failure(answers: Sequence[Mapping[str, Any]]) -> Failure | None:
    """A wrong result before an absent one. BASE's wrong result is not HEAD's fault, but its time means nothing."""
    base, head = answers
    if "wrong" in head:
        return Failure("wrong result", f"HEAD: {head['wrong']}")
    for kind in ("wrong", "failed"):
        if kind in base:
            return Failure("not comparable", f"BASE: {base[kind]}")
    if "failed" in head:
        return Failure("broken at HEAD", head["failed"])
    return None


def own_benchmarks(answers: Sequence[Mapping[str, Any]]) -> str:
    """Which side ran the benchmark that its version came with, and why; empty if none did."""
    return "; ".join(
        f"{side} by its own benchmark, as today's fails there: {answer['own']}"
        for side, answer in zip(SIDES, answers, strict=True)
        if "own" in answer
    )


def measure_cell(pair: Pair, cell: CellInfo, design: Design, times: Times, plant: float = 0.0) -> Failure | None:
    """Add what one worker pair says about one cell to `times`, unless it fails; `plant` slows HEAD down."""
    made = pair.ask_both("make", key=cell.key, only_head={"plant": plant})
    if failure := _failure(made):
        return failure
    # The slower side decides for both: they must do the same between two readings of the clock.
    slower = max(one["seconds"] for one in made)
    if cell.tier == "gpu":
        repeats, blocks, samples = 1, 1, GPU_SAMPLES
    else:
        calls = max(1, round(design.sample_seconds / max(slower, 1e-9)))
        repeats = min(calls, made[0]["max_repeats"])
        blocks = max(1, round(calls / repeats))
        samples = max(2, min(design.samples, int(design.cell_seconds / (slower * repeats * blocks))))
    taken: tuple[list[float], list[float]] = ([], [])
    for _ in range(samples):
        answers = pair.ask_both("sample", repeats=repeats, blocks=blocks)
        if failure := _failure(answers):
            return failure
        for side in (0, 1):
            taken[side].append(answers[side]["seconds"])
    finished = pair.ask_both("finish")
    if failure := _failure(finished):
        return failure
    times.log_ratios.append(log_ratio(*taken))
    times.seconds.append((typical(taken[0]), typical(taken[1])))
    times.max_error = max(times.max_error, *(one["max_error"] for one in (*made, *finished)))
    times.own = own_benchmarks(made)
    times.clock_mhz.append((finished[0]["clock_mhz"], finished[1]["clock_mhz"]))
    return None


def _common_cells(pair: Pair, quick: bool, select: Sequence[str]) -> Measured:
    """The cells whose key contains one of `select`, with a failure for those that only one side has."""
    answers = pair.ask_both("cells", quick=quick)
    for side, answer in zip(SIDES, answers, strict=True):
        if "failed" in answer:
            raise HybridKVError(f"{side}'s benchmarks cannot be loaded: {answer['failed']}")
    listed = [{cell["key"]: CellInfo(**cell) for cell in answer["cells"]} for answer in answers]
    listed_once = {**listed[0], **listed[1]}
    parts = [part.lower() for part in select]
    measured = Measured([cell for key, cell in listed_once.items() if any(part in key.lower() for part in parts)])
    for cell in measured.cells:
        if cell.tier == "gpu" and not answers[0]["cuda"]:
            measured.failures[cell.key] = Failure("not comparable", "it needs a CUDA device")
            continue
        absent = [
            {}
            if cell.key in has or cell.key in answer["own"]
            else {"failed": answer["unavailable"].get(cell.suite, "it has no such benchmark")}
            for has, answer in zip(listed, answers, strict=True)
        ]
        if failure := _failure(absent):
            measured.failures[cell.key] = failure
    if not measured.cells:
        raise ConfigError(f"no benchmark's name contains {' or '.join(select)!r}; hybrid-kv compare HEAD lists them")
    return measured


def _count(folders: Sequence[Path], measured: Measured, rng: random.Random) -> None:
    todo = [cell for cell in measured.cells if cell.tier == "count" and cell.key not in measured.failures]
    while todo:  # once, but for workers that die
        with start(folders, 1, rng) as (pair,):
            while todo and pair.alive:
                key = todo.pop(0).key
                answers = pair.ask_both("count", key=key)
                if failure := _failure(answers):
                    measured.failures[key] = failure
                else:
                    measured.counts[key] = answers


def _look(
    title: str,
    folders: Sequence[Path],
    cells: Sequence[CellInfo],
    design: Design,
    plants: Mapping[str, float],
    failures: dict[str, Failure],
    rng: random.Random,
) -> dict[str, Times]:
    """Times of the cells over fresh worker pairs."""
    found: dict[str, Times] = defaultdict(Times)
    todo = [rng.sample(cells, len(cells)) for _ in range(design.pairs) if cells]  # of each pair
    with tqdm(total=design.pairs * len(cells), desc=title, unit="cell", disable=None, leave=False) as progress:
        while todo:  # once, but for the rest of pairs that die
            with start(folders, len(todo), rng) as started:
                for pair, rest in zip(started, todo, strict=True):
                    while rest and pair.alive:
                        cell = rest.pop()
                        if cell.key not in failures:
                            failure = measure_cell(pair, cell, design, found[cell.key], plants.get(cell.key, 0.0))
                            if failure is not None:
                                failures[cell.key] = failure
                        progress.update()
                    pair.close()
            todo = [rest for rest in todo if rest]
    return {key: times for key, times in found.items() if key not in failures}


@dataclass(frozen=True)
class Comparison:
    """What was compared, and what was measured of it."""

    base: Revision
    head: Revision
    seed: int
    design: Design
    measured: Measured


def compare(
    base: str,
    head: str,
    *,
    root: Path = ROOT,
    quick: bool = True,
    select: Sequence[str] = ("",),
    tiers: Sequence[str] = ("count", "cpu", "gpu"),
    design: Design = Design(),
    seed: int = 0,
    plants: Mapping[str, float] | None = None,
) -> Comparison:
    """Measure two versions; `bench.harness.verdicts` says what it means.

    Args:
        base, head: git revisions, or `.` for the working tree.
        root: the checkout.
        quick: only the cells marked so: a few of each suite.
        select: only cells whose key contains one of these.
        tiers: only cells of these.
        seed: of every random choice: orders, memory layouts, hash seeds.
        plants: by key, the fraction by which HEAD is made slower.

    Raises:
        ConfigError: an unknown revision, or nothing to compare.
        HybridKVError: the benchmarks of a version cannot be listed.
    """
    revisions = [find_revision(root, base), find_revision(root, head)]
    rng = random.Random(seed)
    with TemporaryDirectory(prefix="hybrid-kv-compare-") as temporary:
        folders = [Path(temporary) / name for name in ("0", "1")]  # names of equal length
        for revision, folder in zip(revisions, folders, strict=True):
            folder.mkdir()
            place(root, revision, folder)
        with start(folders, 1, rng) as (clerk,):
            measured = _common_cells(clerk, quick, select)
        if "count" in tiers:
            _count(folders, measured, rng)
        timed = [
            cell
            for cell in measured.cells
            if cell.tier in tiers and cell.tier != "count" and cell.key not in measured.failures
        ]
        shared = (plants or {}, measured.failures, rng)
        measured.first = _look("first look", folders, timed, design, *shared)
        suspected = {key for key, times in measured.first.items() if times.suspicious(design)}
        suspects = [cell for cell in timed if cell.key in suspected]
        closer = replace(
            design, pairs=2 * design.pairs, samples=3 * design.samples, cell_seconds=3 * design.cell_seconds
        )
        measured.repeat = _look("repeat", folders, suspects, closer, *shared)
        measured.cells = [cell for cell in measured.cells if cell.tier in tiers]
    return Comparison(*revisions, seed, design, measured)

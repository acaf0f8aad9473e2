"""Compare two versions: `hybrid-kv compare` asks whether HEAD is slower than BASE.

Both versions run side by side, now, on this machine.

Only `hybrid_kv/` differs between the sides: the benchmarks are those of the working tree, for both.
Where an older version lacks what one of them needs, it runs the benchmark of the same name that it
came with, and the table says so; a benchmark that times something else than before therefore gets
another name.

How a time is compared. A *start* is a process that imports torch and forks *worker pairs*, one
process per version, on one core, fed alternately in random order (`worker`). One pair gives one
log-ratio per cell, and pairs are the unit of inference (`inference`): two processes of equal code
differ by what memory they got, by 1 to 5 %, and no number of samples inside one pair averages that
away. Forking from one start shares most of the layout: the spread between pairs of equal code fell
from 2.2 to 1.6 % on average over 14 benchmarks, from 5.2 to 1.5 % for the worst. Over 6 starts of 6
pairs no benchmark varied more between starts than its pairs do (F test, 5 %), so all pairs of a
look come from one start.

When it is an alarm: see `judgement`.

Launches on a GPU are compared in the same way, by the device's events; nights do that with the last
commit that passed (`make gpu-compare`). It has never run on a GPU: its error rates there are
unknown until nights without a new commit, which compare equal code, have counted them. Creeping by
less than `min_effect` a night is left to the history's steps.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from bench.harness.cells import TIERS, CellInfo
from bench.harness.inference import log_ratio, typical
from bench.harness.judgement import Design, Times, confirmed
from bench.harness.pairs import Answers, Pair, start
from bench.harness.versions import Revision, find_revision, place
from hybrid_kv.check.progress import progress_bar
from hybrid_kv.config import ConfigError, HybridKVError

ROOT = Path(__file__).resolve().parents[2]
SIDES = ("BASE", "HEAD")
STANDARD = Design()
GPU_SAMPLES = 40  # launches: each is short


@dataclass(frozen=True)
class Failure:
    """The reason why a cell has no times.

    It is `wrong result`, `broken at HEAD` (BASE can run it) or `not comparable`.
    """

    verdict: str
    reason: str


@dataclass
class Measured:
    """All that was measured of two versions."""

    cells: list[CellInfo]
    first: dict[str, Times] = field(default_factory=dict)
    repeat: dict[str, Times] = field(default_factory=dict)
    counts: dict[str, Answers] = field(default_factory=dict)
    failures: dict[str, Failure] = field(default_factory=dict)


def _failure(answers: Sequence[Mapping[str, Any]]) -> Failure | None:
    """Return the failure among two sides' answers, a wrong result before an absent one.

    BASE's wrong result is not HEAD's fault, but its time means nothing.
    """
    base, head = answers
    if "wrong" in head:
        return Failure("wrong result", f"HEAD: {head['wrong']}")
    for kind in ("wrong", "failed"):
        if kind in base:
            return Failure("not comparable", f"BASE: {base[kind]}")
    if "failed" in head:
        return Failure("broken at HEAD", head["failed"])
    return None


def own_benchmarks(answers: Sequence[Mapping[str, Any]]) -> dict[str, str]:
    """Return which side ran the benchmark of its own version, and why today's failed there."""
    return {
        side: answer["own"] for side, answer in zip(SIDES, answers, strict=True) if "own" in answer
    }


def measure_cell(
    pair: Pair, cell: CellInfo, design: Design, times: Times, inject: float = 0.0
) -> Failure | None:
    """Add what one worker pair says about one cell to `times`, unless it fails.

    `inject` slows HEAD down.
    """
    made = pair.ask_both("make", key=cell.key, only_head={"inject": inject})
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
        samples = max(
            2, min(design.samples, int(design.cell_seconds / (slower * repeats * blocks)))
        )
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


def _common_cells(pair: Pair, selection: Selection) -> Measured:
    """Return the cells of a selection, in all tiers.

    Those that only one side has get a failure.
    """
    answers = pair.ask_both("cells", quick=selection.quick)
    for side, answer in zip(SIDES, answers, strict=True):
        if "failed" in answer:
            raise HybridKVError(f"{side}'s benchmarks cannot be loaded: {answer['failed']}")
    listed = [
        {cell.key: cell for cell in (CellInfo(*one) for one in answer["cells"])}
        for answer in answers
    ]
    listed_once = {**listed[0], **listed[1]}
    parts = [name.lower() for name in selection.names]
    measured = Measured(
        [cell for key, cell in listed_once.items() if any(part in key.lower() for part in parts)]
    )
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
        raise ConfigError(
            f"no benchmark's name contains {' or '.join(selection.names)!r}; "
            "hybrid-kv compare HEAD lists them"
        )
    return measured


def _count(folders: Sequence[Path], measured: Measured, rng: random.Random) -> None:
    todo = [
        cell
        for cell in measured.cells
        if cell.tier == "count" and cell.key not in measured.failures
    ]
    while todo:  # once, but for workers that die
        with start(folders, 1, rng) as (pair,):
            while todo and pair.alive:
                cell = todo.pop(0)
                answers = pair.ask_both("count", key=cell.key)
                if failure := _failure(answers):
                    measured.failures[cell.key] = failure
                else:
                    measured.counts[cell.key] = answers


@dataclass
class Looks:
    """Looks at cells, each over fresh worker pairs."""

    folders: Sequence[Path]
    injects: Mapping[str, float]
    failures: dict[str, Failure]
    rng: random.Random

    def take(
        self, title: str, cells: Sequence[CellInfo], design: Design, found: dict[str, Times]
    ) -> None:
        """Add what `design.pairs` pairs say to `found`.

        A cell that fails loses what it has there.
        """
        todo = [
            self.rng.sample(cells, len(cells)) for _ in range(design.pairs) if cells
        ]  # of each pair
        with progress_bar(
            total=design.pairs * len(cells), desc=title, unit="cell", leave=False
        ) as progress:
            while todo:  # once, but for the rest of pairs that die
                with start(self.folders, len(todo), self.rng) as started:
                    for pair, rest in zip(started, todo, strict=True):
                        while rest and pair.alive:
                            self._measure(pair, rest.pop(), design, found)
                            progress.update()
                        pair.close()
                todo = [rest for rest in todo if rest]

    def _measure(self, pair: Pair, cell: CellInfo, design: Design, found: dict[str, Times]) -> None:
        if cell.key in self.failures:
            return
        times = found.setdefault(cell.key, Times())
        failure = measure_cell(pair, cell, design, times, self.injects.get(cell.key, 0.0))
        if failure is not None:
            self.failures[cell.key] = failure
            del found[cell.key]


Take = Callable[[str, Sequence[CellInfo], Design, dict[str, Times]], None]


def take_times(measured: Measured, timed: Sequence[CellInfo], design: Design, take: Take) -> None:
    """Measure the first look and the repeat of what it suspects.

    More pairs of either are measured while an interval is too wide.

    Args:
        take: adds what `design.pairs` worker pairs say about cells; see `Looks.take`.
    """
    first, repeat = measured.first, measured.repeat
    take("first look", timed, design, first)

    def calm_and_wide(times: Times) -> bool:
        return not times.suspicious(design) and times.wants_more(design)

    while wide := [cell for cell in timed if cell.key in first and calm_and_wide(first[cell.key])]:
        take("more pairs", wide, design, first)
    suspects = [cell for cell in timed if cell.key in first and first[cell.key].suspicious(design)]
    take("repeat", suspects, design.closer, repeat)
    alarms = confirmed(first, repeat, design)
    open_still = {
        key for key, times in repeat.items() if not alarms[key][0] and not times.settled(design)
    }
    take("more pairs", [cell for cell in suspects if cell.key in open_still], design.closer, repeat)


@dataclass(frozen=True)
class Comparison:
    """The versions that were compared, and all that was measured of them.

    Attributes:
        unfit: why times of this machine prove nothing; empty: they do.
    """

    base: Revision
    head: Revision
    seed: int
    design: Design
    measured: Measured
    unfit: str = ""


@dataclass(frozen=True)
class Selection:
    """The cells that are compared.

    Attributes:
        quick: only the cells marked so: a few of each suite.
        names: only cells whose key contains one of these.
        tiers: only cells of these.
    """

    quick: bool = True
    names: Sequence[str] = ("",)
    tiers: Sequence[str] = TIERS


QUICK = Selection()


def compare(
    base: str,
    head: str,
    selection: Selection = QUICK,
    *,
    root: Path = ROOT,
    design: Design = STANDARD,
    seed: int = 0,
    injects: Mapping[str, float] | None = None,
) -> Comparison:
    """Measure two versions; `bench.harness.verdicts` says what it means.

    Args:
        base, head: git revisions, or `.` for the working tree.
        root: the checkout.
        seed: of every random choice: orders, memory layouts, hash seeds.
        injects: by key, the fraction by which HEAD is made slower.

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
            measured = _common_cells(clerk, selection)
        if "count" in selection.tiers:
            _count(folders, measured, rng)
        timed = [
            cell
            for cell in measured.cells
            if cell.tier in selection.tiers
            and cell.tier != "count"
            and cell.key not in measured.failures
        ]
        take_times(
            measured, timed, design, Looks(folders, injects or {}, measured.failures, rng).take
        )
        measured.cells = [cell for cell in measured.cells if cell.tier in selection.tiers]
    return Comparison(*revisions, seed, design, measured)

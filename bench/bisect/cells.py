"""Benchmarks of `bench/`, run at one commit or at two by the workers of `hybrid-kv compare`."""

from __future__ import annotations

import random
from collections.abc import Callable, Generator
from dataclasses import dataclass
from pathlib import Path

from bench.bisect.history import Trees
from bench.bisect.profile import TURN_SECONDS, TURNS, Profiles
from bench.bisect.question import NotMeasurableError
from bench.harness import registry
from bench.harness.cells import CellInfo
from bench.harness.compare import Times as Taken
from bench.harness.compare import measure_cell
from bench.harness.judgement import Design
from bench.harness.pairs import Answers, start
from bench.harness.versions import Revision, place
from hybrid_kv.config import ConfigError

AT_ONCE = 4  # worker pairs of a start; most commits have answered after one or two starts
CLOSER = (
    Design().closer
)  # of a repeat: with fewer samples the spread between pairs is twice as large


def find_cell(name: str) -> CellInfo:
    """Return the benchmark whose key is `name`, or the only one whose key contains it.

    Raises:
        ConfigError: no benchmark or several.
    """
    cells = [cell for cell in registry.cells() if cell.promise is None]
    found = [cell for cell in cells if cell.key == name] or [
        cell for cell in cells if name.lower() in cell.key.lower()
    ]
    if not found:
        raise ConfigError(
            f"no benchmark's name contains {name!r}; hybrid-kv compare HEAD --all lists them"
        )
    if len(found) > 1:
        some = ", ".join(cell.key for cell in found[:3])
        raise ConfigError(
            f"-k {name} names {len(found)} benchmarks, such as {some}; give one whole name"
        )
    return found[0]


def fill_benchmarks(root: Path) -> Callable[[str, Path], None]:
    """Return a function that fills `Trees` with a commit's package.

    The benchmarks and the clock are the working tree's.
    """
    return lambda commit, folder: place(root, Revision(commit, commit), folder)


@dataclass
class Runs:
    """One benchmark at any commits.

    Attributes:
        max_error: largest one of the results, which are checked before and after each time.
    """

    trees: Trees
    cell: CellInfo
    rng: random.Random
    max_error: float = 0.0

    def measure(self, base: str, head: str) -> Generator[float, None, None]:
        """Yield log-ratios of HEAD over BASE, one of each worker pair, without end.

        Raises:
            NotMeasurableError: one of them cannot run the benchmark, or its result is wrong.
        """
        folders = [self.trees.of(commit) for commit in (base, head)]
        while True:
            with start(folders, AT_ONCE, self.rng) as pairs:
                for pair in pairs:
                    taken = Taken()
                    if failure := measure_cell(pair, self.cell, CLOSER, taken):
                        raise NotMeasurableError(f"cannot run: {failure.reason}")
                    pair.close()
                    self.max_error = max(self.max_error, taken.max_error)
                    yield taken.log_ratios[0]

    def profile(self, base: str, head: str) -> tuple[Profiles, Profiles]:
        """Return turns of both commits under a profiler; see `profile`.

        Raises:
            NotMeasurableError: as `measure`, or the profiler is missing.
        """
        turns: tuple[list[dict[str, float]], list[dict[str, float]]] = ([], [])
        with start([self.trees.of(commit) for commit in (base, head)], 1, self.rng) as (pair,):
            made = _answered(pair.ask_both("make", key=self.cell.key))
            calls = max(1, round(TURN_SECONDS / max(one["seconds"] for one in made)))
            for _ in range(TURNS):
                for side, answer in zip(
                    turns, _answered(pair.ask_both("profile", calls=calls)), strict=True
                ):
                    side.append(answer["functions"])
        return turns

    def count(self, commit: str) -> dict[str, int]:
        """Return the exact numbers by metric.

        Raises:
            NotMeasurableError: as `measure`.
        """
        folder = self.trees.of(commit)
        with start([folder, folder], 1, self.rng) as (pair,):
            answer = pair.ask(0, "count", key=self.cell.key)
        if "counts" not in answer:
            raise NotMeasurableError(f"cannot run: {answer.get('wrong') or answer['failed']}")
        return {name: value for name, (value, *_) in answer["counts"].items()}


def _answered(answers: Answers) -> Answers:
    for one in answers:
        if failed := one.get("wrong") or one.get("failed"):
            raise NotMeasurableError(f"no profile: {failed}")
    return answers

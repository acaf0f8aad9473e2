"""A swarm: random scenarios of the exact model until its time is over.

Each batch of seeds has features of its own.

What is kept does not grow with the seeds: counts, patterns, settings, and for each rule the first
scenario that broke it before any other, reduced. The seeds of all failures go to a file.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from concurrent.futures.process import BrokenProcessPool
from contextlib import closing
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch

from hybrid_kv.check.guard.cases import filed
from hybrid_kv.check.guard.patterns import REQUIRED
from hybrid_kv.check.guard.play import Differences, ScenarioFailure, run_scenario
from hybrid_kv.check.guard.scenario import answer_book
from hybrid_kv.check.guard.shrink import Shrunk, shrink
from hybrid_kv.check.guard.traffic import (
    SEEDS_PER_BATCH,
    combinations_of,
    draw_swarm_scenario,
    required_combinations,
)
from hybrid_kv.check.guard.workers import processes
from hybrid_kv.errors import HybridKVError
from hybrid_kv.measure.results import Row
from hybrid_kv.measure.study.work import Give, Lost, Pool, Results, Task, in_executor

SUITE = "swarm"
BENCHMARK = "exact model"
SEEDS_FILE = "swarm-seeds.txt"
KEEP_EVERY = 600.0  # seconds


@dataclass(frozen=True)
class Batch:
    """The result of a batch of seeds: of each scenario the first thing that was wrong.

    The seconds are of the process.
    """

    total: Differences
    cpu_seconds: float


def play_batch(first: int, end: int) -> Batch:
    """Play the scenarios `first` to `end - 1` of all swarms."""
    torch.set_num_threads(1)
    begin = time.process_time()
    total = Differences()
    for seed in range(first, end):
        differences = run_scenario(draw_swarm_scenario(seed))
        total += replace(differences, wrong=differences.wrong[:1])
    answer_book.cache_clear()  # A book never forgets, and a worker lives for days.
    return Batch(total, time.process_time() - begin)


@dataclass
class Finding:
    """A rule that scenarios broke first: how many, the first seed, its file, and its story."""

    rule: str
    seeds: int
    first_seed: int
    file: Path | None = None
    story: str = ""


@dataclass
class Tally:
    """The counts of a swarm so far.

    `lost`: tasks whose worker was gone, or could not do them.
    """

    seeds: int = 0
    requests: int = 0
    cpu_seconds: float = 0.0
    lost: int = 0
    patterns: set[str] = field(default_factory=set)
    settings: set[Any] = field(default_factory=set)
    findings: dict[str, Finding] = field(default_factory=dict)

    @property
    def requests_per_cpu_second(self) -> float:
        return self.requests / self.cpu_seconds if self.cpu_seconds else 0.0

    @property
    def num_patterns(self) -> int:
        """Patterns of `REQUIRED` that were seen."""
        return len(self.patterns & REQUIRED.keys())

    @property
    def num_settings(self) -> int:
        """Pairs and triples of levels that were seen, of those that a guard requires."""
        return len(self.settings & required_combinations())

    def rows(self, is_over: bool) -> list[Row]:
        """Return rows of everything so far.

        Those at the end have the verdict, which is void if nothing was played.
        """
        same: dict[str, Any] = {"suite": SUITE, "benchmark": BENCHMARK, "n": self.seeds}
        patterns = {"n": len(REQUIRED)}
        settings = {"n": len(required_combinations())}
        verdict = ("fail" if self.findings else "pass" if self.seeds else "void") if is_over else ""
        return [
            Row(metric="seeds", value=self.seeds, **same),
            Row(metric="requests", value=self.requests, unit="requests", **same),
            # A count over seconds, not a timing: each request was compared with its oracle.
            Row(
                metric="requests_per_cpu_second",
                value=self.requests_per_cpu_second,
                unit="requests",
                **same,
            ),
            Row(
                metric="patterns",
                value=self.num_patterns,
                unit="patterns",
                better="higher",
                **same | patterns,
            ),
            Row(
                metric="settings",
                value=self.num_settings,
                unit="settings",
                better="higher",
                **same | settings,
            ),
            Row(metric="rules_broken", value=len(self.findings), verdict=verdict, **same),
            *(
                Row(
                    metric="failures",
                    value=finding.seeds,
                    params={"rule": finding.rule},
                    verdict=verdict,
                    **same,
                )
                for finding in self.findings.values()
            ),
        ]


class Swarm:
    """A player of seeds from `first` on for `seconds`, which begin with the first batch.

    Args:
        repro: folder for what failed; it is made when there is something.
        report: gets the tally after each batch.
        keep: gets it now and then and at the end.

    Raises:
        HybridKVError: no worker can play, or a file cannot be written.
    """

    def __init__(
        self,
        first: int,
        seconds: float,
        repro: Path,
        report: Callable[[Tally], object],
        keep: Callable[[Tally, bool], object],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.tally = Tally()
        self._next = first
        self._seconds = seconds
        self._repro = repro
        self._report = report
        self._keep = keep
        self._clock = clock
        self._begin: float | None = None
        self._kept = 0.0
        self._to_shrink: deque[ScenarioFailure] = deque()
        self._unfiled: dict[str, ScenarioFailure] = {}

    def run(self, pool: Pool) -> Tally:
        """Play until the time is over, or Ctrl-C."""
        try:
            with closing(pool(self._give)) as results:
                for task, result in results:
                    self._take(task, result)
        except KeyboardInterrupt:
            pass  # The results so far are reported.
        for failure in list(self._unfiled.values()):
            self._file(failure, Shrunk(failure, 0, 0.0, is_minimal=False))
        is_over = True
        self._keep(self.tally, is_over)
        return self.tally

    def _give(self) -> Task | None:
        if self._to_shrink:
            return Task(shrink, (self._to_shrink.popleft(),))
        now = self._clock()
        if self._begin is None:
            self._begin = self._kept = now
        if now - self._begin >= self._seconds:
            return None
        first = self._next
        self._next = (self._next // SEEDS_PER_BATCH + 1) * SEEDS_PER_BATCH
        return Task(play_batch, (first, self._next))

    def _take(self, task: Task, result: Batch | Shrunk | Lost) -> None:
        if isinstance(result, Shrunk):
            self._file(task.args[0], result)
            return
        if isinstance(result, Lost):
            self.tally.lost += 1
            if not self.tally.seeds:
                raise HybridKVError(f"the first batch could not be played: {result.reason}")
            return
        tally = self.tally
        total = result.total
        tally.seeds += total.num_scenarios
        tally.requests += total.num_requests
        tally.cpu_seconds += result.cpu_seconds
        tally.patterns.update(name for name, count in total.seen.items() if count)
        tally.settings.update(*map(combinations_of, total.cells))
        self._note(total.wrong)
        self._report(tally)
        if self._clock() - self._kept >= KEEP_EVERY:
            self._kept = self._clock()
            is_over = False
            self._keep(tally, is_over)

    def _note(self, failures: list[ScenarioFailure]) -> None:
        if not failures:
            return
        file = self._repro / SEEDS_FILE
        file.parent.mkdir(parents=True, exist_ok=True)
        with file.open("a", encoding="utf-8") as out:
            out.writelines(f"{failure.scenario.seed} {failure.rule}\n" for failure in failures)
        for failure in failures:
            finding = self.tally.findings.setdefault(
                failure.rule, Finding(failure.rule, 0, failure.scenario.seed)
            )
            finding.seeds += 1
            if finding.seeds == 1:
                self._unfiled[failure.rule] = failure
                self._to_shrink.append(failure)

    def _file(self, failure: ScenarioFailure, shrunk: Shrunk) -> None:
        finding = self.tally.findings[failure.rule]
        made = filed(shrunk.failure.scenario, failure.rule, shrunk, self._repro)
        finding.file = Path(made.file)
        finding.story = made.story
        del self._unfiled[failure.rule]


def here(give: Give) -> Results:
    """Run tasks in this process."""
    task = give()
    while task is not None:
        yield task, task.call(*task.args)
        task = give()


def in_processes(jobs: int) -> Pool:
    """Run tasks in `jobs` processes of this machine."""

    def run(give: Give) -> Results:
        try:
            with processes(jobs) as executor:
                yield from in_executor(executor, jobs, give)
                executor.shutdown()  # Workers that are done end by themselves, and clear up.
        except BrokenProcessPool:
            raise HybridKVError(
                "a worker was killed, or ran out of memory; use fewer --jobs"
            ) from None

    return run

"""All probes in every setting of a matrix: one after another, or several at a time.

Those are in processes that each start an engine of their own.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Executor, Future, wait
from itertools import product
from multiprocessing.queues import SimpleQueue
from pathlib import Path
from typing import Any

from hybrid_kv.check.guard.registry import Size
from hybrid_kv.check.guard.workers import CONTEXT, processes
from hybrid_kv.check.probes.guarded import UNHEARD, Guarded, Settings, ask
from hybrid_kv.check.probes.known import name_known
from hybrid_kv.check.probes.registry import load_probes
from hybrid_kv.check.probes.session import Outcome
from hybrid_kv.check.targets.exact import is_exact
from hybrid_kv.check.targets.kinds import kind_of
from hybrid_kv.check.targets.remote import share_loaders, shared_loaders
from hybrid_kv.check.targets.target import Kind, is_plain
from hybrid_kv.config import ConfigError
from hybrid_kv.errors import deaf_to_ctrl_c

SECONDS = 0.2  # between two looks at the queue
_worker: tuple[list[Guarded], SimpleQueue[tuple[int, str, Outcome]]]
FINE = ("right", "not supported", "as before", "known")


def compare_with(old: Guarded, seen: Sequence[Outcome], jobs: int = 1, size: Size = "full") -> None:
    """Make each verdict that an old build of the engine shares "as before": it is not new."""
    doubtful = [outcome for outcome in seen if outcome.verdict not in FINE]
    if not doubtful:
        return
    cells = [
        dict(outcome.settings)
        for outcome in seen
        if outcome in doubtful or old.is_plain(outcome.settings)
    ]
    select = ["alone", *(outcome.probe for outcome in doubtful)]  # a start is no probe
    distinct = [cell for i, cell in enumerate(cells) if cell not in cells[:i]]
    run = ProbeRun(old, distinct, select, size=size)
    guard([run], jobs)
    known = [(outcome.probe, outcome.settings, signs_of(outcome)) for outcome in run.found()]
    for outcome in doubtful:
        if (outcome.probe, outcome.settings, signs_of(outcome)) in known:
            outcome.verdict = "as before"
            outcome.failures = []


def signs_of(outcome: Outcome) -> tuple[Any, ...]:
    """Return what equal outcomes share: the verdict, and the signs of what is wrong."""
    return outcome.verdict, *(failure.signs for failure in outcome.failures)


def default_matrix(kind: Kind, size: Size = "full") -> list[Settings]:
    """Return the plainest engine, each level of the prefix cache, and each other level.

    The latter with the last level of the prefix cache, one at a time. Of levels that differ in a
    number alone, such as `mtp3` and `mtp1`, the first one; all of them if the size is long, and if
    it is quick the levels of the prefix cache alone. Factors in the kind's `apart` exclude the
    prefix cache: their levels are met without it. With an exact model it is the kind's `matrix`.
    """
    if kind.matrix:
        return matrix_of(kind, kind.matrix)
    prefixes = kind.factors.get("prefix", ())
    cells: list[Settings] = [{}, *({"prefix": level} for level in prefixes[1:])]
    for factor, levels in kind.factors.items():
        if factor != "prefix" and size != "quick":
            is_cached = len(prefixes) > 1 and factor not in kind.apart
            cached = {"prefix": prefixes[-1]} if is_cached else {}
            kinds = {
                level if size == "long" else level.rstrip("0123456789"): level
                for level in reversed(levels[1:])
            }
            cells += [{**cached, factor: level} for level in levels[1:] if level in kinds.values()]
    return cells


def matrix_of(kind: Kind, texts: Sequence[str]) -> list[Settings]:
    """Return all combinations of the `factor=level,level` of each text.

    The plainest engine is always the first.

    Raises:
        ConfigError: no such factor or level.
    """
    cells: list[Settings] = [{}]
    for text in texts:
        levels_of = dict(_levels(kind, word) for word in text.split())
        for levels in product(*levels_of.values()):
            cell = dict(zip(levels_of, levels, strict=True))
            cells += [cell] if not is_plain(kind, cell, cell) and cell not in cells else []
    return cells


def text_of(settings: Mapping[str, str]) -> str:
    """Return settings as `matrix_of` reads them; `plain` of no settings."""
    return " ".join(f"{factor}={level}" for factor, level in settings.items()) or "plain"


def _levels(kind: Kind, word: str) -> tuple[str, list[str]]:
    factor, _, levels = word.partition("=")
    names = levels.split(",")
    for level in names:
        check_level(kind, factor, level)
    return factor, names


def check_level(kind: Kind, factor: str, level: str) -> None:
    """Refuse a level that an engine does not have.

    Raises:
        ConfigError: the engine has no such factor, or the factor no such level.
    """
    if factor not in kind.factors:
        raise ConfigError(
            f"{factor}={level}: write FACTOR=LEVEL,…; {kind.name} has {', '.join(kind.factors)}"
        )
    if level not in kind.factors[factor]:
        raise ConfigError(f"{factor}={level}: use one of {', '.join(kind.factors[factor])}")


def _unreported(outcome: Outcome) -> None:
    pass


class ProbeRun:
    """The probes of an engine with one model, a wave of settings after another.

    An engine that cannot start is an outcome, too.

    Args:
        matrix: None: the default one, in the first dtype that the engine takes this model in.
        select: only probes that have one of these in their name; `alone` is always run.
        report: called with each outcome.
        size: of the default matrix.

    Attributes:
        outcomes: so far.

    Raises:
        ConfigError: no probe is selected.
    """

    def __init__(
        self,
        guarded: Guarded,
        matrix: Sequence[Settings] | None = None,
        select: Sequence[str] = (),
        report: Callable[[Outcome], None] = _unreported,
        size: Size = "full",
    ) -> None:
        names = [probe.name for probe in load_probes()]
        if select and not any(word in name for word in select for name in names):
            raise ConfigError(f"-k {', '.join(select)}: no probe has this in its name")
        self.guarded = guarded
        self.select = select
        self.outcomes = list[Outcome]()
        self.cells = default_matrix(guarded.kind, size) if matrix is None else [*matrix]
        self._order: list[Settings] = []
        self._is_default = matrix is None
        self._report = report

    def waves(self) -> Iterator[list[Settings]]:
        """Yield settings that may run at the same time, after those before them.

        The plain ones come first: where their answers are not the oracle's, all others are compared
        with theirs. With an exact model the oracle is always right.
        """
        guarded = self.guarded
        order = self._order
        order += [settings for settings in self.cells if guarded.is_plain(settings)]
        rest = [settings for settings in self.cells if settings not in order]
        if is_exact(guarded.folder):
            order += rest
            yield [*order]
            return
        yield [*order]
        # vLLM runs a Qwen3.5 on a CPU in bfloat16 alone.
        for dtype in guarded.kind.factors.get("dtype", ())[1:] if self._is_default else ():
            if (self.outcomes[-1].probe, self.outcomes[-1].verdict) != ("start", "not supported"):
                break
            order.append({"dtype": dtype})
            yield order[-1:]
        if len(order) > 1 and self._is_default:
            rest = [{**order[-1], **settings} for settings in rest if "dtype" not in settings]
        order += rest
        yield rest

    def hear(self, outcome: Outcome) -> None:
        """Keep and report an outcome."""
        name_known(self.guarded.kind, self.guarded.version, outcome)
        self.outcomes.append(outcome)
        # The error of `found`, or the only row, says that a lone engine does not start.
        if outcome.probe != "start" or len(self.cells) != 1:
            self._report(outcome)

    def found(self) -> list[Outcome]:
        """Return the outcomes by setting, the plain ones first.

        Raises:
            ConfigError: none is supported, in any setting.
        """
        if self.outcomes and all(outcome.verdict == "not supported" for outcome in self.outcomes):
            raise ConfigError(f"no setting is supported: {self.outcomes[0].detail}")
        return sorted(self.outcomes, key=lambda outcome: self._order.index(dict(outcome.settings)))


def guard(runs: Sequence[ProbeRun], jobs: int = 1) -> None:
    """Run every probe in every setting of some runs.

    Args:
        jobs: settings at a time, an engine and a process each; those of the first run that has any
            left come first.
    """
    for run in runs:
        load = run.guarded.kind.load
        if load is not None:
            for settings in run.cells:
                load(run.guarded.folder, settings)
    try:
        if jobs > 1 and sum(len(run.cells) for run in runs) > 1:
            ask_at_once(runs, jobs)
            return
        for run in runs:
            for wave in run.waves():
                for settings in wave:
                    ask(run.guarded, settings, run.select, run.hear)
    finally:
        for run in runs:
            run.guarded.close()


def ask_at_once(runs: Sequence[ProbeRun], jobs: int) -> None:
    """Call `guarded.ask` for every setting of some runs, in several processes.

    Each run gets its outcomes in this process, as they come.
    """
    queue: SimpleQueue[tuple[int, str, Outcome]] = CONTEXT.SimpleQueue()
    in_flight: dict[Future[None], int] = {}
    ready = [Waves(run.waves()) for run in runs]
    given = [_given(run.guarded) for run in runs]
    with processes(jobs, start_process, given, shared_loaders(), queue) as pool:
        while True:
            for i, run in enumerate(runs):
                while len(in_flight) < jobs:
                    settings = ready[i].next(i in in_flight.values())
                    if settings is None:
                        break
                    in_flight[_submit(pool, i, run, settings)] = i
            if not in_flight:
                return
            done, _ = wait(in_flight, SECONDS, FIRST_COMPLETED)
            # A worker has reported all before it is done: what is put into such a queue is in its
            # pipe.
            while not queue.empty():
                i, version, outcome = queue.get()
                runs[i].guarded.version = version if version != UNHEARD else runs[i].guarded.version
                runs[i].guarded.hear(outcome)
                runs[i].hear(outcome)
            for task_done in done:
                del in_flight[task_done]
                task_done.result()


def _submit(pool: Executor, i: int, run: ProbeRun, settings: Settings) -> Future[None]:
    judges = run.guarded.judges
    doubted = [dtype for dtype, judge in judges.items() if not judge.trusted]
    with deaf_to_ctrl_c():  # A submit may start a worker.
        return pool.submit(ask_in_process, i, settings, run.select, run.guarded.shortest, doubted)


class Waves:
    """The settings of a run; those of the next wave once none of the last is in flight."""

    def __init__(self, waves: Iterator[list[Settings]]) -> None:
        self._waves = waves
        self._left = list[Settings]()

    def next(self, is_busy: bool) -> Settings | None:
        if not self._left and not is_busy:
            self._left = next((wave for wave in self._waves if wave), [])
        return self._left.pop(0) if self._left else None


def _given(guarded: Guarded) -> tuple[Any, ...]:
    """Return what makes an equal engine in another process."""
    kind = guarded.kind
    against = guarded.against
    other = against.name if against is not None else None
    return (
        kind.name,
        kind.python or None,
        other,
        guarded.folder,
        guarded.seed,
        guarded.amount,
        guarded.thorough,
    )


def start_process(
    given: Iterable[tuple[Any, ...]],
    loaders: Mapping[tuple[str, str, str], Path],
    queue: SimpleQueue[tuple[int, str, Outcome]],
) -> None:
    global _worker
    share_loaders(loaders)
    made = []
    for kind, python, against, folder, *drawn in given:
        other = kind_of(against) if against is not None else None
        made.append(Guarded(kind_of(kind, python), folder, other, *drawn))
    _worker = made, queue


def ask_in_process(
    i: int, settings: Settings, select: Sequence[str], shortest: int, doubted: Sequence[str]
) -> None:
    every, queue = _worker
    guarded = every[i]
    guarded.shortest = max(guarded.shortest, shortest)
    for dtype in doubted:
        guarded.judge_of({"dtype": dtype}).trusted = False

    def report(outcome: Outcome) -> None:
        queue.put((i, guarded.version, outcome))

    try:
        ask(guarded, settings, select, report)
    finally:
        guarded.close()

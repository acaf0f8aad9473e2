"""The fitness of this machine for timing: `hybrid-kv doctor`, and the mark on a verdict.

The same work is timed as two subjects for a few seconds: an A/A test. Their ratio is 1; how far it
strays is the noise of every comparison here. Meanwhile the thread always has work: what it does not
get of the wall clock, others took.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from importlib import metadata
from pathlib import Path

import numpy as np
import psutil
import torch

from hybrid_kv.measure.results import provenance
from hybrid_kv.measure.timing.clock import Interval, Subject, clock, median, wall_clock

CONSTRAINTS = Path(__file__).resolve().parents[3] / "constraints.txt"
SECONDS = 5.0
MARK_SECONDS = 1.0  # enough for the mark on a verdict
# Beyond these a machine is unfit. An idle one waits less than 1 % and strays less than 1 %; a busy
# process per core takes a third of the time or more.
MAX_WAITED = 0.05
MAX_STOLEN = 0.02
MAX_NOISE = 0.03
# Ten starts of the same process lie within 1 % of their middle: memory and code lie elsewhere,
# which turns of one process do not see.
LEAST_DIFFERENCE = 0.01
_CPU = Path("/sys/devices/system/cpu")


@dataclass(frozen=True)
class Fitness:
    """The observations of a few seconds.

    Attributes:
        waited: share of the wall clock in which the thread had work and no core.
        stolen: share of all cores' time that the hypervisor gave to others; None: not known.
        ratio: of the two equal subjects, with its 95 % interval.
        governor, turbo: of the first core; empty: not known, as in most virtual machines.
        gpu: name and clock of the current GPU; empty: none.
        versions: packages that are not of constraints.txt's version; None: there is no such file
            here.
    """

    waited: float
    stolen: float | None
    ratio: Interval
    governor: str
    turbo: str
    gpu: str
    versions: tuple[str, ...] | None

    @property
    def noise(self) -> float:
        """The distance from 1 of the interval of equal work."""
        return max(self.ratio.high - 1, 1 - self.ratio.low)

    @property
    def unfit(self) -> str:
        """The reason why times of this machine prove nothing now; empty: they do."""
        reasons = []
        if self.waited > MAX_WAITED:
            reasons.append(f"others took {self.waited:.0%} of a core")
        if self.stolen is not None and self.stolen > MAX_STOLEN:
            reasons.append(f"the hypervisor took {self.stolen:.0%}")
        if self.noise > MAX_NOISE:
            reasons.append(f"equal work differed by {self.noise:.1%}")
        return ", ".join(reasons)

    def lines(self) -> list[str]:
        """Return six lines for people."""
        stolen = "not known" if self.stolen is None else f"{self.stolen:.1%}"
        difference = max(self.noise, LEAST_DIFFERENCE)
        trust = f"times that differ by more than {difference:.1%}, and counts"
        if self.unfit:
            trust = f"counts only: {self.unfit}"
        versions = "no constraints.txt here"
        if self.versions is not None:
            versions = "as in constraints.txt" if not self.versions else ", ".join(self.versions)
        return [
            f"cores     {provenance().machine}; others took {self.waited:.1%}, the hypervisor "
            f"{stolen}",
            f"clock     governor {self.governor or 'not known'}, turbo {self.turbo or 'not known'}",
            f"noise     equal work: {self.ratio.low:.4f} to {self.ratio.high:.4f} times as long, "
            "95 %",
            f"GPU       {self.gpu or 'none'}",
            f"versions  {versions}",
            f"trust     {trust}",
        ]


def examine(seconds: float = SECONDS) -> Fitness:
    """Look at this machine, on a thread that is busy for so many seconds."""
    psutil.cpu_times_percent()  # the next call is about the time since this one
    began = wall_clock()
    cpu = clock()
    ratio = _equal_work(began + seconds)
    stolen = getattr(psutil.cpu_times_percent(), "steal", None)  # Linux alone has it
    waited = 1 - (clock() - cpu) / (wall_clock() - began)
    return Fitness(
        waited=max(0.0, waited),
        stolen=None if stolen is None else stolen / 100,
        ratio=ratio,
        governor=_read(_CPU / "cpu0/cpufreq/scaling_governor"),
        turbo=_turbo(),
        gpu=_gpu(),
        versions=differing_versions(CONSTRAINTS) if CONSTRAINTS.exists() else None,
    )


def _equal_work(end: float) -> Interval:
    """Return how many times as long one of two equal subjects takes.

    They run in turns until the clock shows `end`.
    """
    values = np.random.default_rng(0).integers(0, 1 << 40, 20_000)
    work = partial(np.sort, values)
    pair = (Subject(work), Subject(work))
    ratios: list[float] = []
    while wall_clock() < end or len(ratios) < 9:
        turn = 1 if len(ratios) % 2 else -1
        first, second = (subject.sample(2) for subject in pair[::turn])
        ratios.append((first / second) ** turn)
    return median(np.array(ratios))


def _read(file: Path) -> str:
    try:
        return file.read_text().strip()
    except OSError:
        return ""


def _turbo() -> str:
    no_turbo = _read(_CPU / "intel_pstate/no_turbo")
    if no_turbo:
        return "off" if no_turbo == "1" else "on"
    return {"0": "off", "1": "on"}.get(_read(_CPU / "cpufreq/boost"), "")


def _gpu() -> str:
    if not torch.cuda.is_available():
        return ""
    try:
        speed = f"{torch.cuda.clock_rate()} MHz"
    except (ImportError, RuntimeError):
        speed = "clock not known: install nvidia-ml-py"
    return f"{torch.cuda.get_device_name()}, {speed}"


def differing_versions(file: Path) -> tuple[str, ...]:
    def differing() -> Iterator[str]:
        for name, pinned in re.findall(r"^([\w.-]+)==([^\s;]+)", file.read_text(), re.MULTILINE):
            try:
                version = metadata.version(name)
            except metadata.PackageNotFoundError:
                continue  # An extra that is not used here.
            if version.partition("+")[0] != pinned:
                yield f"{name} {version}, not {pinned}"

    return tuple(differing())

"""Toy packages in a git repository, and benchmarks of them on a clock that counts work.

The clock moves only by the work that it is given, so equal code takes exactly as long, and 5 % more
is 5 %.
"""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import bench

BENCH = Path(bench.__file__).parent

PACKAGE = """
BLOCKS = {blocks}
TICKS = {ticks}
ANSWER = {answer}
ticks = 0

def step():
    global ticks
    ticks += TICKS
    return ANSWER

{newer}
"""
CASES = """
import os, sys
import hybrid_kv
from bench.harness.cells import Case, Cell, Count, WrongResultError

def work(times):
    hybrid_kv.ticks += times

sys.modules["__main__"].busy_work = work

def big():
    hybrid_kv.ticks += 3000

def step():
    def check():
        if hybrid_kv.step() != 42:
            raise WrongResultError("no 42")
        return 0.25
    return Case(hybrid_kv.step, check)

def wrong_afterwards():
    calls = []
    def check():
        calls.append(hybrid_kv.ANSWER)
        if len(calls) > 1 and hybrid_kv.ANSWER != 42:
            raise WrongResultError("not any more")
        return 0.0
    return Case(big, check, max_repeats=3)

def dying():
    if hybrid_kv.ANSWER == 7:
        os._exit(3)
    return Case(big, lambda: 0.0)

def hanging():
    while hybrid_kv.ANSWER == 8:
        pass
    return Case(big, lambda: 0.0)

def raising():
    if hybrid_kv.ANSWER == 9:
        raise RuntimeError("no 9")
    big()

def own():
    import hybrid_kv.later
    return Case(hybrid_kv.later.newer, lambda: 0.0)

def cells():
    def cell(name, tier, make, **values):
        return Cell("toy", name, {"size": 1}, tier, make, True, **values)
    return [
        cell("step", "cpu", step),
        cell("big", "cpu", lambda: Case(big, lambda: 0.0)),
        cell("new", "cpu", lambda: Case(hybrid_kv.newer, lambda: 0.0)),
        cell("wrong", "cpu", wrong_afterwards),
        cell("nan", "cpu", lambda: Case(big, lambda: float("nan"))),
        cell("rival", "cpu", step, promise=2.0),
        cell("device", "gpu", step),
        cell("fatal", "count", lambda: dying() and {"blocks": Count(1, "blocks")}),
        cell("held", "count", lambda: {"blocks": Count(hybrid_kv.BLOCKS, "blocks")}),
        cell("float", "count", lambda: {"blocks": Count(0.5, "blocks")}),
        cell("raising", "cpu", lambda: Case(raising, lambda: 0.0)),
        cell("own", "cpu", own),
        cell("dying", "cpu", dying),
        cell("hanging", "cpu", hanging),
        Cell("toy", "slow", {"size": 1}, "cpu", step),
        *([cell("listed", "cpu", step)] if hybrid_kv.ANSWER == 9 else []),
    ]
"""
LATE = """
from bench.harness.cells import Case, Cell
from hybrid_kv import newer

def cells():
    return [Cell("late", "newer", {}, "cpu", lambda: Case(newer, lambda: 0.0), True)]
"""
TORCH = """
import importlib.util, os, sys

class Editable:
    "As an editable install's: it knows a module of the checkout that no version has."
    @classmethod
    def find_spec(cls, name, path=None, target=None):
        if name == "hybrid_kv.later":
            return importlib.util.spec_from_file_location(name, __file__)

newer = print
sys.meta_path.append(Editable)

class Event:
    "Happens when the work before it is done: on this device at once."
    def __init__(self, enable_timing):
        pass

    def record(self):
        self.at = sys.modules["hybrid_kv"].ticks

    def synchronize(self):
        pass

    def elapsed_time(self, end):
        return (end.at - self.at) * 2e-6  # ms; not the host's time

class cuda:
    Event = Event
    is_available = is_initialized = staticmethod(lambda: bool(os.environ.get("TOY_GPU")))
    current_device = staticmethod(lambda: 0)
    get_device_properties = staticmethod(lambda device: cuda)
    L2_cache_size = 4096
    synchronize = staticmethod(lambda: None)
    clock_rate = staticmethod(lambda: 1980)

class Tensor:
    def passing(self):
        sys.modules["hybrid_kv"].ticks += 500_000

    sum = zero_ = passing

int32 = uint8 = None

def zeros(size, dtype, device):
    return Tensor()

empty = zeros

def set_num_threads(number): pass
"""
VERSIONS = {
    "base": {},
    "comment": {"newer": "def newer(): step()\n\n# nothing else"},
    "slow": {"ticks": 105_000},
    "fast": {"ticks": 95_000},
    "wrong": {"answer": 41},
    "dying": {"answer": 7},
    "hanging": {"answer": 8},
    "raising": {"answer": 9},
    "blocks": {"blocks": 12},
    "old": {"newer": ""},
}


def git(folder: Path, *arguments: str | Path) -> str:
    name = ("-c", "user.name=t", "-c", "user.email=t@example.com", "-c", "commit.gpgsign=false")
    done = subprocess.run(
        ("git", *name, *arguments), cwd=folder, capture_output=True, text=True, check=True
    )
    return done.stdout.strip()


def write_package(
    folder: Path,
    ticks: int = 100_000,
    blocks: int = 10,
    answer: int = 42,
    newer: str = "def newer(): step()",
) -> None:
    text = PACKAGE.format(ticks=ticks, blocks=blocks, answer=answer, newer=newer)
    (folder / "hybrid_kv" / "__init__.py").write_text(text)


def write_toy(folder: Path) -> Path:
    """Make the folder a repository with a branch for each of `VERSIONS`.

    One more branch, `empty`, lacks the package.
    """
    folder.mkdir(exist_ok=True)
    git(folder, "init", "-q", "-b", "base")
    (folder / "bench" / "harness").mkdir(parents=True)
    (folder / "results").mkdir()
    for name in (
        "__init__.py",
        "harness/__init__.py",
        "harness/cells.py",
        "harness/registry.py",
        "harness/worker.py",
    ):
        (folder / "bench" / name).write_text((BENCH / name).read_text())
    shutil.copytree(BENCH.parent / "hybrid_kv/measure/timing", folder / "hybrid_kv/measure/timing")
    clock = folder / "hybrid_kv/measure/timing" / "clock.py"
    assert "clock = time.thread_time" in clock.read_text()
    fake = "import hybrid_kv\nclock = lambda: hybrid_kv.ticks * 1e-9"
    clock.write_text(clock.read_text().replace("clock = time.thread_time", fake))
    (folder / "bench" / "toy.py").write_text(CASES)
    (folder / "bench" / "late.py").write_text(LATE)
    (folder / ".gitignore").write_text("/bench\n/results\n/hybrid_kv/measure/timing\n")
    for name, values in VERSIONS.items():
        if name != "base":
            git(folder, "checkout", "-q", "-b", name, "base")
        write_package(folder, **values)
        git(folder, "add", ".")
        git(folder, "commit", "-q", "-m", name)
    git(folder, "checkout", "-q", "-b", "empty", "base")
    git(folder, "rm", "-q", "-r", "hybrid_kv")
    (folder / "file").write_text("")
    git(folder, "add", ".")
    git(folder, "commit", "-q", "-m", "empty")
    git(folder, "checkout", "-q", "base")
    return folder

"""What asv finds, what it knows of it, and that it measures what is right or nothing."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Callable
from itertools import product
from pathlib import Path
from typing import Any, NoReturn

import pytest
import torch

from bench.harness import asv_classes, history, registry
from bench.harness.asv_classes import Compared, Counted, Grid, Timed, TimedOnDevice
from bench.harness.cells import Case, Cell, Count, WrongResultError
from hybrid_kv.errors import HybridKVError
from tests.support.cells import failing_after

Benchmark = list[Any]  # name, parameters, unit: as JSON has them

ROOT = Path(asv_classes.__file__).resolve().parents[2]
RATIOS = {"rivals.Lead"}
PEAKS = {"end_to_end.Memory"}
NOT_IN_ASV = {("kernel_blocks", "expand_counts")}


def made_by(base: type[Any], make: Callable[[], Any], tier: str = "cpu", **params: Any) -> Any:
    """Return a class as a suite has them, of one cell."""
    cell = Cell("offload", "some_thing", params or {"x": 1}, tier, make, quick=True)
    return type("SomeThing", (base,), {"grid": Grid((cell,)), "calls": 3})()


@pytest.fixture(autouse=True)
def no_cases(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(asv_classes, "_cases", {})


def test_a_case_is_built_once_reset_before_each_sample_and_checked_behind_it() -> None:
    calls = []

    def make() -> Case:
        calls.append("make")
        return Case(
            lambda: calls.append("run"),
            lambda: calls.append("check") or 0.0,
            lambda: calls.append("reset"),
        )

    subject = made_by(Timed, make)
    for _ in range(2):
        subject.setup(1)
        subject.run()
        subject.teardown(1)
    sample = ["reset", "run", "run", "run", "check"]
    assert calls == ["make", "check", *sample, *sample]


def test_a_wrong_result_has_no_time() -> None:
    with pytest.raises(WrongResultError, match="injected"):
        made_by(Timed, lambda: failing_after(0)).setup(1)
    subject = made_by(Timed, lambda: failing_after(1))
    subject.setup(1)
    with pytest.raises(WrongResultError, match="injected"):
        subject.teardown(1)


@pytest.mark.parametrize("base", [Timed, Counted, Compared])
def test_what_an_older_version_lacks_is_skipped(base: type[Timed | Counted | Compared]) -> None:
    def make() -> NoReturn:
        raise ImportError("no such kernel")

    subject = made_by(base, make)
    with pytest.raises(NotImplementedError, match="no such kernel"):
        subject.setup(1)
    getattr(subject, "teardown", lambda *_: None)(1)  # asv calls it all the same


def test_a_gpu_benchmark_is_skipped_without_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    subject = made_by(TimedOnDevice, lambda: pytest.fail("made"), "gpu")
    with pytest.raises(NotImplementedError, match="no GPU"):
        subject.setup(1)
    subject.teardown(1)


@pytest.mark.gpu
def test_a_launch_and_its_end_are_timed_apart() -> None:
    x = torch.randn(4096, 4096, device="cuda")
    subject = made_by(TimedOnDevice, lambda: Case(lambda: x @ x, lambda: 0.0), "gpu")
    subject.setup(1)
    begin = subject.timer()
    subject.run()
    launched = subject.timer()
    torch.cuda.synchronize()
    subject.run_sync()
    assert subject.timer() - launched > launched - begin > 0
    subject.teardown(1)


def test_counts_are_those_of_the_cell() -> None:
    subject = made_by(Counted, lambda: {"blocks": Count(7, "blocks")}, "count")
    subject.setup(1)
    assert subject.counts["blocks"].value == 7


def test_a_rival_is_compared_with_the_engine_of_the_same_case() -> None:
    ran = []

    def cell(subject: str, work: int) -> Cell:
        def run() -> None:
            ran.append(subject)
            sum(range(work))

        return Cell("s", "b", {"x": 1, "subject": subject}, "cpu", lambda: Case(run, lambda: 0.0))

    grid = Grid((cell("list", 20_000), cell("engine", 1000)))
    assert grid.params == [[1], ["list", "engine"]]
    assert grid.rivals == [[1], ["list"]]
    subject = type("Lead", (Compared,), {"grid": grid})()
    subject.setup(1, "list")
    assert subject.ratio() > 2
    assert set(ran) == {"list", "engine"}


def test_an_edited_case_starts_a_new_history() -> None:
    def build(x: int) -> int:
        return x

    def edited(x: int) -> int:
        return x + 0

    version, other = (
        Grid((Cell("s", "b", {"x": 1}, "cpu", function),)).version for function in (build, edited)
    )
    assert version != other
    assert version == Grid((Cell("s", "b", {"x": 2}, "cpu", build),)).version


def test_the_history_of_a_case_outlives_another_layout_and_docstring() -> None:
    def build(x: int) -> Callable[[], list[int]]:
        """Return what makes a list."""

        def run() -> list[int]:
            """Make it."""
            return [x, 1]

        return run

    same = build

    def build(x: int) -> Callable[[], list[int]]:
        """Return a function of no arguments."""

        def run() -> list[int]:
            """Return a list of two numbers."""
            # A layout of its own.
            return [
                x,
                1,
            ]

        return run

    first, second = (
        Grid((Cell("s", "b", {"x": 1}, "cpu", function),)).version for function in (same, build)
    )
    assert first == second


@pytest.fixture(scope="module")
def listed() -> list[Benchmark]:
    """Return what asv discovers by itself: name, parameters, unit.

    It runs in a process that knows nothing of the checkout.
    """
    code = (
        "import json, sys; from asv_runner.discovery import disc_benchmarks, update_sys_path\n"
        "update_sys_path('bench/asv_suite'); sys.path.remove('')\n"
        "print(json.dumps([(one.name, one.params, one.unit) for one in "
        "disc_benchmarks('bench/asv_suite')]))"
    )
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    done = subprocess.run(
        [sys.executable, "-c", code],
        cwd=ROOT,
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


def methods(cell: Cell) -> list[str]:
    name = cell.benchmark
    if cell.tier == "gpu":
        return [f"time_launch_{name}", f"time_{name}_sync"]
    return [f"time_{name}"] if cell.tier == "cpu" else [f"track_{metric}" for metric in cell.units]


def class_of(name: str) -> str:
    return name.rpartition(".")[0]


def test_asv_lists_every_cell_of_the_registry(listed: list[Benchmark]) -> None:
    given = sorted(
        (name.split(".")[0], name.split(".")[2], values)
        for name, params, _ in listed
        if class_of(name) not in RATIOS | PEAKS
        for values in product(*params)
    )
    wanted = sorted(
        (cell.suite, method, tuple(map(repr, cell.params.values())))
        for cell in registry.cells()
        if (cell.suite, cell.benchmark) not in NOT_IN_ASV
        for method in methods(cell)
    )
    assert given == wanted


def test_numbers_have_the_units_of_their_cells(listed: list[Benchmark]) -> None:
    cells = [cell for cell in registry.cells() if (cell.suite, cell.benchmark) not in NOT_IN_ASV]
    units = {
        (cell.suite, f"track_{name}"): unit for cell in cells for name, unit in cell.units.items()
    }
    found = {
        (name.split(".")[0], name.split(".")[2]): unit
        for name, _, unit in listed
        if ".track_" in name
    }
    assert found.pop(("rivals", "track_ratio")) == "time ratio"
    assert found == units


def test_a_sample_asks_no_more_calls_than_a_case_allows() -> None:
    import importlib

    for suite in registry.suites():
        module = importlib.import_module(f"bench.asv_suite.{suite}")
        for benchmark in vars(module).values():
            if (
                isinstance(benchmark, type)
                and issubclass(benchmark, Timed)
                and benchmark.__module__ == module.__name__
            ):
                quick = [cell for cell in benchmark.grid.cells if cell.quick and cell.tier == "cpu"]
                for cell in quick:
                    assert benchmark.calls <= cell.make().max_repeats, cell.key


def test_thresholds_know_every_benchmark_once(listed: list[Benchmark]) -> None:
    thresholds = json.loads((ROOT / "asv.conf.json").read_text())["regressions_thresholds"]
    for name, *_ in listed:
        matching = [pattern for pattern in thresholds if re.match(pattern, name)]
        assert len(matching) == 1, (name, matching)
    assert thresholds[r".*\.track_"] == 0.0


# ---- history ----


def test_the_history_is_of_listed_benchmarks_and_asv_takes_no_others(
    listed: list[Benchmark],
) -> None:
    names = [
        f"{name}({', '.join(values)})" for name, params, _ in listed for values in product(*params)
    ]
    pattern = re.compile(history.pattern())
    assert {name for name in names if pattern.search(name)} >= set(history.BENCHMARKS)
    assert {*history.BENCHMARKS, *history.ON_A_GPU} <= set(names)
    if not torch.cuda.is_available():
        assert sum(bool(pattern.search(name)) for name in names) == len(history.BENCHMARKS)


@pytest.mark.parametrize("given", [["abc"], ["0"], ["-1"], ["2.5"], ["5", "--steps", "0"]])
def test_history_of_no_number_is_refused(given: list[str]) -> None:
    with pytest.raises((HybridKVError, SystemExit)) as refused:
        history.main(given)
    assert given[-1] in str(refused.value)


def test_history_of_unknown_commits_is_refused() -> None:
    with pytest.raises(HybridKVError, match=r"git has no commits nothing\.\.here"):
        history.main(["--range", "nothing..here"])


def test_steps_lie_at_equal_distances() -> None:
    commits = list("abcdefghi")
    assert history.picked(commits, 3) == ["a", "e", "i"]
    assert history.picked(commits, 1) == ["a"]
    assert history.picked(commits, 20) == commits

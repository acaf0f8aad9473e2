"""Which files have unit tests that kill their mutants, and those tests: run by a fresh process in the folder of a copy.

Tests of Triton's kernels start Triton's interpreter themselves, in a process of its own. The tests are the checkout's,
linked beside the copy, so that they import the copy.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from dataclasses import asdict
from fnmatch import fnmatch
from multiprocessing import active_children
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hybrid_kv.errors import HybridKVError
from mutants.runner.guard import Catch

if TYPE_CHECKING:
    import pytest

BY_TESTS = "tests"  # the name of this way to kill a mutant
# By pattern of a file, the first that matches: its tests, with `{folder}` and `{name}` of its path. Without tests a
# mutant is for the guard alone.
TESTS: dict[str, tuple[str, ...]] = {
    "kernels/common/compiled.py": ("tests/kernels/common", "tests/kernels/block_tables/test_host.py"),
    "kernels/common/spans.py": ("tests/kernels/common/test_spans.py", "tests/kernels/ssd/test_prefill.py"),
    "kernels/common/*": (
        "tests/kernels/common", "tests/kernels/gated_norm", "tests/kernels/causal_conv1d",
        "tests/kernels/test_recurrences.py",
    ),
    "kernels/ssd/*": ("tests/kernels/ssd", "tests/kernels/test_recurrences.py"),
    "kernels/gated_delta/*": ("tests/kernels/gated_delta", "tests/kernels/test_recurrences.py"),
    "kernels/recompute/reference.py": ("tests/kernels/recompute", "tests/kernels/gated_delta/test_recompute.py"),
    "kernels/*/*": ("tests/kernels/{folder}",),
    "kernels/selective_scan.py": ("tests/kernels/test_recurrences.py",),
    "kernels/[!_]*": ("tests/kernels/test_{name}.py",),
    "cache/plan.py": ("tests/cache/test_plan.py", "tests/cache/test_capacity.py"),
    "cache/capacity.py": ("tests/cache/test_capacity.py", "tests/cache/test_plan.py"),
    "cache/spec.py": ("tests/cache/test_spec.py", "tests/cache/test_plan.py"),
    "cache/ranks.py": ("tests/cache/test_ranks.py", "tests/cache/test_plan.py"),
    "cache/backend.py": ("tests/cache/test_backend.py", "tests/cache/test_plan.py", "tests/attention/test_paged.py"),
    "cache/offload.py": ("tests/cache/test_offload.py", "tests/engine/test_folder.py"),
    "cache/folder_tier.py": ("tests/cache/test_folder_tier.py", "tests/cache/test_offload.py"),
    "cache/block_hash.py": ("tests/cache/test_block_hash.py", "tests/cache/test_block_pool.py"),
    "cache/prefix.py": ("tests/cache/test_manager.py", "tests/cache/test_prefixes_in_any_order.py"),
    "cache/manager.py": (
        "tests/cache/test_manager.py", "tests/cache/test_prefixes_in_any_order.py", "tests/cache/test_unequal_pages.py",
    ),
    "cache/request_blocks.py": ("tests/cache/test_manager.py", "tests/cache/test_block_table.py"),
    "cache/observe.py": (),
    "cache/[!_]*": ("tests/cache/test_{name}.py",),
    "attention/rollback.py": (
        "tests/attention", "tests/engine/test_runner.py", "tests/cache/test_spec.py", "tests/cache/test_layout.py",
        "tests/engine/test_limits.py",
    ),
    "attention/*": ("tests/attention", "tests/engine/test_runner.py"),
    "engine/scheduler.py": ("tests/engine/test_scheduler.py",),
    "engine/runner.py": ("tests/engine/test_runner.py",),
    "spec_decode/*": ("tests/spec_decode",),
    "config.py": ("tests/test_config.py", "tests/engine/test_limits.py"),
}  # fmt: skip
# What an engine does with these the guard sees, and soonest: their tests come behind it.
GUARD_FIRST = (
    "attention/*", "engine/*", "spec_decode/*", "config.py", "cache/block_*.py", "cache/manager.py", "cache/modes.py",
    "cache/prefix.py", "cache/request_blocks.py", "cache/spec.py",
)  # fmt: skip
# Without those that compile, which say nothing of a result, and of other packages.
OPTIONS = (
    "-x", "-q", "-p", "no:cacheprovider", "--assert=plain", "--hypothesis-profile=mutants",
    "-k", "not compiles and not imports",
)  # fmt: skip
LIMIT = 150.0  # CPU seconds after which the tests of one file loop; the slowest take 60, of most files 25
FAILED, BROKEN = 1, 2  # pytest's exit codes: of a test, and of a file of tests that cannot be imported


def tests_of(file: str) -> list[str]:
    """The tests of a file of the package; empty: the guard alone is to kill its mutants."""
    path = Path(file)
    for pattern, tests in TESTS.items():
        if fnmatch(file, pattern):
            return [test.format(folder=path.parent.name, name=path.stem) for test in tests]
    return []


def is_unit(file: str) -> bool:
    """Whether generated mutants of a file are run by its tests alone."""
    return bool(tests_of(file)) and not any(fnmatch(file, pattern) for pattern in GUARD_FIRST)


def tests_of_all(files: Iterable[str]) -> list[str]:
    """The tests of some files; empty if one of them has none."""
    found = [tests_of(file) for file in files]
    return sorted({test for tests in found for test in tests}) if all(found) else []


class _First:
    """The first test that fails, and what it says."""

    def __init__(self) -> None:
        self.test, self.detail = "", ""

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        self._see(report)

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        self._see(report)

    def _see(self, report: pytest.TestReport | pytest.CollectReport) -> None:
        if report.failed and not self.test:
            self.test = report.nodeid
            self.detail = report.longreprtext.strip().rpartition("\n")[2]


def run(task: Mapping[str, Any], case: Path) -> dict[str, Any]:
    """Run the tests until one fails: a `Catch`, and the whole name of the test.

    Raises:
        HybridKVError: they did not run.
    """
    import pytest

    for name in ("tests", "pyproject.toml"):
        (case.parent / name).symlink_to(Path(task["checkout"], name))
    code = pytest.main([*OPTIONS, *task["tests"]], plugins=[first := _First()])
    for interpreter in active_children():
        interpreter.kill()  # It waits for more work, and this process ends without cleaning up.
        interpreter.join()
    if code not in (0, FAILED, BROKEN):
        raise HybridKVError(f"pytest ended with {code}")
    catch = Catch(BY_TESTS, first.test.rpartition("::")[2], first.detail) if code else Catch()
    return {**asdict(catch), "test": first.test, "seconds": sum(os.times()[:4])}

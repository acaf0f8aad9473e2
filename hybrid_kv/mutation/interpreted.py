"""What the tests of Triton's kernels find: run by a fresh process in the folder of a changed copy of the package.

The tests start Triton's interpreter themselves, in a process of its own. They are the checkout's, linked beside the
copy, so that they import the copy.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from dataclasses import asdict
from multiprocessing import active_children
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hybrid_kv.errors import HybridKVError
from hybrid_kv.mutation.catch import Catch

if TYPE_CHECKING:
    import pytest

TESTS = "tests/kernels"
# Without those that compile, which say nothing of a result, and of other packages.
OPTIONS = (
    "-x", "-q", "-p", "no:cacheprovider", "--assert=plain", "--hypothesis-profile=mutants",
    "-k", "not compiles and not imports",
)  # fmt: skip
LOOPS = 100.0  # CPU seconds of a process behind which it loops; those of all kernels take 80, of one 25
FAILED, BROKEN = 1, 2  # pytest's exit codes: of a test, and of a file of tests that cannot be imported


class _First:
    """The first test that fails, and what it says."""

    def __init__(self) -> None:
        self.name, self.detail = "", ""

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        self._see(report)

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        self._see(report)

    def _see(self, report: pytest.TestReport | pytest.CollectReport) -> None:
        if report.failed and not self.name:
            self.name = report.nodeid.rpartition("::")[2] or report.nodeid
            self.detail = report.longreprtext.strip().rpartition("\n")[2]


def folders_of(files: Iterable[str]) -> list[str]:
    """The folders of the tests of changed files; what kernels have in common is tested by all of them."""
    names = {Path(file).parent.name for file in files}
    return [TESTS] if "common" in names else sorted(f"{TESTS}/{name}" for name in names)


def run(task: Mapping[str, Any], case: Path) -> dict[str, Any]:
    """Run the tests until one fails.

    Raises:
        HybridKVError: they did not run.
    """
    import pytest

    for name in ("tests", "pyproject.toml"):
        (case.parent / name).symlink_to(Path(task["checkout"], name))
    first = _First()
    code = pytest.main([*OPTIONS, *task["tests"]], plugins=[first])
    for interpreter in active_children():
        interpreter.kill()  # It waits for more work, and this process leaves without a goodbye: nobody would end it.
        interpreter.join()
    if code not in (0, FAILED, BROKEN):
        raise HybridKVError(f"pytest ended with {code}")
    catch = Catch("tests", first.name, first.detail) if code else Catch()
    return {**asdict(catch), "executed": None, "seconds": sum(os.times()[:4])}

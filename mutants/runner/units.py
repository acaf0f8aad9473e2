"""Tests that kill the mutants of a file, run by a fresh process in the folder of a copy.

Of units a table names the tests, since they are to kill every mutant. Tests of all other files
follow from what imports what: first those by the file's own name, then those that import it or what
stands above it in its folder.

Tests of Triton's kernels start Triton's interpreter themselves, in a process of its own. The tests
are the checkout's, linked next to the copy, so that they import the copy.
"""

from __future__ import annotations

import ast
import os
from collections.abc import Iterable, Mapping
from dataclasses import asdict
from fnmatch import fnmatch
from functools import cache
from multiprocessing import active_children
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hybrid_kv.errors import HybridKVError
from mutants.runner.guard import Catch

if TYPE_CHECKING:
    import pytest

BY_TESTS = "tests"  # the name of this way to kill a mutant
ROOT = Path(__file__).parents[2]  # of the checkout
PACKAGE, TESTS_FOLDER = ROOT / "hybrid_kv", ROOT / "tests"
# Whose tests are tests of the engine; those of the judges say nothing of it that the guard does not
# say.
ENGINE = ("attention", "cache", "engine", "kernels", "models", "spec_decode", "check/serve")
MOST = 12  # derived tests of a file
# By pattern of a file, the first that matches: its tests, with `{folder}` and `{name}` of its path.
TESTS: dict[str, tuple[str, ...]] = {
    "kernels/common/compiled.py": (
        "tests/kernels/common",
        "tests/kernels/block_tables/test_host.py",
    ),
    "kernels/common/spans.py": (
        "tests/kernels/common/test_spans.py",
        "tests/kernels/ssd/test_prefill.py",
    ),
    "kernels/common/*": (
        "tests/kernels/common",
        "tests/kernels/gated_norm",
        "tests/kernels/causal_conv1d",
        "tests/kernels/test_recurrences.py",
    ),
    "kernels/ssd/*": ("tests/kernels/ssd", "tests/kernels/test_recurrences.py"),
    "kernels/gated_delta/*": ("tests/kernels/gated_delta", "tests/kernels/test_recurrences.py"),
    "kernels/paged_attention/reference.py": (
        "tests/attention/test_paged.py",
        "tests/kernels/paged_attention",
    ),
    "kernels/recompute/r*.py": (
        "tests/kernels/recompute",
        "tests/kernels/gated_delta/test_recompute.py",
    ),
    "kernels/*/*": ("tests/kernels/{folder}",),
    "kernels/selective_scan.py": ("tests/kernels/test_recurrences.py",),
    "kernels/[!_]*": ("tests/kernels/test_{name}.py",),
    "cache/plan.py": ("tests/cache/test_plan.py", "tests/cache/test_capacity.py"),
    "cache/capacity.py": ("tests/cache/test_capacity.py", "tests/cache/test_plan.py"),
    "cache/spec.py": ("tests/cache/test_spec.py", "tests/cache/test_plan.py"),
    "cache/ranks.py": ("tests/cache/test_ranks.py", "tests/cache/test_plan.py"),
    "cache/backend.py": (
        "tests/cache/test_backend.py",
        "tests/cache/test_plan.py",
        "tests/attention/test_paged.py",
    ),
    "cache/offload.py": ("tests/cache/test_offload.py", "tests/engine/test_folder.py"),
    "cache/folder_tier.py": ("tests/cache/test_folder_tier.py", "tests/cache/test_offload.py"),
    "cache/block_hash.py": ("tests/cache/test_block_hash.py", "tests/cache/test_block_pool.py"),
    "cache/layout.py": ("tests/cache/test_layout.py",),
    "attention/rollback.py": (
        "tests/attention",
        "tests/engine/test_runner.py",
        "tests/cache/test_spec.py",
        "tests/cache/test_layout.py",
        "tests/engine/test_limits.py",
    ),
    "attention/*": ("tests/attention", "tests/engine/test_runner.py"),
    "models/mixers/rounded.py": ("tests/models/test_rounded.py",),
    "models/*": ("tests/models/test_layers.py", "tests/models/test_families.py"),
    "spec_decode/*": ("tests/spec_decode",),
    "config.py": ("tests/test_config.py", "tests/engine/test_limits.py"),
}
# What an engine does with these the guard sees, and soonest: their tests come behind it.
GUARD_FIRST = (
    "attention/*",
    "engine/*",
    "models/*",
    "spec_decode/*",
    "*.py",
    "cache/block_*.py",
    "cache/manager.py",
    "cache/modes.py",
    "cache/observe.py",
    "cache/prefix.py",
    "cache/request_blocks.py",
    "cache/spec.py",
)
# Without those that compile, which say nothing of a result, and of other packages.
OPTIONS = (
    "-x",
    "-q",
    "-p",
    "no:cacheprovider",
    "--assert=plain",
    "--hypothesis-profile=mutants",
    "-k",
    "not compiles and not imports",
)
# CPU seconds after which the tests of one file loop; the slowest take 60, of most files 25
LIMIT = 150.0
FAILED, BROKEN = (
    1,
    2,
)  # pytest's exit codes: of a test, and of a file of tests that cannot be imported


def tests_of(file: str) -> list[str]:
    """Return the tests of a file of the package, the nearest first.

    Empty: the guard alone is to kill its mutants.
    """
    path = Path(file)
    rows = (tests for pattern, tests in TESTS.items() if fnmatch(file, pattern))
    named = [test.format(folder=path.parent.name, name=path.stem) for test in next(rows, ())]
    if named and not is_seen_by_guard(file):
        return named
    covered = [
        test
        for test in derived_tests(file)
        if not any(Path(test).is_relative_to(known) for known in named)
    ]
    return named + covered[:MOST]


def derived_tests(file: str) -> list[str]:
    """Return the tests that import a file, or a file of its folder that needs it.

    First come those by its name, then those of its folder, the narrowest first.
    """
    path = Path(file)
    above = {file, *_users(file)}
    found: list[tuple[bool, bool, int, str]] = []
    for test in sorted(TESTS_FOLDER.rglob("test_*.py")):
        folder = test.parent.relative_to(TESTS_FOLDER)
        is_own = folder == path.parent and test.stem == f"test_{path.stem}"
        is_judge = not is_own and not any(folder.is_relative_to(name) for name in ENGINE)
        imported = _package_files(test)
        if is_judge or not (is_own or imported & above):
            continue
        place = (
            not is_own,
            folder != path.parent,
            len(imported),
            test.relative_to(ROOT).as_posix(),
        )
        found.append(place)
    return [test for _, _, _, test in sorted(found)]


@cache
def _users(file: str) -> frozenset[str]:
    """Return files of the same folder that import this one, themselves or through each other."""
    folder = [
        one.relative_to(PACKAGE).as_posix() for one in (PACKAGE / file).parent.glob("[!_]*.py")
    ]
    users, reached = set[str](), {file}
    while reached:
        reached = {
            one for one in folder if one not in users and _package_files(PACKAGE / one) & reached
        }
        users |= reached
    return frozenset(users)


@cache
def _package_files(file: Path) -> frozenset[str]:
    """Return files of the package that a file imports; a test also through what helps it."""
    found = set[str]()
    for module, name in _imports(file):
        source = _defined_in(module, name)
        if source is None or source == file:
            continue
        if source.is_relative_to(PACKAGE):
            found.add(source.relative_to(PACKAGE).as_posix())
        elif source.is_relative_to(TESTS_FOLDER) and not source.name.startswith("test_"):
            found |= _package_files(source)
    return frozenset(found)


@cache
def _imports(file: Path) -> frozenset[tuple[str, str]]:
    """Return module and name of all that a file imports."""
    found = set[tuple[str, str]]()
    for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
        if isinstance(node, ast.ImportFrom) and node.module:
            found |= {(node.module, alias.name) for alias in node.names}
        elif isinstance(node, ast.Import):
            found |= {(alias.name, "") for alias in node.names}
    return frozenset(found)


def _defined_in(module: str, name: str) -> Path | None:
    """Return the file of the checkout that an imported name comes from; None: no such.

    Packages that hand the name on are passed through.
    """
    for dotted in (f"{module}.{name}", module):
        path = ROOT.joinpath(*dotted.split("."))
        file = next(
            (one for one in (path.with_suffix(".py"), path / "__init__.py") if one.is_file()), None
        )
        if file is None:
            continue
        handed_on = [
            source for source, known in _imports(file) if known == name and source != module
        ]
        if file.name == "__init__.py" and handed_on:
            return _defined_in(handed_on[0], name)
        return file
    return None


def is_seen_by_guard(file: str) -> bool:
    """Return whether the guard sees what an engine does with a file, sooner than its tests."""
    return any(
        fnmatch(file, pattern) and (pattern != "*.py" or "/" not in file) for pattern in GUARD_FIRST
    )


def is_unit(file: str) -> bool:
    """Return whether generated mutants of a file are run by its tests alone."""
    return bool(tests_of(file)) and not is_seen_by_guard(file)


def tests_of_all(files: Iterable[str]) -> list[str]:
    """Return the tests of some files; empty if one of them has none."""
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

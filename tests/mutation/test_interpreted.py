"""Mutants of Triton's kernels, and what their tests say of them."""

from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path

import psutil
import pytest

from hybrid_kv.errors import HybridKVError
from hybrid_kv.mutation import hunt
from hybrid_kv.mutation.generated import TRITON, WAYS, Generated
from hybrid_kv.mutation.hunt import Forks, Hunt, hunt_all
from hybrid_kv.mutation.interpreted import folders_of
from tests.cli.run import run

FILE = "kernels/kernel_blocks/launch.py"
HUNT = Hunt(WAYS[TRITON], 300)


def mutant(old: str, new: str) -> Generated:
    text = (hunt.PACKAGE / FILE).read_text(encoding="utf-8")
    assert text.count(old) == 1
    return Generated("Z01", FILE, text.replace(old, new), range(1, 2), f"module: {old} => {new}", "0")


def left_by(group: int) -> list[list[str]]:
    """The command lines of a group's processes, but of its first, and of those that end by themselves."""
    found = []
    for process in psutil.process_iter():
        with suppress(ProcessLookupError, psutil.Error):
            if os.getpgid(process.pid) == group != process.pid:
                found.append(process.cmdline())
    return [words for words in found if words and "resource_tracker" not in words[-1]]


@pytest.mark.parametrize(
    "old, new, rule",
    [
        ("block * stride + (", "block * stride - (", "test_the_kernel_equals_the_other_expansions"),
        ("BLOCK = 1024", "BLOCK = 1024 // 0", "tests/kernels/kernel_blocks/test_launch.py"),
        ("BLOCK = 1024", "BLOCK = 1024 + 0", ""),
    ],
)
def test_the_first_test_that_fails_is_told(old: str, new: str, rule: str, forked: Forks) -> None:
    found = HUNT.ask(mutant(old, new), forked)
    assert (found.section, found.rule, found.caught) == ("tests" if rule else "", rule, bool(rule))
    assert found.executed is None and found.problem == ("" if rule else "not caught")
    assert left_by(forked._process.pid) == []


def test_what_loops_was_caught(forked: Forks, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hunt, "LOOPS", 3)
    found = HUNT.ask(mutant("BLOCK = 1024", "BLOCK = 1024\nwhile True:\n    pass"), forked)
    assert (found.section, found.rule, found.caught) == ("run", "time limit", True)


def test_tests_that_fail_without_a_mutant_hunt_none(monkeypatch: pytest.MonkeyPatch) -> None:
    found = {"section": "tests", "rule": "test_it", "detail": "assert 1 == 2"}
    monkeypatch.setattr(hunt, "_tested", lambda *_: found)
    with pytest.raises(HybridKVError, match="a test of the unchanged kernels fails: test_it: assert 1 == 2"):
        next(hunt_all([mutant("BLOCK = 1024", "BLOCK = 1025")], HUNT, 1))


def test_what_kernels_have_in_common_is_tested_by_all() -> None:
    assert folders_of(["kernels/ssd/slots.py", "kernels/ssd/prefill.py"]) == ["tests/kernels/ssd"]
    assert folders_of(["kernels/ssd/slots.py", "kernels/common/launch.py"]) == ["tests/kernels"]


def test_a_mutant_is_hunted_by_its_row(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    number = (hunt.PACKAGE / FILE).read_text(encoding="utf-8").splitlines().index("BLOCK = 1024") + 1
    name = f"{FILE}:{number}:NumberReplacer:1"
    code, out, _ = run(capsys, "mutants", "--by", "triton", "--id", name, "--results", str(tmp_path))
    assert (code, out) == (0, "1 of 1 caught: tests 1\n")
    (line,) = (tmp_path / "mutants.csv").read_text().splitlines()[1:]
    assert '""by"":""triton""' in line and '""section"":""tests""' in line

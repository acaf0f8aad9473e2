"""Mutants of units, and what their tests say of them."""

from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path

import psutil
import pytest

from hybrid_kv.errors import HybridKVError
from mutants.runner import units
from mutants.runner.generated import Generated, files
from mutants.runner.mutant import JUDGES, PACKAGE, Change, KnownBug
from mutants.runner.run import Forks, MutationRun
from tests.cli.run import run

RANKS, NORM = "cache/ranks.py", "kernels/gated_norm/launch.py"
STAGES = "        begins = [0]"


def mutant(file: str, old: str, new: str) -> Generated:
    text = (PACKAGE / file).read_text(encoding="utf-8")
    assert text.count(old) == 1
    return Generated("Z01", file, text.replace(old, new), f"module: {old} => {new}", "0")


def left_by(group: int) -> list[list[str]]:
    """Return command lines of a group's processes, without its first and short-lived ones."""
    found = []
    for process in psutil.process_iter():
        with suppress(ProcessLookupError, psutil.Error):
            if os.getpgid(process.pid) == group != process.pid:
                found.append(process.cmdline())
    return [words for words in found if words and "resource_tracker" not in words[-1]]


@pytest.mark.parametrize(
    "file, old, new, rule",
    [
        (RANKS, STAGES, STAGES.replace("0", "1"), "test_stages_divide_the_layers_as_vllm_does"),
        (RANKS, STAGES, "        begins = [0 + 0]", ""),
        (NORM, "/ SIZE + eps", "/ SIZE - eps", "test_equals_the_formula"),
    ],
)
def test_the_first_test_that_fails_kills_a_mutant(
    file: str, old: str, new: str, rule: str, forked: Forks, monkeypatch: pytest.MonkeyPatch
) -> None:
    # and not those of plans
    monkeypatch.setitem(units.TESTS, RANKS, ("tests/cache/test_ranks.py",))
    one = mutant(file, old, new)
    found = MutationRun(300).judge(one, one.ways("quick"), forked)
    assert (found.section, found.rule.partition("[")[0], found.caught) == (
        "tests" if rule else "",
        rule,
        bool(rule),
    )
    assert found.problem == ("" if rule else "not caught")
    assert left_by(forked.process.pid) == []


def test_a_loop_is_killed(forked: Forks, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(units, "LIMIT", 2)
    found = MutationRun(300).judge(
        mutant(RANKS, STAGES, f"{STAGES}\n        while True:\n            pass"),
        ("tests",),
        forked,
    )
    assert (found.section, found.rule, found.caught) == ("run", "time limit", True)


def test_a_known_bug_that_loops_is_caught_if_a_test_of_its_file_fails(
    forked: Forks, monkeypatch: pytest.MonkeyPatch
) -> None:
    answers = iter(
        (
            {"section": "tests", "rule": "test_it", "detail": "", "test": ""},
            {"section": "", "test": ""},
        )
    )

    def call(_: object, function: str, *__: object) -> dict[str, str]:
        if function == "guard.run":
            return {
                "section": "run",
                "rule": "time limit",
                "detail": "not done after 20 CPU seconds",
            }
        return dict(next(answers))

    monkeypatch.setattr(forked, "call", lambda *given: call(*given))
    known = KnownBug(
        "Z01", (), "", {}, (Change("engine/text.py", "TAIL_MARGIN = 8", "TAIL_MARGIN = 9"),)
    )
    caught, left = (MutationRun(300).judge(known, ("quick", "tests"), forked) for _ in range(2))
    assert (caught.section, caught.rule, caught.caught) == ("tests", "test_it", True)
    assert (left.section, left.rule, left.problem) == ("run", "time limit", "not caught")


def test_a_test_that_fails_without_a_mutant_too_kills_none(
    forked: Forks, monkeypatch: pytest.MonkeyPatch
) -> None:
    failed = {
        "section": "tests",
        "rule": "test_it",
        "detail": "assert 1 == 2",
        "test": "tests/test_it.py::test_it",
    }
    monkeypatch.setattr(forked, "call", lambda *_: {**failed})
    with pytest.raises(
        HybridKVError,
        match=r"tests/test_it\.py::test_it fails without a mutant, too: assert 1 == 2",
    ):
        MutationRun(300).judge(mutant(RANKS, STAGES, "        begins = [1]"), ("tests",), forked)


def test_every_file_has_tests_that_exist_or_is_for_the_guard() -> None:
    assert units.tests_of("kernels/ssd/slots.py") == [
        "tests/kernels/ssd",
        "tests/kernels/test_recurrences.py",
    ]
    assert (
        units.tests_of("kernels/moe.py")
        == units.tests_of_all(["kernels/moe.py"])
        == ["tests/kernels/test_moe.py"]
    )
    every = [
        file.relative_to(PACKAGE).as_posix()
        for file in PACKAGE.rglob("*.py")
        if file.stem != "__init__"
    ]
    engine = [file for file in every if file.split("/")[0] not in JUDGES]
    named = {test for file in engine for test in units.tests_of(file)}
    assert not [test for test in named if not (PACKAGE.parent / test).exists()]
    of_engine = [file for file in engine if file.split("/")[0] in units.ENGINE]
    assert [file for file in of_engine if not units.tests_of(file)] == []
    assert not {*files("tests")} & {*files("quick")} and len(files()) == len(files("tests")) + len(
        files("quick")
    )
    for patterns in (units.TESTS, units.GUARD_FIRST):
        assert not [pattern for pattern in patterns if not [*PACKAGE.glob(pattern)]]


@pytest.mark.parametrize(
    ("file", "test"),
    [
        ("engine/kv_transfer.py", "engine/test_kv_transfer.py"),  # by its name
        ("engine/text.py", "engine/test_text.py"),
        ("engine/state_cursor.py", "engine/test_llm.py"),  # of the engine, which imports it
        ("cache/prefix.py", "cache/test_manager.py"),
        ("cache/manager.py", "engine/test_scheduler.py"),  # of another folder
        ("cache/modes.py", "cache/test_capacity.py"),
        ("check/serve/answers.py", "check/serve/test_app.py"),
        ("models/layers.py", "models/test_layers.py"),
        ("models/mixers/conv.py", "models/test_families.py"),
    ],
)
def test_tests_follow_from_what_imports_what(file: str, test: str) -> None:
    assert f"tests/{test}" in units.tests_of(file)
    assert not any(
        found.startswith(("tests/check/guard/", "tests/check/probes/", "tests/cli/"))
        for found in units.tests_of(file)
    )


def test_known_bugs_of_units_go_to_their_tests_and_then_to_the_guard() -> None:
    def ways(by: str, *changed: str) -> tuple[str, ...]:
        return KnownBug("Z01", (), "", {}, tuple(Change(file, "a", "b") for file in changed)).ways(
            by
        )

    assert (
        ways("quick", "cache/plan.py")
        == ways("quick", "cache/plan.py", "cache/ranks.py")
        == ("tests", "quick")
    )
    assert ways("quick", "cache/manager.py") == ("quick", "tests")
    assert ways("quick", "cache/plan.py", "engine/llm.py") == ("quick", "tests")
    assert ways("full", "cache/plan.py") == ("full",)


def test_a_mutant_is_run_by_its_row(
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    forked: Forks,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(Forks, "close", lambda self: None)
    monkeypatch.setattr("mutants.runner.run.Forks", lambda: forked)
    number = (PACKAGE / RANKS).read_text(encoding="utf-8").splitlines().index(STAGES) + 1
    name = f"{RANKS}:{number}:NumberReplacer:1"
    code, out, _ = run(capsys, "mutants", "--id", name, "--results", str(tmp_path))
    assert (code, out) == (0, "1 of 1 caught: tests 1\n")
    (line,) = (tmp_path / "mutants.csv").read_text().splitlines()[1:]
    assert '""by"":""tests""' in line and '""section"":""tests""' in line and "begins" not in line

"""Whether times of this machine can be trusted now: what was seen, in six lines, and why not."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from hybrid_kv.measure.timing import fitness
from hybrid_kv.measure.timing.clock import Interval
from hybrid_kv.measure.timing.fitness import examine
from tests.cli.run import run
from tests.support.fitness import QUIET


@pytest.mark.parametrize(
    ("change", "why"),
    [
        ({}, ""),
        ({"stolen": 0.08}, "the hypervisor took 8%"),
        ({"stolen": None}, ""),
        ({"ratio": Interval(1.0, 0.9, 1.01)}, "equal work differed by 10.0%"),
        ({"waited": 0.1, "stolen": 0.1}, "others took 10% of a core, the hypervisor took 10%"),
    ],
)
def test_what_makes_a_machine_unfit_is_named(change: dict[str, Any], why: str) -> None:
    found = replace(QUIET, **change)
    assert found.unfit == why
    assert len(found.lines()) == 6
    assert found.lines()[-1].startswith(
        "trust     counts only: " + why if why else "trust     times that differ by"
    )


@pytest.mark.parametrize(("ratio", "least"), [((0.9998, 1.0002), "1.0%"), ((0.99, 1.02), "2.0%")])
def test_a_difference_that_another_start_makes_is_not_trusted(
    ratio: tuple[float, float], least: str
) -> None:
    """However little equal work differs in turns of one process."""
    found = replace(QUIET, ratio=Interval(1.0, *ratio))
    assert found.lines()[-1] == f"trust     times that differ by more than {least}, and counts"


def test_a_thread_that_gets_half_of_the_clock_is_on_a_loaded_machine(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    clock = [0.0]

    def seconds() -> float:
        clock[0] += 0.001
        return clock[0]

    monkeypatch.setattr(fitness, "wall_clock", seconds)
    for share, loaded in ((1.0, False), (0.5, True)):
        monkeypatch.setattr(fitness, "clock", lambda share=share: share * clock[0])
        found = examine(0.02)
        assert ("others took" in found.unfit) == loaded


@pytest.mark.parametrize(
    ("seen", "stolen"), [({"user": 40.0, "steal": 10.0}, 0.1), ({"user": 40.0}, None)]
)
def test_the_hypervisors_share_is_not_known_everywhere(
    monkeypatch: pytest.MonkeyPatch, seen: dict[str, float], stolen: float | None
) -> None:
    monkeypatch.setattr(fitness.psutil, "cpu_times_percent", lambda: SimpleNamespace(**seen))
    assert examine(0.02).stolen == stolen


def test_versions_that_differ_are_named(tmp_path: Path) -> None:
    file = tmp_path / "constraints.txt"
    file.write_text('# pins\npytest==0.1 ; python_version >= "3.11"\nno-such-package==1\n')
    (found,) = fitness.differing_versions(file)
    assert found.startswith("pytest ") and found.endswith(", not 0.1")


def test_the_command_fails_where_times_prove_nothing(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    monkeypatch.setattr(fitness, "examine", lambda seconds: QUIET)
    code, out, _ = run(capsys, "doctor")
    assert (code, out.count("\n")) == (0, 6)
    monkeypatch.setattr(fitness, "examine", lambda seconds: replace(QUIET, waited=0.5))
    code, out, _ = run(capsys, "doctor", "--json", "--out", str(tmp_path / "seen.json"))
    assert code == 1 and json.loads(out)["unfit"] == "others took 50% of a core"
    assert json.loads((tmp_path / "seen.json").read_text()) == json.loads(out)

"""Commits' folders, benchmarks run in them, and generated histories."""

from __future__ import annotations

import itertools
import math
import random
from pathlib import Path

import pytest

from bench.bisect.cells import Runs, fill_benchmarks, find_cell
from bench.bisect.generated import generate
from bench.bisect.history import Trees
from bench.bisect.question import NotMeasurableError
from bench.harness.cells import CellInfo
from hybrid_kv.config import ConfigError
from tests.bench.bisect.toy import checkout
from tests.bench.harness.toy import TORCH, git, write_toy


@pytest.fixture
def toy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A toy on a clock that counts work."""
    (tmp_path / "torch.py").write_text(TORCH)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    return write_toy(tmp_path / "toy")


def test_benchmarks_run_at_any_commit(toy: Path, tmp_path: Path) -> None:
    def runs(name: str, tier: str) -> Runs:
        cell = CellInfo("toy", name, {"size": 1}, tier)
        return Runs(Trees(tmp_path / name, fill_benchmarks(toy)), cell, random.Random(0))

    commit = {
        name: git(toy, "rev-parse", name) for name in ("base", "slow", "blocks", "raising", "empty")
    }
    step, raising, held = runs("step", "cpu"), runs("raising", "cpu"), runs("held", "count")
    assert [*itertools.islice(step.measure(commit["base"], commit["slow"]), 2)] == pytest.approx(
        [math.log(1.05)] * 2
    )
    assert step.max_error == 0.25
    assert (held.count(commit["base"]), held.count(commit["blocks"])) == (
        {"blocks": 10},
        {"blocks": 12},
    )
    with pytest.raises(NotMeasurableError, match="cannot run: RuntimeError: no 9"):
        next(raising.measure(commit["base"], commit["raising"]))
    for _ in range(2):  # a commit without files leaves no folder
        with pytest.raises(NotMeasurableError, match="has no folder hybrid_kv"):
            held.count(commit["empty"])


def test_a_name_is_one_benchmark() -> None:
    whole = "scheduler/decode[mode=none,K=0,num_reqs=16]"
    assert (
        find_cell(whole).key == find_cell("Scheduler/decode[mode=none,K=0,num_reqs=16").key == whole
    )
    with pytest.raises(ConfigError, match=r"names \d+ benchmarks, such as scheduler/"):
        find_cell("scheduler/")


def test_a_generated_history_has_its_first_bad_commit_and_commits_that_cannot_run(
    tmp_path: Path,
) -> None:
    root = tmp_path / "root"
    root.mkdir()
    good, _ = checkout(root, ["", "later"])
    edits = {
        "hybrid_kv/cli/__main__.py": lambda text: text.replace("import sys", "import sys, wave")
    }
    clone = tmp_path / "clone"
    commits = generate(root, good, clone, edits, num=60, first_bad=40, rng=random.Random(5))
    assert len(commits) == 60 and git(clone, "rev-parse", "HEAD") == commits[-1]

    def text(number: int, file: str) -> str:
        return git(clone, "show", f"{commits[number]}:hybrid_kv/{file}")

    assert [number for number in (0, 39, 40, 59) if "wave" in text(number, "cli/__main__.py")] == [
        40,
        59,
    ]
    cannot_run = [number for number in range(60) if "half a change" in text(number, "__init__.py")]
    assert cannot_run and not {39, 40, 59} & {*cannot_run}

"""asv itself, unpatched, over two commits of a scratch clone: build, environment, run, pages.

The clone's .venv is the environment of the tests, as `make` would have made it, so that no package
is installed anew.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from bench.harness import history_rows
from hybrid_kv.measure.results import read_rows

Asv = Callable[..., str]

ROOT = Path(history_rows.__file__).resolve().parents[2]
BENCHMARK = "memory.Held.track_most"
CASE = rf"^{BENCHMARK}\('all', 3\)$"
NAME = ("-c", "user.name=test", "-c", "user.email=test@example.com")


def git(folder: Path, *arguments: str) -> str:
    return subprocess.run(
        ["git", *arguments], cwd=folder, check=True, capture_output=True, text=True
    ).stdout


def copy_working_tree(clone: Path) -> None:
    """Bring what is not committed into the clone."""
    changed = git(ROOT, "ls-files", "--modified", "--others", "--exclude-standard", "-z").split(
        "\0"
    )
    for name in filter(None, changed):
        if (ROOT / name).is_file():
            (clone / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, clone / name)
        else:
            (clone / name).unlink(missing_ok=True)


@pytest.fixture(scope="module")
def clone(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two commits: the checkout's, and one that lets a request hold a block more."""
    folder = tmp_path_factory.mktemp("clone") / "hybrid_kv"
    git(ROOT, "clone", "--quiet", str(ROOT), str(folder))
    copy_working_tree(folder)
    shutil.rmtree(folder / "results" / "asv", ignore_errors=True)
    (folder / ".venv").symlink_to(sys.prefix)
    git(folder, "checkout", "--quiet", "-B", "main")
    git(folder, "add", "--all")
    git(folder, *NAME, "commit", "--quiet", "--allow-empty", "--message", "as it is")
    return folder


@pytest.fixture(scope="module")
def asv(clone: Path) -> Asv:
    """Run a command of asv; return what it prints."""

    def run(*arguments: str) -> str:
        environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
        command = [sys.executable, "-m", "asv", *arguments]
        done = subprocess.run(
            command, cwd=clone, env=environment, capture_output=True, text=True, check=False
        )
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    run("machine", "--yes", "--machine", "tests")
    return run


@pytest.fixture(scope="module")
def compared(asv: Asv) -> str:
    return asv("continuous", "--machine", "tests", "--bench", CASE, "HEAD~1", "HEAD")


def test_asv_measures_two_commits(clone: Path, asv: Asv, compared: str) -> None:
    assert "BENCHMARKS NOT SIGNIFICANTLY CHANGED" in compared
    commits = git(clone, "rev-list", "-n2", "HEAD").split()
    for commit in commits:
        (file,) = (clone / "results" / "asv" / "tests").glob(f"{commit[:8]}-*.json")
        values = json.loads(file.read_text())["results"][BENCHMARK][0]
        assert [value for value in values if value == value and value] != []
    assert BENCHMARK in asv("compare", "--machine", "tests", "HEAD~1", "HEAD")


def test_asv_publishes_them(clone: Path, asv: Asv, compared: str) -> None:
    asv("publish", "--no-pull")
    assert BENCHMARK in (clone / ".asv" / "html" / "index.json").read_text()


def test_what_asv_measured_is_kept_as_rows(
    clone: Path, compared: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(history_rows, "ASV_RESULTS", clone / "results" / "asv")
    monkeypatch.setattr(history_rows, "DATA_SET", tmp_path / "history.parquet")
    commits = git(clone, "rev-list", "-n2", "HEAD").split()
    for _ in range(2):
        assert history_rows.keep_rows("tests", commits) == 2
    rows = read_rows(tmp_path / "history.parquet")
    assert sorted(rows["commit"]) == sorted(commits)
    assert set(rows["params"]) == {'{"K":3,"by":"asv","mode":"all"}'}
    assert (
        set(rows["metric"]) == {"most"}
        and set(rows["unit"]) == {"blocks"}
        and (rows["value"] > 0).all()
    )
    assert not rows["dirty"].any()

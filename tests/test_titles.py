"""`.ci/titles`: what the messages of commits say."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.bench.harness.toy import git

SCRIPT = Path(__file__).parent.parent / ".ci" / "titles"


def run(folder: Path, base: str = "HEAD~1") -> subprocess.CompletedProcess[str]:
    """Check the commits of a repository after a revision."""
    return subprocess.run(
        [sys.executable, str(SCRIPT), base], cwd=folder, capture_output=True, text=True
    )


@pytest.fixture
def repository(tmp_path: Path) -> Path:
    """Return a repository with one commit, whose message follows no rule."""
    git(tmp_path, "init", "-q", "-b", "main")
    git(tmp_path, "commit", "-q", "--allow-empty", "-m", "Whatever came before")
    return tmp_path


@pytest.mark.parametrize(
    "title, fault",
    [
        ("block_table: Stage a step in one call", ""),
        ("cache, request: move what observers need", ""),
        ("Stage a step in one call", "no scope"),
        ("block_table: Stage", "no scope, verb and object"),
        ("block_table: a step is staged in one call", "a is not a verb"),
        ("block_table: " + "x" * 60, "longer than 72 characters"),
    ],
)
def test_a_title_is_a_scope_and_an_imperative(repository: Path, title: str, fault: str) -> None:
    git(repository, "commit", "-q", "--allow-empty", "-m", title)
    checked = run(repository)
    assert checked.returncode == bool(fault)
    assert fault in checked.stdout


@pytest.mark.parametrize(
    "file, lines, body, passes",
    [
        ("cache.py", 50, "", True),
        ("cache.py", 51, "", False),
        ("cache.py", 51, "A hit was one block too long.", True),
        ("results/rows.csv", 51, "", True),
    ],
)
def test_a_long_commit_says_why(
    repository: Path, file: str, lines: int, body: str, passes: bool
) -> None:
    path = repository / file
    path.parent.mkdir(exist_ok=True)
    path.write_text("line\n" * lines)
    git(repository, "add", file)
    git(repository, "commit", "-q", "-m", f"cache: Cut a hit\n\n{body}")
    checked = run(repository)
    assert checked.returncode == (not passes)
    assert ("51 lines and no body" in checked.stdout) is not passes


def test_a_base_that_is_no_revision_is_one_line(repository: Path) -> None:
    checked = run(repository, "v9.9")
    assert checked.returncode == 2
    assert "v9.9 is no revision" in checked.stderr and "Traceback" not in checked.stderr

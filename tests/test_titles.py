"""`.ci/titles`: what a pull request's commits are called."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from tests.bench.harness.toy import git

SCRIPT = Path(__file__).parent.parent / ".ci" / "titles"


@pytest.mark.parametrize(
    "title, fault",
    [
        ("block_table: stage a step in one call", ""),
        ("cache, request: move what observers need", ""),
        ("stage a step in one call", "no scope"),
        ("block_table: " + "x" * 60, "longer than 72 characters"),
    ],
)
def test_a_title_has_a_scope_and_fits_a_line(tmp_path: Path, title: str, fault: str) -> None:
    git(tmp_path, "init", "-q", "-b", "main")
    for message in ("Whatever came before", title):
        git(tmp_path, "commit", "-q", "--allow-empty", "-m", message)
    found = subprocess.run(
        ["bash", str(SCRIPT), "HEAD~1"], cwd=tmp_path, capture_output=True, text=True
    )
    assert found.returncode == bool(fault)
    assert fault in found.stdout

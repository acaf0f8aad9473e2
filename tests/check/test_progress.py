"""Where a progress bar is shown."""

from __future__ import annotations

import subprocess
import sys

import pytest

from hybrid_kv.check.progress import progress_bar


def test_the_guard_in_a_pipe_prints_lines_alone() -> None:
    command = [sys.executable, "-m", "hybrid_kv.cli", "guard", "--quick", "-k", "eviction"]
    done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    first, *rest = done.stdout.splitlines()
    assert first.startswith("eviction ") and rest == ["", "1 of 1 checks passed"]


@pytest.mark.parametrize(
    ("out", "err", "shown"), [(True, True, True), (False, True, False), (True, False, False)]
)
def test_a_bar_is_shown_where_nothing_is_redirected(
    monkeypatch: pytest.MonkeyPatch, out: bool, err: bool, shown: bool
) -> None:
    monkeypatch.setattr("sys.stdout.isatty", lambda: out)
    monkeypatch.setattr("sys.stderr.isatty", lambda: err)
    with progress_bar(total=2) as bar:
        assert bar.disable is not shown
    with progress_bar(total=2, shown=False) as bar:
        assert bar.disable

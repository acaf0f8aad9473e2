"""A run is repeated as soon as a file of the engine changes."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from hybrid_kv.check.targets import ours
from hybrid_kv.check.targets.target import Kind
from hybrid_kv.cli import target as module
from hybrid_kv.config import ConfigError

KIND = Kind("toy", {}, ours.Ours, package="toy", python="python")


def test_it_runs_again_after_a_change_and_after_an_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (file := tmp_path / "block_pool.py").touch()
    renewed = list[tuple[str, str]]()
    monkeypatch.setattr(module, "renew_loader", lambda *given: renewed.append(given))
    runs = 0

    def run() -> int:
        nonlocal runs
        runs += 1
        # it changes before the run ends, so that nothing is waited for
        os.utime(file, ns=(runs, runs))
        if runs == 2:
            raise ConfigError("invalid syntax (block_pool.py, line 3)")
        if runs == 3:
            raise KeyboardInterrupt
        return 1

    with pytest.raises(KeyboardInterrupt):
        module.watch([tmp_path], KIND, run)
    assert renewed == [("toy", "python")] * 2


@pytest.mark.parametrize(
    ("path", "kind", "said"),
    [
        ("absent", KIND, "absent: there is no such file"),
        (".", ours.KIND, "ours has no environment"),
    ],
)
def test_what_cannot_be_watched_is_rejected(path: str, kind: Kind, said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        module.watch([Path(path)], kind, lambda: 0)

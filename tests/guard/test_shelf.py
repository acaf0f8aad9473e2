"""A folder tier that does something else with its files than it promises is seen."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from hybrid_kv.cache import folder_tier
from hybrid_kv.guard.shelf import MUST_HAPPEN, looks_wrong, play_shelf


def test_a_folder_has_the_files_that_it_should_have(tmp_path: Path) -> None:
    wrong, happened = play_shelf(tmp_path, np.random.default_rng(1), 100)
    assert not wrong
    assert happened.keys() == {*MUST_HAPPEN} and all(happened.values())


@pytest.mark.parametrize(
    ("name", "broken", "seen"),
    [
        ("_alive", lambda pid: True, "start again: whether "),
        ("_is_folder", os.path.isdir, "a folder is a link: "),
        (
            "_is_folder",
            lambda path: not os.path.islink(path) and not os.path.isfile(path),
            "the folder vanishes: ",
        ),
        ("_is_strange", lambda path: False, "something strange has the name: "),
        ("SCAN_SECONDS", 60.0, "should have gone"),
        ("FORMAT_VERSION", 2, "has another content"),
    ],
)
def test_a_tier_that_breaks_a_promise_is_seen(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, name: str, broken: Any, seen: str
) -> None:
    monkeypatch.setattr(folder_tier, name, broken)
    wrong, _ = play_shelf(tmp_path, np.random.default_rng(1), 200)
    assert seen in wrong


def test_a_hit_that_is_counted_with_other_bytes_is_seen(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    read = folder_tier.FolderTier.read

    def counting(tier: folder_tier.FolderTier, key: Any, data: Any) -> bool:
        found, path = read(tier, key, data), str(tier.path(key))
        if path in tier._files:
            tier._files[path] = 2 * tier._files[path][0], tier._files[path][1]
        return found

    monkeypatch.setattr(folder_tier.FolderTier, "read", counting)
    wrong, _ = play_shelf(tmp_path, np.random.default_rng(1), 200)
    assert "should have gone" in wrong


def test_the_youngest_block_does_not_go_first(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    class YoungestFirst(folder_tier.OrderedDict[str, tuple[int, int]]):
        def items(self) -> Any:
            return reversed(super().items())

    monkeypatch.setattr(folder_tier, "OrderedDict", YoungestFirst)
    wrong, _ = play_shelf(tmp_path, np.random.default_rng(1), 200)
    assert "should be there" in wrong or "should have gone" in wrong  # both are so


@pytest.mark.parametrize(
    ("name", "value", "tick"), [("REFRESH_SECONDS", 0.5, 2**-7), ("SCAN_SECONDS", 20.0, 0.25), ("SHARE", 0.5, 1.0)]
)
def test_a_tier_that_looks_at_its_folder_too_often_is_seen(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, name: str, value: float, tick: float
) -> None:
    assert not looks_wrong(tmp_path / "right", tick)
    monkeypatch.setattr(folder_tier, name, value)
    assert "it looks: True" in looks_wrong(tmp_path / "wrong", tick)

"""Host memory that keeps, counts or brings back something else than it should is seen."""

from __future__ import annotations

from collections import OrderedDict
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from hybrid_kv.cache import offload
from hybrid_kv.cache.offload import KVOffload
from hybrid_kv.guard.play import unwarned
from hybrid_kv.guard.tiers import LIMITS, play_tiers


def play(folder: Path, seed: int = 0) -> str:
    with unwarned():
        return play_tiers(folder, np.random.default_rng(seed), 30)


@pytest.mark.parametrize("seed", range(5))
def test_both_tiers_have_what_they_should_have(tmp_path: Path, seed: int) -> None:
    assert not play(tmp_path, seed)


def test_tiers_in_which_nothing_happens_are_void(tmp_path: Path) -> None:
    assert play_tiers(tmp_path, np.random.default_rng(0), 1, LIMITS[:1]).startswith("void: ")


class LastInFirstOut(OrderedDict[Any, Any]):
    def popitem(self, last: bool = True) -> Any:
        return super().popitem(not last)


class FirstInFirstOut(OrderedDict[Any, Any]):
    def move_to_end(self, key: Any, last: bool = True) -> None:
        pass


@pytest.mark.parametrize("order", [LastInFirstOut, FirstInFirstOut])
def test_another_block_that_leaves_is_seen(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, order: Any) -> None:
    monkeypatch.setattr(offload, "OrderedDict", order)
    assert "counts and what is due" in (found := play(tmp_path)) or "is there" in found


@pytest.mark.parametrize("less", [1, -1])
def test_a_size_of_host_memory_that_is_a_byte_off_is_seen(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, less: int
) -> None:
    init = KVOffload.__init__

    def off(self: KVOffload, *given: Any, host_bytes: int, **options: Any) -> None:
        init(self, *given, host_bytes=host_bytes - less, **options)

    monkeypatch.setattr(KVOffload, "__init__", off)
    assert play(tmp_path).startswith(f"host memory of {LIMITS[1] - (less < 0)} B")


@pytest.mark.parametrize("figure", ["host_hits", "folder_hits", "misses"])
def test_a_figure_of_a_fetch_that_did_not_happen_is_seen(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, figure: str
) -> None:
    fetch = KVOffload.fetch

    def lie(self: KVOffload, keys: Any) -> Any:
        setattr(self.stats, figure, getattr(self.stats, figure) + 1)
        return fetch(self, keys)

    monkeypatch.setattr(KVOffload, "fetch", lie)
    assert f"counts and what is due: {{'{figure}'" in play(tmp_path)


def test_a_later_group_that_is_not_stored_is_seen(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    copies = KVOffload._to_host
    monkeypatch.setattr(
        KVOffload,
        "_to_host",
        lambda self, blocks: {key: data for key, data in copies(self, blocks).items() if not key[0]},
    )
    assert play(tmp_path)

"""A folder's identity that leaves something out is seen."""

from __future__ import annotations

import re
from typing import Any

import pytest

from hybrid_kv.cache import folder_tier, offload
from hybrid_kv.cache.manager import HitLostError, KVCacheManager
from hybrid_kv.engine import build
from hybrid_kv.guard.checks.folders import OTHERS, check_folders
from hybrid_kv.guard.registry import Run


def test_every_engine_finds_its_own_blocks_and_no_others() -> None:
    result, damaged, events = check_folders(Run(len(OTHERS)))
    assert result.passed and result.figures["loaded_blocks"] > 100
    assert damaged.passed, damaged.detail
    assert damaged.figures["lost_blocks"] > 5
    assert events.passed, events.detail


@pytest.mark.parametrize(("forgotten", "seen"), [(r"^GUARD_\w+ ", "attention_backend"), (r" ExactModel.*", "weights")])
def test_an_identity_without_a_part_is_seen(monkeypatch: pytest.MonkeyPatch, forgotten: str, seen: str) -> None:
    identity = build._identity

    def shorter(*given: object) -> str:
        # The kernel blocks go with their backend.
        return re.sub(r"^[\d ]+", "", re.sub(forgotten, "", identity(*given)))  # type: ignore[arg-type]

    monkeypatch.setattr(build, "_identity", shorter)
    result, *_ = check_folders(Run(len(OTHERS)))
    assert not result.passed and f"engines that differ in {seen}" in result.detail and "wrong answers" in result.detail


def test_an_engine_that_does_not_find_its_own_blocks_is_void(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(offload.KVOffload, "contains", lambda self, key: False)
    result, *_ = check_folders(Run(1))
    assert not result.passed and result.detail.startswith("void: ")


def test_a_block_that_is_held_for_a_hit_that_was_lost_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    class Forgetful(KVCacheManager):
        def allocate_slots(self, *given: Any, **options: Any) -> Any:
            try:
                return super().allocate_slots(*given, **options)
            except HitLostError:
                self.pool.allocate(1)
                raise

    monkeypatch.setattr(build, "KVCacheManager", Forgetful)
    _, damaged, _ = check_folders(Run(0))
    assert not damaged.passed and "other reference counts than owners" in damaged.detail


def test_a_block_that_is_held_behind_a_copy_that_failed_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    class Leaky(KVCacheManager):
        def allocate_slots(self, *given: Any, **options: Any) -> Any:
            try:
                return super().allocate_slots(*given, **options)
            except RuntimeError:
                self.pool.allocate(1)
                raise

    monkeypatch.setattr(build, "KVCacheManager", Leaky)
    _, damaged, _ = check_folders(Run(0))
    assert "behind a copy to the device that fails" in damaged.detail


def test_a_folder_with_other_files_than_it_should_have_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(folder_tier, "_is_strange", lambda path: False)
    *_, events = check_folders(Run(0))
    assert not events.passed and "event" in events.detail


def test_a_folder_whose_limit_is_lost_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    class Unlimited(offload.KVOffload):
        def __init__(self, *given: Any, folder_bytes: int | None = None, **options: Any) -> None:
            super().__init__(*given, **options)

    monkeypatch.setattr(build, "KVOffload", Unlimited)
    *_, events = check_folders(Run(0))
    assert not events.passed and "in kv_offload_folder_bytes=" in events.detail

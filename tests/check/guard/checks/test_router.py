"""Section *router* sees events that are wrong, and patterns that did not happen."""

from __future__ import annotations

import pytest

from hybrid_kv.cache.manager import KVCacheManager
from hybrid_kv.check.guard.checks import router
from hybrid_kv.check.guard.registry import Run
from hybrid_kv.engine.events import CacheEvents, EventLog, KnownCache


def detail(amount: int = 8) -> str:
    (result,) = router.check_router(Run(amount, 0))
    return result.detail


def test_events_that_are_lost_are_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(KVCacheManager, "_notify_unpublished", lambda *_: None)
    assert "are known wrongly" in detail(2)


def test_blocks_of_one_group_alone_predict_too_little(monkeypatch: pytest.MonkeyPatch) -> None:
    """What vllm!43258 was about: events of one block size."""
    heard = EventLog.on_publish
    monkeypatch.setattr(EventLog, "on_publish", lambda self, *args: args[1] or heard(self, *args))
    assert "known wrongly" in detail() or "are predicted" in detail()


def test_a_router_that_keeps_what_it_knew_behind_missed_events_is_seen(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def apply(self: KnownCache, events: CacheEvents) -> None:
        self.keys = (self.keys | events.stored) - events.removed

    monkeypatch.setattr(KnownCache, "apply", apply)
    assert "known wrongly" in detail()


def test_a_router_that_takes_old_events_for_new_ones_is_seen(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def apply(self: KnownCache, events: CacheEvents) -> None:
        if events.is_snapshot or events.number != self._next:
            self.keys.clear()
        self.keys = (self.keys | events.stored) - events.removed
        self._next = events.number + 1

    monkeypatch.setattr(KnownCache, "apply", apply)
    assert "known wrongly" in detail()


def test_what_never_happens_makes_it_void(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(router, "ROUNDS", 1)
    assert detail(1).startswith("void")

"""An order of eviction that costs hits, and nothing else, is seen."""

from __future__ import annotations

from typing import Any

import pytest

from hybrid_kv.cache import block_pool
from hybrid_kv.cache.manager import KVCacheManager
from hybrid_kv.check.guard.checks.eviction import check_eviction
from hybrid_kv.check.guard.registry import Run

REFRESH = block_pool.BlockPool.refresh


def test_losing_what_was_used_last_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    def youngest(self: Any, count: int) -> Any:
        ids = self.ids()[::-1][:count].copy()
        self.discard(ids)
        return ids

    monkeypatch.setattr(block_pool.LRUQueue, "pop", youngest)
    (result,) = check_eviction(Run(3))
    assert not result.passed and "mode all" in result.detail


@pytest.mark.parametrize(
    "broken", [lambda self, ids: None, lambda self, ids: REFRESH(self, ids[::-1])]
)
def test_a_state_given_back_in_the_middle_that_is_as_old_as_that_is_seen(
    monkeypatch: pytest.MonkeyPatch, broken: Any
) -> None:
    """Mode align: what a request gave back counts as used when it ends, with all else of it."""
    monkeypatch.setattr(block_pool.BlockPool, "refresh", broken)
    (result,) = check_eviction(Run(3))
    assert (
        not result.passed
        and result.detail.startswith("mode align")
        and "order of their use" in result.detail
    )


def test_evictions_that_are_counted_by_the_call_are_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    allocate = block_pool.BlockPool.allocate

    def by_call(self: Any, count: int) -> Any:
        before = self.num_evictions
        ids = allocate(self, count)
        self.num_evictions = min(self.num_evictions, before + 1)
        return ids

    monkeypatch.setattr(block_pool.BlockPool, "allocate", by_call)
    (result,) = check_eviction(Run(3))
    assert not result.passed and "evictions are counted" in result.detail


def test_an_order_as_it_should_be_passes() -> None:
    """Of 30 trials ten are in mode align; junctions and evictions meet in few of them."""
    (result,) = check_eviction(Run(30))
    assert result.passed, result.detail


def test_a_chunk_that_passes_a_junction_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    chunk_end = KVCacheManager.chunk_end

    def blind(self: KVCacheManager, start: int, end: int, num_tokens: int, junction: int) -> int:
        return chunk_end(self, start, end, num_tokens)

    monkeypatch.setattr(KVCacheManager, "chunk_end", blind)
    (result,) = check_eviction(Run(30))
    assert not result.passed and result.detail.startswith("mode align")

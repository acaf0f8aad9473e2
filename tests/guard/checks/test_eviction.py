"""An order of eviction that costs hits, and nothing else, is seen."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from hybrid_kv.cache import block_pool, manager
from hybrid_kv.guard.checks.eviction import check_eviction
from hybrid_kv.guard.registry import Run


@pytest.mark.parametrize("seed", range(3))
def test_what_was_used_last_is_kept(seed: int) -> None:
    (result,) = check_eviction(Run(4, seed))
    assert result.passed and result.figures["evictions"] > 10, result.detail


def test_losing_the_beginning_of_a_prefix_first_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    sort = np.argsort
    monkeypatch.setattr(manager.np, "argsort", lambda keys, **given: sort(-keys, **given))
    (result,) = check_eviction(Run(4))
    assert not result.passed and "tokens cached" in result.detail


def test_losing_what_was_used_last_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    def youngest(self: Any, count: int) -> Any:
        ids = self.ids()[::-1][:count].copy()
        self.discard(ids)
        return ids

    monkeypatch.setattr(block_pool._LRUQueue, "pop", youngest)
    assert not check_eviction(Run(4))[0].passed

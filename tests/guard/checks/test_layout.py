"""A view that leaves its page is seen."""

from __future__ import annotations

import pytest

from hybrid_kv.cache.backend import AttentionBackend
from hybrid_kv.guard.checks.layout import check_layout
from hybrid_kv.guard.registry import Run


def test_every_view_keeps_to_its_page() -> None:
    (result,) = check_layout(Run(40))
    assert result.passed and result.n == 40


def test_a_layout_guessed_by_its_shape_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    def guess(cls: type[AttentionBackend], block_size: int, num_kv_heads: int, head_size: int) -> int:
        shape = cls.get_kv_cache_shape(2, block_size, num_kv_heads, head_size)
        return 0 if shape[0] != 2 else 1

    monkeypatch.setattr(AttentionBackend, "get_kv_cache_block_dim", classmethod(guess))
    assert not check_layout(Run(40))[0].passed

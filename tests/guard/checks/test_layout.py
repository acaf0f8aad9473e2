"""A view that leaves its page is seen."""

from __future__ import annotations

import pytest

from hybrid_kv.attention.undo import ReplaySpec
from hybrid_kv.cache import layout
from hybrid_kv.cache.backend import AttentionBackend
from hybrid_kv.cache.spec import MambaSpec
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


def test_a_token_that_has_no_room_in_its_page_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    latent_view = layout.latent_view
    monkeypatch.setattr(layout, "latent_view", lambda *layer: latent_view(*layer)[..., :-1])
    (result,) = check_layout(Run(40))
    assert not result.passed and "page 0 is not bytes 0" in result.detail


def test_rings_that_are_not_counted_are_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ReplaySpec, "bytes_per_row", lambda self, inputs: 0)
    (result,) = check_layout(Run(40))
    assert not result.passed and "mamba: a request of 64 tokens takes" in result.detail


def test_a_misaligned_part_that_is_taken_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(MambaSpec, "__post_init__", lambda self: None)
    (result,) = check_layout(Run(40))
    assert not result.passed and "taken; a torch." in result.detail

"""Mistakes in layers of a family, for checks that must see them."""

from __future__ import annotations

import pytest
import torch

from hybrid_kv.models import moe
from hybrid_kv.models.mixers import conv
from hybrid_kv.models.mixers.conv import RecurrentMixer


def no_states(monkeypatch: pytest.MonkeyPatch) -> None:
    original = RecurrentMixer.read_states
    monkeypatch.setattr(
        RecurrentMixer,
        "read_states",
        lambda *arguments: tuple(map(torch.zeros_like, original(*arguments))),
    )


def next_expert(monkeypatch: pytest.MonkeyPatch) -> None:
    original = moe.apply_experts
    monkeypatch.setattr(
        moe,
        "apply_experts",
        lambda x, ids, weights, up, *rest: original(x, (ids + 1) % len(up), weights, up, *rest),
    )


def late_window(monkeypatch: pytest.MonkeyPatch) -> None:
    original = conv.windows_at
    monkeypatch.setattr(
        conv,
        "windows_at",
        lambda inputs, rows, first, size: original(inputs, rows, (first - 1).clamp(min=0), size),
    )

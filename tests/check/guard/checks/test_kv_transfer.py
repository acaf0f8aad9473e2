"""A split of prefill and decode is checked, and a state that stays behind is seen."""

from __future__ import annotations

import pytest

from hybrid_kv.check.guard.checks import kv_transfer
from hybrid_kv.check.guard.checks.kv_transfer import check_kv_transfer
from hybrid_kv.check.guard.registry import CHECKS, Run
from hybrid_kv.engine import kv_transfer as engine_kv_transfer
from hybrid_kv.engine.runner import ModelRunner


def test_a_state_whose_history_is_left_behind_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ModelRunner, "flush_all", lambda self, request: None)
    (continued,) = check_kv_transfer(Run(CHECKS["kv transfer"].amounts["quick"], fail_fast=True))
    assert not continued.passed and continued.failed_after is not None


def test_keys_of_a_head_that_stay_behind_are_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        engine_kv_transfer, "_kept_tokens", lambda name, spec, num_tokens, runner: range(num_tokens)
    )
    assert "other drafts than alone" in kv_transfer.drafts_behind(0).detail


def test_traffic_in_which_nothing_happened_is_void() -> None:
    (continued,) = check_kv_transfer(Run(0))
    assert not continued.passed and continued.detail.startswith("void: never handed over")

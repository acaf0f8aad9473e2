"""The section ends at the first failure, counts what it ran, and is void where too little happened."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from hybrid_kv.attention import mamba
from hybrid_kv.engine import runner
from hybrid_kv.guard.checks.exact_model import check_exact_model
from hybrid_kv.guard.registry import Run
from hybrid_kv.kernels.block_tables import host


def exact_model_passes() -> bool:
    return check_exact_model(Run(150))[0].passed


def test_clean_code_passes() -> None:
    assert exact_model_passes()


def test_a_block_table_that_is_a_block_idx_late_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    original = host.HostTables.place

    def late(self: host.HostTables, rows: Any, num_reqs_padded: int) -> bool:
        self.forget()
        is_changed = original(self, rows, num_reqs_padded)
        for table in self.input_tables:
            table[: len(rows)] = table[: len(rows)].roll(1, dims=1)
        return is_changed

    monkeypatch.setattr(host.HostTables, "place", late)
    assert not exact_model_passes()


@pytest.mark.parametrize("value", [True, False])
def test_a_stuck_initial_state_flag_is_seen(monkeypatch: pytest.MonkeyPatch, value: bool) -> None:
    build = mamba.MambaMetadataBuilder.build

    def stuck(self: mamba.MambaMetadataBuilder, *arguments: Any) -> mamba.MambaMetadata:
        built = build(self, *arguments)
        flag = built.has_initial_state
        return built if flag is None else replace(built, has_initial_state=torch.full_like(flag, value))

    monkeypatch.setattr(mamba.MambaMetadataBuilder, "build", stuck)
    assert not exact_model_passes()


def test_the_first_failure_is_counted_and_can_end_the_section(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(runner, "postprocess_mamba", lambda *_: None)
    unlike, *others = check_exact_model(Run(60))
    requests = unlike.metrics["requests_to_failure"]
    assert len(others) == 2 and 0 < requests < unlike.n and 0 < unlike.failed_after < unlike.seconds
    (first,) = check_exact_model(Run(60, fail_fast=True))
    assert first.n == requests == first.metrics["requests_to_failure"] and not first.passed


def test_settings_that_exclude_each_other_are_void() -> None:
    unlike, settings = check_exact_model(Run(20, only={"mode": "attention", "scheme": "recompute"}))
    assert unlike.n == 0 and not settings.passed and settings.detail.startswith("void: no row")


def test_a_run_without_a_pattern_is_void() -> None:
    _, patterns, settings = check_exact_model(Run(20))
    assert not patterns.passed and patterns.detail.startswith("void: never happened: ")
    assert not settings.passed and settings.detail.startswith("void: ")

"""The guard sees planted mistakes: each is one line of the source, undone afterwards.

They are of the kinds that README's "What it finds" lists.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from hybrid_kv.attention import mamba
from hybrid_kv.cache import block_table
from hybrid_kv.guard.checks.exact_model import check_exact_model
from hybrid_kv.guard.registry import Run
from hybrid_kv.kernels import slot_mapping


def exact_model_passes() -> bool:
    return check_exact_model(Run(150))[0].passed


def test_clean_code_passes() -> None:
    assert exact_model_passes()


def test_a_block_table_with_the_wrong_stride_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    original = block_table.gather_kernel_blocks

    def one_column_short(
        table: torch.Tensor, rows: torch.Tensor, num: int, offsets: torch.Tensor, out: torch.Tensor
    ) -> None:
        width = table.shape[1]
        shifted = table.reshape(-1)[: len(table) * (width - 1)].view(len(table), width - 1) if width > 1 else table
        original(shifted, rows, min(num, shifted.shape[1]), offsets, out)

    monkeypatch.setattr(block_table, "gather_kernel_blocks", one_column_short)
    assert not exact_model_passes()


def test_slots_that_are_one_too_far_are_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    def off_by_one(*args: torch.Tensor | int) -> torch.Tensor:
        return slot_mapping.slot_mapping(*args) + 1  # type: ignore[arg-type]

    monkeypatch.setattr(block_table, "slot_mapping", off_by_one)
    assert not exact_model_passes()


def test_a_window_that_begins_one_row_up_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    build = mamba.MambaMetadataBuilder.build

    def one_row_up(self: mamba.MambaMetadataBuilder, *arguments: Any) -> mamba.MambaMetadata:
        built = build(self, *arguments)
        return replace(built, window_rows=(built.window_rows - 1).clamp(min=0))

    monkeypatch.setattr(mamba.MambaMetadataBuilder, "build", one_row_up)
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


def test_the_result_does_not_depend_on_the_number_of_processes() -> None:
    alone, together = check_exact_model(Run(150)), check_exact_model(Run(150, workers=2))
    assert [replace(result, seconds=0.0) for result in alone] == [replace(result, seconds=0.0) for result in together]


def test_a_run_without_a_pattern_is_void() -> None:
    _, patterns, settings = check_exact_model(Run(20))
    assert not patterns.passed and patterns.detail.startswith("void: never happened: ")
    assert not settings.passed and settings.detail.startswith("void: ")

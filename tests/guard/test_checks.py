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
from hybrid_kv.cache.backend import AttentionBackend
from hybrid_kv.engine.llm import LLM
from hybrid_kv.guard.checks import LARGEST, check_exact_model, check_layout, logit_difference, record_logits
from hybrid_kv.kernels import slot_mapping
from hybrid_kv.models import exact
from hybrid_kv.sampling import SamplingParams


def ignore(count: int) -> None:
    """A progress bar that nobody watches."""


def exact_model_passes() -> bool:
    return check_exact_model(0, 150, ignore)[0].passed


def test_clean_code_passes() -> None:
    assert exact_model_passes()
    assert all(result.passed for result in check_layout(0, 40, ignore))


def test_block_table_stride(monkeypatch: pytest.MonkeyPatch) -> None:
    original = block_table.gather_kernel_blocks

    def one_column_short(
        table: torch.Tensor, rows: torch.Tensor, num: int, offsets: torch.Tensor, out: torch.Tensor
    ) -> None:
        width = table.shape[1]
        shifted = table.reshape(-1)[: len(table) * (width - 1)].view(len(table), width - 1) if width > 1 else table
        original(shifted, rows, min(num, shifted.shape[1]), offsets, out)

    monkeypatch.setattr(block_table, "gather_kernel_blocks", one_column_short)
    assert not exact_model_passes()


def test_layout_guessed_by_shape(monkeypatch: pytest.MonkeyPatch) -> None:
    def guess(cls: type[AttentionBackend], block_size: int, num_kv_heads: int, head_size: int) -> int:
        shape = cls.get_kv_cache_shape(2, block_size, num_kv_heads, head_size)
        return 0 if shape[0] != 2 else 1

    monkeypatch.setattr(AttentionBackend, "get_kv_cache_block_dim", classmethod(guess))
    assert not check_layout(0, 40, ignore)[0].passed


def test_slot_offset(monkeypatch: pytest.MonkeyPatch) -> None:
    def off_by_one(*args: torch.Tensor | int) -> torch.Tensor:
        return slot_mapping.slot_mapping(*args) + 1  # type: ignore[arg-type]

    monkeypatch.setattr(block_table, "slot_mapping", off_by_one)
    assert not exact_model_passes()


def test_conv_window_row(monkeypatch: pytest.MonkeyPatch) -> None:
    build = mamba.MambaMetadataBuilder.build

    def one_row_up(self: mamba.MambaMetadataBuilder, *arguments: Any) -> mamba.MambaMetadata:
        built = build(self, *arguments)
        return replace(built, num_accepted_tokens=(built.num_accepted_tokens - 1).clamp(min=1))

    monkeypatch.setattr(mamba.MambaMetadataBuilder, "build", one_row_up)
    assert not exact_model_passes()


@pytest.mark.parametrize("value", [True, False])
def test_initial_state_flag(monkeypatch: pytest.MonkeyPatch, value: bool) -> None:
    build = mamba.MambaMetadataBuilder.build

    def stuck(self: mamba.MambaMetadataBuilder, *arguments: Any) -> mamba.MambaMetadata:
        built = build(self, *arguments)
        flag = built.has_initial_state
        return built if flag is None else replace(built, has_initial_state=torch.full_like(flag, value))

    monkeypatch.setattr(mamba.MambaMetadataBuilder, "build", stuck)
    assert not exact_model_passes()


def test_the_result_does_not_depend_on_the_number_of_processes() -> None:
    alone, together = check_exact_model(0, 150, ignore), check_exact_model(0, 150, ignore, workers=2)
    assert [replace(result, seconds=0.0) for result in alone] == [replace(result, seconds=0.0) for result in together]


def test_a_run_without_a_pattern_is_void() -> None:
    _, patterns, settings = check_exact_model(0, 20, ignore)
    assert not patterns.passed and patterns.detail.startswith("void: never happened: ")
    assert not settings.passed and settings.detail.startswith("void: ")


@pytest.mark.parametrize(("mode", "method"), [("none", None), ("none", "ngram"), ("all", "ngram")])
def test_recorded_logits_cover_every_computed_token(mode: str, method: str | None) -> None:
    llm = LLM(
        exact.ExactModel(), num_blocks=200, max_num_seqs=3, max_num_batched_tokens=8, max_model_len=64, device="cpu",
        block_size=8, mamba_cache_mode=mode, speculative_method=method, num_speculative_tokens=3 if method else 0,
    )  # fmt: skip
    prompts = [[1, 2, 3, 4, 5, 6, 7, 1, 2, 3], [8], [1, 2, 3, 4, 5, 6, 7, 1, 2, 3, 4]]
    for output, logits in record_logits(llm, prompts, SamplingParams(max_tokens=4)):
        # The last token's own logits are never computed: nothing follows it. Nor are those of cached tokens.
        assert len(logits) == len(output.prompt_token_ids) + len(output.token_ids) - 1 - output.cached_tokens
        assert logits[-len(output.token_ids) :].argmax(-1).tolist() == output.token_ids
    assert output.cached_tokens == (8 if mode == "all" else 0)


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
def test_a_logit_that_is_no_number_is_the_largest_difference(value: float) -> None:
    logits = torch.zeros(3, 4, dtype=torch.float64)
    logits[1, 2] = value
    assert logit_difference(logits, torch.zeros(3, 4, dtype=torch.float64)).tolist() == [0, LARGEST, 0]

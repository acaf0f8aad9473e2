"""The guard sees planted mistakes: each is one line of the source, undone afterwards.

They are of the kinds that README's "What it finds" lists.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from hybrid_kv.attention import mamba
from hybrid_kv.cache import block_table
from hybrid_kv.cache.backend import AttentionBackend
from hybrid_kv.engine import runner
from hybrid_kv.engine.llm import LLM
from hybrid_kv.engine.sampling import SamplingParams
from hybrid_kv.guard.checks import LARGEST, check_exact_model, check_layout, logit_difference, record_logits
from hybrid_kv.kernels import causal_conv1d, slot_mapping
from hybrid_kv.models import exact


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


def test_conv_state_shift(monkeypatch: pytest.MonkeyPatch) -> None:
    store: Callable[..., None] = exact.ExactMamba._store

    def shifted(indices: torch.Tensor, window: torch.Tensor, *rest: torch.Tensor) -> None:
        store(indices, window.roll(1, dims=1), *rest)

    monkeypatch.setattr(exact.ExactMamba, "_store", staticmethod(shifted))
    assert not exact_model_passes()


@pytest.mark.parametrize("value", [True, False])
def test_initial_state_flag(monkeypatch: pytest.MonkeyPatch, value: bool) -> None:
    original = mamba.build_mamba_metadata

    def stuck(*args: object) -> mamba.MambaMetadata:
        built = original(*args)  # type: ignore[arg-type]
        flag = built.has_initial_state
        changed = None if flag is None else torch.full_like(flag, value)
        return mamba.MambaMetadata(built.num_decodes, built.state_indices, built.prefill_rows, changed)

    monkeypatch.setattr(runner, "build_mamba_metadata", stuck)
    assert not exact_model_passes()


def test_recorded_logits_cover_every_token() -> None:
    llm = LLM(
        exact.ExactModel(), num_blocks=60, max_num_seqs=3, max_num_batched_tokens=5, max_model_len=64, device="cpu"
    )
    for output, logits in record_logits(llm, [[1, 2, 3, 4, 5, 6, 7], [8]], SamplingParams(max_tokens=4)):
        # The last token's own logits are never computed: nothing follows it.
        assert len(logits) == len(output.prompt_token_ids) + len(output.token_ids) - 1
        start = len(output.prompt_token_ids) - 1
        assert logits[start:].argmax(-1).tolist() == output.token_ids


def test_conv_window_matters_to_the_real_kernel() -> None:
    x = torch.randn(1, 3, 2, dtype=torch.float64)
    weight = torch.randn(2, 4, dtype=torch.float64)
    window = torch.randn(1, 3, 2, dtype=torch.float64)
    y, after = causal_conv1d.causal_conv1d_prefill(x, weight, None, window, torch.tensor([3]))
    shifted, _ = causal_conv1d.causal_conv1d_prefill(x, weight, None, window.roll(1, dims=1), torch.tensor([3]))
    assert not torch.allclose(y, shifted)
    assert torch.equal(after, x)


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
def test_a_logit_that_is_no_number_is_the_largest_difference(value: float) -> None:
    logits = torch.zeros(3, 4, dtype=torch.float64)
    logits[1, 2] = value
    assert logit_difference(logits, torch.zeros(3, 4, dtype=torch.float64)).tolist() == [0, LARGEST, 0]

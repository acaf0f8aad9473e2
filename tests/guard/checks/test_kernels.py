"""References equal their definitions; one term that is wrong is seen, whatever the operation."""

from __future__ import annotations

import inspect
import textwrap
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from hybrid_kv.attention.mamba import MambaMetadataBuilder
from hybrid_kv.attention.paged import (
    FlashAttentionCompute,
    FlashInferCompute,
    TorchCompute,
    build_paged_attention_metadata,
)
from hybrid_kv.cache.backend import backend_of, get_backend, select_kernel_block_size
from hybrid_kv.cache.block_table import BlockTables, LaunchedBlockTables
from hybrid_kv.guard.checks import kernels as checked
from hybrid_kv.guard.checks.kernels import check_kernels
from hybrid_kv.guard.kernel_cases import (
    CASES,
    attention,
    backends,
    blocks,
    drafts,
    experts,
    metadata,
    replay,
    staging,
    states,
    tables,
)
from hybrid_kv.guard.kernel_cases.draw import Case
from hybrid_kv.guard.registry import Run
from hybrid_kv.kernels.block_tables import reference as block_tables
from hybrid_kv.kernels.causal_conv1d import reference as causal_conv1d
from hybrid_kv.kernels.gated_delta import reference as gated_delta
from hybrid_kv.kernels.gated_norm import reference as gated_norm
from hybrid_kv.kernels.kernel_blocks import reference as kernel_blocks
from hybrid_kv.kernels.mla import reference as mla
from hybrid_kv.kernels.moe import reference as moe
from hybrid_kv.kernels.paged_attention import reference as paged_attention
from hybrid_kv.kernels.replay import reference as replay_reference
from hybrid_kv.kernels.replay import ring
from hybrid_kv.kernels.selective_scan import reference as selective_scan
from hybrid_kv.kernels.slot_mapping import reference as slot_mapping
from hybrid_kv.kernels.ssd import host
from hybrid_kv.kernels.ssd import reference as ssd
from hybrid_kv.spec_decode.propose import NgramProposer


@pytest.mark.parametrize("seed", [0, 1, 2])
def test_references_and_loops_are_as_their_definitions_say(seed: int) -> None:
    (result,) = check_kernels(Run(4, seed))
    assert result.passed, result.detail
    assert result.n > 400


def test_one_case_can_be_asked_for_alone() -> None:
    results = [check_kernels(Run(2, 0, only={"case": case.__name__}))[0] for case in CASES]
    assert sum(result.n for result in results) == check_kernels(Run(2, 0))[0].n
    assert all(result.n for result in results)


PLANTS: list[tuple[Case, Callable[..., Any], str, str]] = [
    (states.mamba2, ssd.selective_state_update, "torch.exp(dt * A)", "torch.exp(-dt * A)"),
    (states.mamba2, ssd.chunk_scan, ".tril_()", ".tril_(-1)"),
    (states.mamba2, ssd._advance, "> last[:, None]", ">= last[:, None]"),
    (states.mamba2, host.scan_tokens, "wanted[torch.from_numpy(order)] =", "wanted[:] ="),
    (states.mamba1, selective_scan.selective_scan, "states[:, -1]", "states[:, 0]"),
    (states.mamba1, selective_scan.selective_scan_update, "addcmul_(x, D)", "addcmul_(x, D.abs())"),
    (states.gated_delta, gated_delta.gated_delta_update, "(v[:, t] - read", "(v[:, t] + read"),
    (states.gated_delta, gated_delta._inside, "(v - carried[:, :, 1])", "v.clone()"),
    (states.convolution, causal_conv1d.causal_conv1d, "inputs[:, j : j + length]", "inputs[:, 0:length]"),
    (states.convolution, causal_conv1d.windows_at, "first, size)", "first * 0, size)"),
    (states.gated_norm, gated_norm.gated_rms_norm_reference, "eps=eps", "eps=0.0"),
    (blocks.state_update_slots, ssd.selective_state_update_slots_reference, " & (targets != 0)", ""),
    (blocks.scan_prefill, ssd.chunk_scan_prefill_reference, "(sources > 0)", "(sources >= 0)"),
    (blocks.convolution_update, causal_conv1d.causal_conv1d_update_reference, "kernel - 2 +", "kernel - 1 +"),
    (blocks.convolution_update, causal_conv1d.causal_conv1d_update_reference, "[active, 0]", "[active, -1]"),
    (blocks.convolution_prefill, causal_conv1d.causal_conv1d_prefill_reference, "has_initial_state[active] & ", ""),
    (attention.padded, paged_attention.token_index, "last.unsqueeze(1)", "last.max().expand(len(last), 1)"),
    (
        attention.padded,
        paged_attention.attend_tokens,
        "query.transpose(1, 2), key",
        "query.transpose(1, 2), key.flip(2)",
    ),
    (attention.padded, paged_attention.attention_mask, "size - 1 - positions", "size - 2 - positions"),
    (attention.varlen, paged_attention.paged_attention_varlen_reference, "~seen.any(0)", "~seen.all(0)"),
    (attention.latent, mla.attend_latent, "[..., :rank]", "[..., -rank:]"),
    (experts.routers, moe.route_sigmoid, "-torch.inf", "0.0"),
    (experts.experts, moe.apply_experts, "order // top_k", "order % tokens"),
    (experts.experts, moe.apply_experts, "weights.unsqueeze(1), shares", "weights.abs().unsqueeze(1), shares"),
    (tables.slots, slot_mapping.slot_mapping, "column < table.shape[1]", "column <= table.shape[1]"),
    (tables.expansions, kernel_blocks.expand_torch, "kernel_block_stride or ", ""),
    (tables.block_tables, block_tables.update_block_tables_reference, "[num_reqs : batch", "[num_reqs + 1 : batch"),
    (backends.readers, backend_of, "if isinstance(spec, FullAttentionSpec)", "if type(spec) is FullAttentionSpec"),
    (backends.names, get_backend, 'name == "auto"', 'name >= "auto"'),
    (backends.sizes, select_kernel_block_size, "sorted(fixed, reverse=True)", "sorted(fixed)"),
    (
        metadata.attended,
        build_paged_attention_metadata,
        "int(totals[first:last].max())",
        "int(totals[first:last].min())",
    ),
    (metadata.attended, TorchCompute.attend, "[..., None, None], 0)", "[..., None, None], 1)"),
    (metadata.attended, FlashAttentionCompute.attend, "part.num_keys", "part.num_keys + 1"),
    (metadata.attended, FlashInferCompute.attend, "query.shape[2:]", "query.shape[3:]"),
    (metadata.attended, FlashInferCompute._plan, "% page_size + 1", "% page_size"),
    (metadata.states, MambaMetadataBuilder.build, "chunk_size=CHUNK_BYTES", "chunk_size=2 * CHUNK_BYTES"),
    (metadata.states, MambaMetadataBuilder.build, "arrays = common.query_lens, anchors, prev_step, ", "arrays = "),
    (staging.staged_tables, BlockTables.append_block_ids, "index == self.max_num_reqs", "index > 0"),
    (staging.staged_tables, LaunchedBlockTables.update, "self._num_staged or ", ""),
    (staging.staged_tables, BlockTables.update, '"num_blocks", ', ""),
    (states.mamba2, ssd.chunk_scan, "round(length / chunk_size)", "round(length * chunk_size)"),
    (states.gated_delta, gated_delta.gated_delta_chunk, "round(length / chunk_size)", "length // chunk_size"),
    (blocks.convolution_prefill, causal_conv1d.causal_conv1d_prefill_reference, "(sources > 0)", "(sources > 1)"),
    (attention.varlen, paged_attention.paged_attention_varlen_reference, "block_table[row, 0]", "block_table[row, -1]"),
    (experts.experts, moe._takes_groups, "% 16", "% 17"),
    (tables.slots, slot_mapping.slot_mapping, "PAD_SLOT)", "0)"),
    (drafts.ngrams, NgramProposer._propose_row, "int(ends[0])", "int(ends[-1])"),
    (drafts.ngrams, NgramProposer._propose_row, "length < self.max_ngram", "length <= self.max_ngram"),
    (replay.planes, ring.split_state, "high - (low >> 15)", "high"),
    (replay.steps, replay_reference.commit_reference, "+ lengths + cursors", "+ cursors"),
    (replay.steps, replay_reference.replay_update_reference, ".where(i <= now[:, None], 0)", ""),
    (replay.steps, replay_reference.replay_flush_reference, "later * A", "later"),
]


@pytest.mark.parametrize(("case", "function", "old", "new"), PLANTS, ids=[f"{p[1].__name__}: {p[2]}" for p in PLANTS])
def test_a_term_that_is_wrong_is_seen(
    case: Case, function: Callable[..., Any], old: str, new: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = textwrap.dedent(inspect.getsource(function))
    assert source.count(old) == 1
    planted: dict[str, Any] = {}
    exec("from __future__ import annotations\n" + source.replace(old, new), {**function.__globals__}, planted)
    monkeypatch.setattr(checked, "CASES", [case])
    # The code alone: whoever imported the function runs it, too.
    monkeypatch.setattr(function, "__code__", planted[function.__name__].__code__)
    (result,) = check_kernels(Run(20))
    assert not result.passed
    assert any(part in result.detail for part in ("it is off by", ", not ", "Error: ", "the definition has"))


def test_a_case_that_fails_is_one_thing_that_is_wrong(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(draw: object) -> Any:
        raise IndexError("out of range")

    monkeypatch.setattr(checked, "CASES", [broken, CASES[0]])
    (result,) = check_kernels(Run(1))
    assert result.value == 1 and result.n > 1
    assert result.detail == "round 0: broken: IndexError: out of range"


@pytest.mark.parametrize(
    ("got", "expected", "error"),
    [
        ([1.0, 2.0], [1.0, 2.0], ""),
        ([1.0, 2.0], [1.0, 2.0 + 3e-5], "it is off by 3e-05 of 2"),
        ([1.0, np.nan], [1.0, np.nan], ""),
        ([1.0, np.nan], [1.0, 2.0], "it is off by inf of 2"),
        ([1.0, 2.0], [1.0, np.nan], "it is off by inf of 1"),
        ([1.0, 2.0], [[1.0, 2.0]], "the definition has [1, 2]"),
        ([], [], ""),
    ],
)
def test_numbers_are_compared_by_the_largest_and_nan_with_nan(got: Any, expected: Any, error: str) -> None:
    assert checked._error(torch.tensor(got, dtype=torch.float32), np.array(expected, dtype=float)) == error


def test_integers_are_equal_or_told() -> None:
    assert checked._error(torch.tensor([1, 2]), np.array([1, 2])) == ""
    assert checked._error(torch.tensor([1, 2]), np.array([1, 3])) == "[1, 2], not [1, 3]"

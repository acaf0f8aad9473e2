"""Damage of every kind moves a logit, or changes a token, in the cells that can meet it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from hybrid_kv.cache.manager import KVCacheManager
from hybrid_kv.cache.request_blocks import NO_HIT
from hybrid_kv.check.guard.exactness import (
    FLOAT32_LIMIT,
    LARGEST,
    MTP_CELLS,
    Alone,
    beside_transformers,
    describe,
    logit_difference,
)
from hybrid_kv.check.guard_model import FOLDER
from hybrid_kv.engine.drafter import MTPDrafter
from hybrid_kv.engine.llm import LLM
from hybrid_kv.kernels.slot_mapping import PAD_SLOT
from hybrid_kv.models.mixers import mamba2
from hybrid_kv.models.random_checkpoint import write_checkpoint
from hybrid_kv.sampling import SamplingParams


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> Alone:
    folder = tmp_path_factory.mktemp("nemotron_h")
    kinds = ["linear_attention", "full_attention"] * 2 + ["moe"]
    write_checkpoint("nemotron_h", folder, keys={"layers_block_type": kinds})
    return Alone(folder, max_tokens=6)


def zeroed(
    x: torch.Tensor,
    dt: torch.Tensor,
    A: torch.Tensor,
    B: torch.Tensor,
    C: torch.Tensor,
    D: torch.Tensor,
    state: torch.Tensor,
    *rest: Any,
) -> tuple[torch.Tensor, torch.Tensor]:
    return ORIGINAL_SCAN(x, dt, A, B, C, D, torch.zeros_like(state), *rest)


ORIGINAL_SCAN = mamba2.chunk_scan


def test_states_that_a_hit_does_not_bring_are_missed(
    alone: Alone, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(mamba2.Mamba2Mixer, "scan", staticmethod(zeroed))
    found = {describe(cell): alone.check(cell).problem for cell in alone.cells()}
    in_one_piece = "none, drafts mixed"  # nothing is cached, and every prompt is one chunk
    assert all(bool(problem) == (cell != in_one_piece) for cell, problem in found.items()), found


def test_a_head_that_costs_hits_is_seen(drafting: Alone, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(KVCacheManager, "find_longest_cache_hit", lambda *_: NO_HIT)
    assert drafting.check(MTP_CELLS[-1]).broken[0] == "hits"


@pytest.fixture(scope="module")
def drafting() -> Alone:
    return Alone(FOLDER)


def test_drafts_of_all_rows_that_go_with_a_row_at_its_end_are_seen(
    drafting: Alone, monkeypatch: pytest.MonkeyPatch
) -> None:
    cell = MTP_CELLS[-1]
    drafting.drafts_alone(cell["mamba_cache_mode"])
    original = MTPDrafter.write_slots

    def all_padded(
        self: MTPDrafter, rows: torch.Tensor, positions: torch.Tensor, fit: bool
    ) -> tuple[torch.Tensor, torch.Tensor]:
        places, slots = original(self, rows, positions, fit)
        return places, slots if fit else torch.full_like(slots, PAD_SLOT)

    monkeypatch.setattr(MTPDrafter, "write_slots", all_padded)
    assert "got other drafts than alone" in drafting.check(cell).problem
    found = drafting.check({key: value for key, value in cell.items() if key != "to_the_end"})
    assert found.problem == "" and found.num_drafts > 40


def test_a_cell_that_shows_nothing_is_void(alone: Alone) -> None:
    assert (
        alone.check({"max_num_seqs": 1, "preempts": True}).problem
        == "void: no request was preempted"
    )
    assert alone.check({"script": "wrong"}).problem == "void: no draft was accepted"
    found = alone.check({"mamba_cache_mode": "all", "block_size": 256})
    assert found.problem == "void: no prompt token came from the cache"


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
def test_a_logit_that_is_no_number_is_the_largest_difference(value: float) -> None:
    logits = torch.zeros(3, 4, dtype=torch.float64)
    logits[1, 2] = value
    assert logit_difference(logits, torch.zeros(3, 4, dtype=torch.float64)).tolist() == [
        0,
        LARGEST,
        0,
    ]


@pytest.mark.parametrize("side", ["engine", "transformers"])
def test_a_side_that_is_no_number_is_far_away(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, side: str
) -> None:
    model = write_checkpoint("nemotron_h", tmp_path)
    llm = LLM(tmp_path, device="cpu", max_model_len=64, max_num_seqs=1)
    damaged = llm.model.lm_head.weight if side == "engine" else model.lm_head.weight
    damaged.data[5, 0] = float("nan")
    params = SamplingParams(max_tokens=2)
    assert [far for *_, far in beside_transformers(model, llm, [[1, 2, 3]], params)] > [
        FLOAT32_LIMIT
    ]

"""The trained models' logits show mistakes in delta nets, experts and convolutions."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from hybrid_kv.check.guard.checks.guard_model import (
    LOGIT_CELLS,
    Questions,
    check_guard_logits,
    result_of,
)
from hybrid_kv.check.guard.exactness import FLOAT64_LIMIT
from hybrid_kv.check.guard.registry import Run
from hybrid_kv.check.guard.trained import TRAINED
from hybrid_kv.models.mtp import MTPHead
from tests.support import injected_mistakes as injected

MODEL = TRAINED["qwen3_5_moe_text"]


@pytest.fixture(scope="module")
def questions() -> Questions:
    return Questions(MODEL, seed=7, count=2)


@pytest.mark.parametrize("damage", [injected.no_states, injected.next_expert, injected.late_window])
def test_damage_is_seen(
    questions: Questions, monkeypatch: pytest.MonkeyPatch, damage: Callable[..., None]
) -> None:
    damage(monkeypatch)
    result = result_of(questions.run(LOGIT_CELLS[1], "cpu"), MODEL, 0)
    assert not result.passed and result.value > 1e-3
    assert result.name.endswith(", qwen3.5 moe") and result.params["model"] == "guard_model_qwen3_5"


def test_nothing_runs_behind_the_first_cell_that_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    injected.no_states(monkeypatch)
    (result,) = check_guard_logits(Run(1, fail_fast=True))
    assert not result.passed and result.value > 1e-3


def test_a_head_that_drafts_worse_is_seen_though_every_token_is_right(
    questions: Questions, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It drafts from its own embedding alone, instead of its last output, in every mode."""
    (cell,) = [
        cell
        for cell in LOGIT_CELLS
        if cell.get("speculative_method") == "mtp" and "logprobs" in cell
    ]
    assert result_of(questions.run(cell, "cpu"), MODEL, 0).passed
    forward = MTPHead.forward

    def without_hidden(self: MTPHead, hidden: torch.Tensor, *rest: Any) -> torch.Tensor:
        return forward(self, hidden if len(rest) == 3 else hidden * 0, *rest)

    monkeypatch.setattr(MTPHead, "forward", without_hidden)
    found = questions.run(cell, "cpu")
    result = result_of(found, MODEL, 0)
    assert found.num_wrong == 0 and found.worst < FLOAT64_LIMIT
    assert " drafts accepted, " in result.detail and result.verdict == "fail"

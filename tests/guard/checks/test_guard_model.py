"""The logits of the trained models show mistakes in what the second one brings: delta nets, experts, convolutions."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from hybrid_kv.guard.checks.guard_model import LOGIT_CELLS, Questions, check_guard_logits, result_of
from hybrid_kv.guard.registry import Run
from hybrid_kv.guard.trained import TRAINED
from tests.guard.checks import test_families as injected

MODEL = TRAINED["qwen3_5_moe_text"]


@pytest.fixture(scope="module")
def questions() -> Questions:
    return Questions(MODEL, seed=7, count=2)


@pytest.mark.parametrize("damage", [injected.no_states, injected.next_expert, injected.late_window])
def test_damage_is_seen(questions: Questions, monkeypatch: pytest.MonkeyPatch, damage: Callable[..., None]) -> None:
    damage(monkeypatch)
    result = result_of(questions.run(LOGIT_CELLS[1], "cpu"), MODEL, 0)
    assert not result.passed and result.value > 1e-3
    assert result.name.endswith(", qwen3.5 moe") and result.params["model"] == "guard_model_qwen3_5"


def test_nothing_runs_behind_the_first_cell_that_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    injected.no_states(monkeypatch)
    (result,) = check_guard_logits(Run(1, fail_fast=True))
    assert not result.passed and result.value > 1e-3

"""The section of the guard that runs one tiny model per family."""

from __future__ import annotations

import pytest
import torch

from hybrid_kv.engine.drafter import MTPDrafter
from hybrid_kv.guard.checks import families
from hybrid_kv.guard.checks.families import check_families
from hybrid_kv.guard.registry import Run
from hybrid_kv.kernels.slot_mapping import PAD_SLOT
from hybrid_kv.models import attention
from hybrid_kv.models.registry import sized


@pytest.fixture(autouse=True)
def one_family(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("hybrid_kv.models.registry.sized", lambda: {"qwen3_5_text": ["tiny"]})


def test_a_family_and_the_trained_head_pass_with_their_figures() -> None:
    told: list[float] = []
    family, distance, head = check_families(Run(2, progress=told.append))
    assert family.passed and distance.passed and head.passed and sum(told) == 2
    assert distance.name == "distance from transformers, qwen3_5_text" and 1e-8 < distance.value < 2e-5
    assert family.name == "largest logit difference, qwen3_5_text" and 0 < family.value < 1e-11
    assert family.params == {"family": "qwen3_5_text", "seed": 0}
    assert {"none_async", "align_offload", "all_drafts_mixed", "cached_tokens"} <= family.figures.keys()
    assert (head.value, head.unit) == (0, "drafts") and head.n > 100 and head.figures["accepted"] > 20


def test_a_rotation_that_starts_anew_in_every_chunk_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    original = attention.PagedAttentionMetadata.rotation

    def anew(self: attention.PagedAttentionMetadata, *args: object) -> object:
        object.__setattr__(self, "positions", torch.arange(len(self.positions)))
        return original(self, *args)  # type: ignore[arg-type]

    monkeypatch.setattr(attention.PagedAttentionMetadata, "rotation", anew)
    monkeypatch.setattr(families, "_trained_head", lambda seed: None)
    family, distance, _ = check_families(Run(1))
    assert not family.passed and not distance.passed and family.detail.startswith("none, async: ")


def test_slots_of_later_drafts_that_are_lost_are_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    original = MTPDrafter._slots

    def lost(self: MTPDrafter, rows: object, positions: object) -> tuple[torch.Tensor, torch.Tensor]:
        places, slots = original(self, rows, positions)  # type: ignore[arg-type]
        slots[-1] = PAD_SLOT
        return places, slots

    monkeypatch.setattr(MTPDrafter, "_slots", lost)
    (head,) = check_families(Run(0))
    assert not head.passed and head.value > 0 and "other drafts than alone" in head.detail


def test_the_seed_draws_the_families(monkeypatch: pytest.MonkeyPatch) -> None:
    known = {f"family {i}": ["tiny"] for i in range(9)}
    monkeypatch.setattr("hybrid_kv.models.registry.sized", lambda: known)
    drawn = [families.draw(Run(2, seed=seed)) for seed in range(9)]
    assert all(len(names) == 2 and names == sorted(names) for names in drawn) and len(set(map(tuple, drawn))) > 4
    assert families.draw(Run(99)) == sorted(known) != sorted(sized())

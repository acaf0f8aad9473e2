"""The section of the guard that runs one tiny model per family."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from hybrid_kv.engine.drafter import MTPDrafter
from hybrid_kv.guard.checks import families
from hybrid_kv.guard.checks.families import check_families
from hybrid_kv.guard.registry import Run
from hybrid_kv.kernels.slot_mapping import PAD_SLOT
from hybrid_kv.models import attention, moe
from hybrid_kv.models.mixers import conv, gated_delta
from hybrid_kv.models.mixers.conv import RecurrentMixer
from hybrid_kv.models.registry import sized


@pytest.fixture(autouse=True)
def one_family(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("hybrid_kv.models.registry.sized", lambda: {"qwen3_5_text": ["tiny"]})


def test_a_family_and_the_trained_head_pass_with_their_figures() -> None:
    told: list[float] = []
    family, distance, head, second = check_families(Run(2, progress=told.append))
    assert family.passed and distance.passed and head.passed and second.passed and sum(told) == 2
    assert distance.name == "distance from transformers, qwen3_5_text" and 1e-8 < distance.value < 2e-5
    assert family.name == "largest logit difference, qwen3_5_text" and 0 < family.value < 1e-11
    assert family.params == {"family": "qwen3_5_text", "seed": 0}
    assert {"none_async", "align_offload_2_stages", "all_drafts_mixed", "cached_tokens"} <= family.figures.keys()
    assert (head.value, head.unit) == (0, "drafts") and head.n > 100 and head.figures["accepted"] > 20
    assert second.name == f"{head.name}, qwen3.5 moe" and second.n > 20 and second.figures["accepted"] > 10


def test_a_rotation_that_starts_anew_in_every_chunk_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    original = attention.PagedAttentionMetadata.rotation

    def anew(self: attention.PagedAttentionMetadata, *args: object) -> object:
        object.__setattr__(self, "positions", torch.arange(len(self.positions)))
        return original(self, *args)  # type: ignore[arg-type]

    monkeypatch.setattr(attention.PagedAttentionMetadata, "rotation", anew)
    monkeypatch.setattr(families, "_trained_head", lambda *arguments: None)
    family, distance, *_ = check_families(Run(1))
    assert not family.passed and not distance.passed and family.detail.startswith("none, async: ")


def no_states(monkeypatch: pytest.MonkeyPatch) -> None:
    original = RecurrentMixer._read
    monkeypatch.setattr(RecurrentMixer, "_read", lambda *arguments: torch.zeros_like(original(*arguments)))


def next_expert(monkeypatch: pytest.MonkeyPatch) -> None:
    original = moe.apply_experts
    monkeypatch.setattr(
        moe, "apply_experts", lambda x, ids, weights, up, *rest: original(x, (ids + 1) % len(up), weights, up, *rest)
    )


def transposed_state(monkeypatch: pytest.MonkeyPatch) -> None:
    original = gated_delta.gated_delta_update

    def update(*operands: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        y, states = original(*operands)
        return y, states.mT.reshape(states.shape)

    monkeypatch.setattr(gated_delta, "gated_delta_update", update)


def decay_behind(monkeypatch: pytest.MonkeyPatch) -> None:
    original = gated_delta.gated_delta_update

    def update(state: torch.Tensor, *operands: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        q, k, v, g, b = operands
        found, outputs = [], []
        for t in range(q.shape[1]):
            one = slice(t, t + 1)
            y, after = original(state, q[:, one], k[:, one], v[:, one], torch.zeros_like(g[:, one]), b[:, one])
            state = after[:, 0] * g[:, t].exp()[..., None, None]
            found.append(state)
            outputs.append(y)
        return torch.cat(outputs, 1), torch.stack(found, 1)

    monkeypatch.setattr(gated_delta, "gated_delta_update", update)


def late_window(monkeypatch: pytest.MonkeyPatch) -> None:
    original = conv.windows_at
    monkeypatch.setattr(
        conv, "windows_at", lambda inputs, rows, first, size: original(inputs, rows, (first - 1).clamp(min=0), size)
    )


@pytest.mark.parametrize(
    ("damage", "family"),
    [
        (no_states, "qwen3_5_text"),
        (next_expert, "granitemoehybrid"),
        (transposed_state, "qwen3_5_text"),
        (decay_behind, "qwen3_5_text"),
        (late_window, "lfm2"),
    ],
)
def test_damage_is_seen(monkeypatch: pytest.MonkeyPatch, damage: Callable[..., None], family: str) -> None:
    monkeypatch.setattr("hybrid_kv.models.registry.sized", lambda: {family: ["tiny"]})
    monkeypatch.setattr(families, "_trained_head", lambda *arguments: None)
    damage(monkeypatch)
    exact, distance, *_ = check_families(Run(1))
    assert not (exact.passed and distance.passed)
    assert max(exact.value, distance.value) > 1e-3 or "other tokens" in exact.detail


def test_slots_of_later_drafts_that_are_lost_are_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    original = MTPDrafter._slots

    def lost(self: MTPDrafter, rows: object, positions: object) -> tuple[torch.Tensor, torch.Tensor]:
        places, slots = original(self, rows, positions)  # type: ignore[arg-type]
        slots[-1] = PAD_SLOT
        return places, slots

    monkeypatch.setattr(MTPDrafter, "_slots", lost)
    for head in check_families(Run(0)):
        assert not head.passed and head.value > 0 and "other drafts than alone" in head.detail


def test_the_seed_draws_the_families(monkeypatch: pytest.MonkeyPatch) -> None:
    known = {f"family {i}": ["tiny"] for i in range(9)}
    monkeypatch.setattr("hybrid_kv.models.registry.sized", lambda: known)
    drawn = [families.draw(Run(2, seed=seed)) for seed in range(9)]
    assert all(len(names) == 2 and names == sorted(names) for names in drawn) and len(set(map(tuple, drawn))) > 4
    assert families.draw(Run(99)) == sorted(known) != sorted(sized())

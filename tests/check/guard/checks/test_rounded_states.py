"""Section *rounded states* sees scales that stay behind, noise of another token, and no hits."""

from __future__ import annotations

import pytest

from hybrid_kv.check.guard.checks import rounded_states
from hybrid_kv.check.guard.checks.rounded_states import RoundedPlay
from hybrid_kv.check.guard.registry import Run
from hybrid_kv.models.exact import ExactRounded, Residues


def detail(amount: int = 6, seed: int = 0) -> str:
    (result,) = rounded_states.check_rounded_states(Run(amount, seed))
    return result.detail


@pytest.mark.parametrize("seed", [0, 20261219])
def test_all_is_well(seed: int) -> None:
    """A quick guard is not void, either: draws alone gave the second seed no engine with a tier."""
    assert detail(seed=seed) == ""


def test_scales_that_are_of_another_state_are_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    load = ExactRounded.load

    def load_stale(self: ExactRounded, views: list[Residues], blocks: Residues) -> list[Residues]:
        return load(self, [*views[:-1], views[-1][::-1]], blocks)

    monkeypatch.setattr(ExactRounded, "load", load_stale)
    assert ", not [" in detail(1)


def test_noise_of_the_token_before_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    noise = ExactRounded.noise
    monkeypatch.setattr(
        ExactRounded,
        "noise",
        lambda self, metadata, tokens: noise(self, metadata, tokens - (tokens > 0)),
    )
    assert ", not [" in detail(2)


def test_without_preemptions_it_is_void(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(RoundedPlay, "_preempt", lambda *_: None)
    assert detail(2).startswith("void: never preemptions")

"""The section of the guard that runs one tiny model per family."""

from __future__ import annotations

import pytest

from hybrid_kv.check.guard.checks import families
from hybrid_kv.check.guard.checks.families import check_families
from hybrid_kv.check.guard.exactness import SLOTS_CELLS, Alone
from hybrid_kv.check.guard.registry import CheckResult, Run
from hybrid_kv.models.registry import sized
from tests.support.injected_mistakes import no_states

KNOWN = sorted(sized())


@pytest.fixture(autouse=True)
def one_family(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("hybrid_kv.models.registry.sized", lambda: {"qwen3_5_text": ["tiny"]})


def test_damage_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("hybrid_kv.models.registry.sized", lambda: {"mamba2": ["tiny"]})
    monkeypatch.setattr(families, "TRAINED", {})
    monkeypatch.setattr(Alone, "cells", lambda _: SLOTS_CELLS[:2])
    no_states(monkeypatch)
    exact, distance, narrow = check_families(Run(1))
    assert not narrow.passed and narrow.value > 1e-2
    assert not (exact.passed and distance.passed)
    assert max(exact.value, distance.value) > 1e-3 or "other tokens" in exact.detail


def test_the_seed_draws_the_families(monkeypatch: pytest.MonkeyPatch) -> None:
    known = {name: ["tiny"] for name in KNOWN}
    monkeypatch.setattr("hybrid_kv.models.registry.sized", lambda: known)
    monkeypatch.setattr(families, "changed_modules", frozenset)
    drawn = [families.draw(Run(2, seed=seed)) for seed in range(9)]
    assert (
        all(len(names) == 2 and names == sorted(names) for names in drawn)
        and len(set(map(tuple, drawn))) > 4
    )
    assert families.draw(Run(99)) == sorted(known)
    monkeypatch.setattr(families, "changed_modules", lambda: {"hybrid_kv.models.zamba2"})
    drawn = [families.draw(Run(2, seed=seed)) for seed in range(9)]
    assert (
        all("zamba2" in names and len(names) == 2 for names in drawn)
        and len(set(map(tuple, drawn))) > 3
    )


def test_each_family_is_compared_with_transformers_and_some_in_every_cell(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(
        "hybrid_kv.models.registry.sized", lambda: {"lfm2": ["tiny"], "mamba2": ["tiny"]}
    )
    monkeypatch.setattr(families, "draw", lambda run: ["mamba2"])
    monkeypatch.setattr(families, "TRAINED", {})
    monkeypatch.setattr(
        families,
        "_in_bfloat16",
        lambda model, *_: [CheckResult(f"_in_bfloat16 {model}", 0, "", "", 1)],
    )
    for name in ("_beside_itself", "_beside_transformers"):
        line = lambda model, *_, name=name: CheckResult(f"{name} {model}", 0, "", "", 1)  # noqa: E731
        monkeypatch.setattr(families, name, line)
    found = [result.name for result in check_families(Run(1))]
    itself, others = ["_beside_itself mamba2"], ["_beside_transformers", "_in_bfloat16"]
    assert found == [f"{name} lfm2" for name in others] + itself + [
        f"{name} mamba2" for name in others
    ]

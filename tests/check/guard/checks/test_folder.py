"""Engines that share a folder are checked, and an identity that leaves something out is seen."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from hybrid_kv.check.guard.checks import folder
from hybrid_kv.check.guard.checks.folder import check_folder
from hybrid_kv.check.guard.registry import Run
from hybrid_kv.engine import build


def test_engines_of_other_weights_and_layouts_share_a_folder() -> None:
    (shared,) = check_folder(Run(1, seed=3))
    assert shared.passed and shared.n == 12, shared.detail


@pytest.mark.parametrize(
    ("part", "without", "misled", "other"),
    [
        (
            "fingerprint",
            lambda folder: "of any checkpoint",
            "nemotron_h as folder",
            "_exact_models",
        ),
        ("weights_identity", lambda model, loaded: "of any weights", "weights 1", "_checkpoints"),
        (
            "_identity",
            lambda model, runner, backend: build.weights_identity(model, runner.model),
            "weights 0",
            "_checkpoints",
        ),
    ],
)
def test_what_an_identity_leaves_out_is_seen(
    part: str, without: Callable[..., str], misled: str, other: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(build, part, without)
    monkeypatch.setattr(folder, other, lambda *_: iter(()))
    (shared,) = check_folder(Run(1, seed=3))
    assert not shared.passed and misled in shared.detail


def test_a_folder_in_which_nothing_is_found_again_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    names = iter(range(99))
    monkeypatch.setattr(build, "_identity", lambda *_: str(next(names)))
    monkeypatch.setattr(folder, "_checkpoints", lambda *_: iter(()))
    (shared,) = check_folder(Run(1, seed=3))
    assert not shared.passed and "no block is found again by an equal engine" in shared.detail

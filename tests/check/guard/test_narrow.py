"""States in float32 beside activations in bfloat16: what is rounded on one path alone is seen."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from hybrid_kv.check.guard.narrow import LIMIT, Narrow, compare_paths
from hybrid_kv.models.mixers import conv, mamba2
from hybrid_kv.models.random_checkpoint import quiet, write_checkpoint


def compare(model_type: str, folder: Path) -> Narrow:
    with quiet():
        write_checkpoint(model_type, folder)
        return compare_paths(folder, 0)


@pytest.mark.parametrize(
    ("model_type", "num_paths"), [("mamba2", 4), ("qwen3_next", 3), ("jamba", 3), ("lfm2", 0)]
)
def test_every_path_leaves_the_states_of_one_prefill(
    model_type: str, num_paths: int, tmp_path: Path
) -> None:
    found = compare(model_type, tmp_path)
    assert found.worst <= LIMIT / 10 and found.num_paths == num_paths


def states_of_decodes(monkeypatch: pytest.MonkeyPatch) -> None:
    copy = conv.copy_blocks
    monkeypatch.setattr(
        conv,
        "copy_blocks",
        lambda view, ids, states: copy(view, ids, states.bfloat16().to(view.dtype)),
    )


def steps_of_prefills(monkeypatch: pytest.MonkeyPatch) -> None:
    softplus = mamba2.F.softplus

    def rounded(x: torch.Tensor, *more: Any) -> torch.Tensor:
        out = softplus(x, *more)
        return out.bfloat16().to(out.dtype) if out.shape[1] > 4 else out

    monkeypatch.setattr(mamba2.F, "softplus", rounded)


def inputs_of_one_token(monkeypatch: pytest.MonkeyPatch) -> None:
    """As the convolution did, which rounded its sum after each tap."""
    convolve = conv.causal_conv1d

    def rounded(x: torch.Tensor, *more: Any) -> tuple[torch.Tensor, torch.Tensor]:
        y, inputs = convolve(x, *more)
        return (y * (1 + 2**-7) if x.shape[1] == 1 else y), inputs

    monkeypatch.setattr(conv, "causal_conv1d", rounded)


@pytest.mark.parametrize(
    ("damage", "path"),
    [(states_of_decodes, ""), (steps_of_prefills, ""), (inputs_of_one_token, "decodes")],
)
def test_what_is_rounded_on_one_path_is_seen(
    damage: Callable[[pytest.MonkeyPatch], None],
    path: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    damage(monkeypatch)
    found = compare("mamba2", tmp_path)
    assert found.worst > 20 * LIMIT and found.path.startswith(path)

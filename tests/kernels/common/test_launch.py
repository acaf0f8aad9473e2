"""Which kernels a setting means: on a CPU, on a GPU, with and without Triton."""

from __future__ import annotations

import pytest
import torch

from hybrid_kv.config import ConfigError
from hybrid_kv.kernels.common import launch
from hybrid_kv.kernels.common.launch import choose

CPU, CUDA = torch.device("cpu"), torch.device("cuda")


@pytest.fixture(params=[True, False], ids=["triton", "no triton"])
def has_triton(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> bool:
    monkeypatch.setattr(launch, "find_spec", lambda name: object() if request.param else None)
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    return bool(request.param)


@pytest.mark.parametrize("device", [CPU, CUDA], ids=str)
def test_torch_is_always_there(has_triton: bool, device: torch.device) -> None:
    assert choose("torch", device) == "torch"


def test_auto_launches_on_a_gpu_where_it_can(
    has_triton: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert choose("auto", CUDA) == ("triton" if has_triton else "torch")
    assert choose("auto", CPU) == "torch"
    monkeypatch.setenv("TRITON_INTERPRET", "1")  # slow: only on request
    assert choose("auto", CPU) == "torch"


def test_triton_runs_or_says_what_is_missing(
    has_triton: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not has_triton:
        monkeypatch.setenv("TRITON_INTERPRET", "1")
        for device in (CPU, CUDA):
            with pytest.raises(
                ConfigError, match="needs the package triton; install it, or use torch"
            ):
                choose("triton", device)
        return
    assert choose("triton", CUDA) == "triton"
    for value in (None, "0"):
        if value is not None:
            monkeypatch.setenv("TRITON_INTERPRET", value)
        with pytest.raises(ConfigError, match="needs a GPU; use torch, or TRITON_INTERPRET=1"):
            choose("triton", CPU)
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    assert choose("triton", CPU) == "triton"

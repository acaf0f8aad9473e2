"""Small layers against float64, and what is computed of weights once."""

from __future__ import annotations

from copy import deepcopy

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from hybrid_kv.models import layers
from hybrid_kv.models.exact import PRIME, ExactAttention, ExactConfig, ExactOracle
from hybrid_kv.models.layers import Derived, GatedRMSNorm, Linear, RMSNorm
from hybrid_kv.models.mixers import conv

# by which oneDNN lays a weight out
REORDER = "_reorder_linear_weight"


@given(st.integers(1, 12), st.integers(0, 99))
def test_the_oracles_sums_are_attention(length: int, seed: int) -> None:
    config = ExactConfig(width=3)
    rng = np.random.default_rng(seed)
    layer = ExactAttention("attention", config, rng)
    x, positions = rng.integers(0, PRIME, (length, 3)), np.arange(length)
    query, key, value = layer.project(x, positions)[:, None]
    expected = layer.attend(query, key, value, positions[None])[0]
    weights = {name: getattr(layer, name).tolist() for name in ("qkv", "write_mark", "read_mark")}
    sums = [[0] * 3 for _ in range(3)]
    seen: list[list[tuple[int, int]]] = []
    got = [
        ExactOracle.attention(weights, token, i, sums, seen) for i, token in enumerate(x.tolist())
    ]
    assert got == expected.tolist()


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("tokens", [1, 8, 300])
def test_rms_norm(dtype: torch.dtype, tokens: int) -> None:
    """In float32 sum, root and two products round, 1e-6 of the value; bfloat16 rounds by 2^-8."""
    g = torch.Generator().manual_seed(0)
    norm = RMSNorm(96, 0.1)
    norm.weight.copy_(torch.randn(96, generator=g))
    x, before = (torch.randn(tokens, 96, generator=g) * 0.3).to(dtype), norm.weight.clone()
    wide = x.double()
    expected = (
        wide / (wide.square().mean(-1, keepdim=True) + 0.1).sqrt() * norm.to(dtype).weight.double()
    )
    kept = x.clone()
    got = norm(x)
    assert (
        got.dtype == dtype and torch.equal(x, kept) and torch.equal(norm.weight, before.to(dtype))
    )
    relative = {torch.float64: 1e-14, torch.float32: 1e-6, torch.bfloat16: 2.0**-8}[dtype]
    assert bool(((got.double() - expected).abs() <= relative * expected.abs()).all())


@pytest.fixture
def packed(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How often a weight was packed."""
    counts = []
    reorder = getattr(torch.ops.mkldnn, REORDER)
    monkeypatch.setattr(layers, "PACKED_ELEMENTS", 24 * 16)
    monkeypatch.setattr(
        torch.ops.mkldnn,
        REORDER,
        lambda *args: (counts.append(1), reorder(*args))[1],
        raising=False,
    )
    return counts


def linear(bias: bool = True, size_out: int = 24) -> Linear:
    g = torch.Generator().manual_seed(0)
    layer = Linear(16, size_out, bias)
    for parameter in layer.parameters():
        parameter.copy_(torch.randn(parameter.shape, generator=g))
    return layer


def assert_linear(layer: Linear, x: torch.Tensor) -> None:
    """Sums of 16 products of order one."""
    with torch.inference_mode():
        got = layer(x)
        expected = x.double() @ layer.weight.double().T + (
            0 if layer.bias is None else layer.bias.double()
        )
        assert got.dtype == x.dtype and float((got - expected).abs().max()) <= 1e-5


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("rows", [1, 8, 33])
def test_a_packed_weight_is_packed_once(packed: list[int], bias: bool, rows: int) -> None:
    layer, x = linear(bias), torch.randn(rows, 16)
    for _ in range(3):
        assert_linear(layer, x)
    assert len(packed) == 1


def test_what_is_not_packed(packed: list[int]) -> None:
    """Small weights, other dtypes, untracked tensors and training are not packed."""
    x = torch.randn(8, 16)
    assert_linear(linear(size_out=23), x)
    assert_linear(linear().double(), x.double())
    with torch.inference_mode():
        made = linear()
    assert_linear(made, x)
    torch.testing.assert_close(linear()(x), made(x))
    assert not packed


def test_a_model_with_packed_weights_can_be_copied(packed: list[int]) -> None:
    layer, x = linear(), torch.randn(8, 16)
    assert_linear(layer, x)
    assert_linear(deepcopy(layer), x)
    assert layer.state_dict().keys() == {"weight", "bias"}


def test_what_weights_give_is_computed_once_until_one_changes() -> None:
    calls = []

    def compute(a: torch.Tensor, b: torch.Tensor, scale: float) -> torch.Tensor:
        calls.append(scale)
        return (a + b) * scale

    derived, a, b = Derived(compute), torch.ones(2), torch.ones(2)

    def assert_calls(wanted: int, scale: float = 1) -> None:
        for _ in range(2):
            torch.testing.assert_close(derived(a, b, scale=scale), (a + b) * scale)
        assert len(calls) == wanted

    assert_calls(1)
    b.mul_(3)
    assert_calls(2)
    a.data = torch.full((2,), 5.0)
    assert_calls(3)
    assert_calls(4, scale=2)
    copied = deepcopy(derived)
    torch.testing.assert_close(copied(a, b, scale=2), (a + b) * 2)
    assert len(calls) == 5
    with torch.inference_mode():
        a = torch.ones(2)  # does not tell of changes
        assert_calls(7)
        a.mul_(2)
        assert_calls(9)


def test_taps_of_all_channels_lie_together() -> None:
    weight = torch.randn(12, 3)
    derived = Derived(conv.contiguous_taps)
    assert torch.equal(derived(weight), weight) and derived(weight)[:, 0].is_contiguous()
    weight.add_(1)
    assert torch.equal(derived(weight), weight)


@pytest.mark.parametrize("groups", [1, 2])
@pytest.mark.parametrize("shape", [(3, 16), (2, 3, 16)])
def test_gated_rms_norm(groups: int, shape: tuple[int, ...]) -> None:
    g = torch.Generator().manual_seed(groups)
    norm = GatedRMSNorm(16, groups, 0.1)
    norm.weight.copy_(torch.randn(16, generator=g))
    x, gate = torch.randn(2, *shape, generator=g)
    kept = x.clone(), gate.clone()
    got = norm.double()(x.double(), gate.double())
    gated = (x * gate * gate.sigmoid()).double().unflatten(-1, (groups, -1))
    expected = gated / (gated.square().mean(-1, keepdim=True) + 0.1).sqrt()
    torch.testing.assert_close(got, expected.flatten(-2) * norm.weight, rtol=1e-6, atol=1e-6)
    assert torch.equal(x, kept[0]) and torch.equal(gate, kept[1])

"""The gated norm against its definition in float64, in Triton's interpreter.

Tolerance: in float32 3e-6 of the value: the exp, the products and the root each round, and the sum
of up to thousands of squares is positive, so its relative error is that of a few additions in a
row. Plus the rounding of a 16-bit output (a unit in the last place, since the interpreter
truncates).
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from hypothesis import given

from hybrid_kv.kernels.gated_norm import gated_rms_norm, gated_rms_norm_reference
from hybrid_kv.models.layers import GatedRMSNorm
from tests.kernels import definitions
from tests.kernels.harness import (
    FLOATS,
    GAPS,
    Expected,
    Operation,
    Shape,
    check,
    compiled,
    equality,
    measure,
    rejected_operations,
    shapes,
)
from tests.kernels.interpreter import interpreted

OUTPUTS = 3e-6


class GatedNorm(Operation):
    kernel = staticmethod(gated_rms_norm)
    reference = staticmethod(gated_rms_norm_reference)
    like = "gate"

    def __init__(self, shape: Shape, device: str = "cpu") -> None:
        self.shape, g = shape, torch.Generator().manual_seed(shape.seed)
        channels = shape.groups * shape.size
        x = (torch.randn(shape.tokens, channels, generator=g) * shape.scale).to(device, shape.dtype)
        # As a slice of what the layer's first projection gives; large enough for exp to overflow in
        # a few places.
        gate = torch.randn(shape.tokens, channels + shape.gap, generator=g) * 8
        for value in (-200.0, 200.0):
            gate[torch.rand(gate.shape, generator=g) < 0.05] = value
        weight = torch.randn(channels, generator=g).to(device, shape.gate_dtype)
        gate = gate.to(device, shape.gate_dtype)[:, :channels]
        self.arguments = {
            "x": x,
            "gate": gate,
            "weight": weight,
            "groups": shape.groups,
            "eps": shape.eps,
        }

    def expected(self) -> Iterator[Expected]:
        operands = (self.arguments[name].cpu().double().numpy() for name in ("x", "gate", "weight"))
        y = torch.from_numpy(
            definitions.gated_rms_norm(*operands, self.shape.groups, self.shape.eps)
        )
        # exp() of less than -87 is below what float32 holds.
        yield Expected("y", slice(None), y, OUTPUTS, y.abs() + 1e-25, self.shape.gate_dtype)


BASE = Shape(
    tokens=2,
    groups=2,
    size=3,
    eps=1e-5,
    scale=1.0,
    gap=3,
    dtype=torch.float32,
    gate_dtype=torch.float32,
    seed=0,
)
CASES = shapes(
    BASE,
    tokens=[0, 1, 2, 3, 4],
    groups=[1, 2, 3, 4],
    size=[1, 2, 7, 16, 100, 512],
    eps=[1e-6, 1e-5, 1e-2],
    scale=[1e-4, 1.0, 30.0],
    gap=GAPS,
    dtype=FLOATS,
    gate_dtype=FLOATS,
)
test_equals_the_formula, test_the_reference_equals_the_formula = equality(
    GatedNorm, CASES, BASE.but(size=5, groups=3, tokens=4)
)


@given(CASES)
def test_the_layer_equals_the_formula(shape: Shape) -> None:
    problem = GatedNorm(shape)
    layer = GatedRMSNorm(shape.groups * shape.size, shape.groups, shape.eps)
    layer.weight.copy_(problem.arguments["weight"])
    check(problem, lambda x, gate, **_: layer(x, gate))


def test_traffic_is_every_element_once() -> None:
    """Counted at the shape of Nemotron-3-Nano."""
    shape = BASE.but(tokens=3, groups=8, size=512, dtype=torch.bfloat16, gate_dtype=torch.bfloat16)
    counted, y, launches = interpreted(measure, GatedNorm, shape, "x", "gate", "weight")
    row = 4096 * 2
    assert counted == {
        "x": (3 * row, 0, 3 * row, 0),
        "gate": (3 * row, 0, 3 * row, 0),
        "weight": (row, 0, 3 * row, 0),
    }
    assert y == (0, 3 * row, 0, 3 * row)
    assert launches == 1


test_compiles_without_spills_to_128_bit_accesses = compiled("gated_norm")
test_rejects_what_the_kernel_would_misread = rejected_operations(
    GatedNorm,
    BASE,
    special=[
        ("x", lambda t: t[0], r"x has shape \(6,\)"),
        ("x", lambda t: t[:, :0], "2 groups do not divide 0 channels"),
        ("x", lambda t: t[:, :5], "2 groups do not divide 5 channels"),
        ("groups", lambda _: 0, "0 groups do not divide 6 channels"),
        ("gate", lambda t: t.repeat(2, 1), r"gate has shape \(4, 6\); it must be \(2, 6\)"),
        ("x", lambda t: t[None], r"x has shape \(1, 2, 6\); it must have 2 dimensions"),
    ],
)


@pytest.mark.gpu
@pytest.mark.parametrize("groups", [1, 8])
@pytest.mark.parametrize("dtype", FLOATS)
def test_on_a_gpu(groups: int, dtype: torch.dtype) -> None:
    shape = BASE.but(tokens=5, groups=groups, size=8192 // groups, dtype=dtype, gate_dtype=dtype)
    check(GatedNorm(shape, "cuda"), gated_rms_norm)

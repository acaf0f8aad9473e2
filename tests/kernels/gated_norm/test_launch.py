"""The gated norm against float64, in Triton's interpreter.

Tolerance: in float32 3e-6 of the value: the exp, the products and the root each round, and the sum of up to thousands
of squares is positive, so its relative error is that of a few additions in a row. Plus the rounding of a 16-bit output
(a unit in the last place, since the interpreter truncates).
"""

from dataclasses import dataclass
from importlib.util import find_spec

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st

from hybrid_kv.kernels.gated_norm import gated_rms_norm, gated_rms_norm_reference
from hybrid_kv.kernels.gated_norm.launch import aot_cases
from hybrid_kv.models.layers import GatedRMSNorm
from hybrid_kv.static.compile import TARGETS, compile_case, read_metrics
from tests.kernels.interpreter import count_bytes, interpreted, load_peer
from tests.kernels.ssd.test_slots import ROUNDING

OUTPUTS = 3e-6


@dataclass(frozen=True)
class Case:
    tokens: int
    groups: int
    size: int
    eps: float = 1e-5
    scale: float = 1.0
    gap: int = 3
    dtype: torch.dtype = torch.float32
    gate_dtype: torch.dtype = torch.float32
    seed: int = 0


@st.composite
def cases(draw):
    return Case(
        tokens=draw(st.integers(0, 4)),
        groups=draw(st.integers(1, 4)),
        size=draw(st.sampled_from([1, 2, 7, 16, 100, 512])),
        eps=draw(st.sampled_from([1e-6, 1e-5, 1e-2])),
        scale=draw(st.sampled_from([1e-4, 1.0, 30.0])),
        gap=draw(st.sampled_from([0, 5, 16])),
        dtype=draw(st.sampled_from(list(ROUNDING))),
        gate_dtype=draw(st.sampled_from(list(ROUNDING))),
        seed=draw(st.integers(0, 2**31)),
    )


class Problem:
    def __init__(self, case, device="cpu"):
        self.case = case
        g = torch.Generator().manual_seed(case.seed)
        channels = case.groups * case.size
        self.x = (torch.randn(case.tokens, channels, generator=g) * case.scale).to(device, case.dtype)
        # As a slice of what the layer's first projection gives; large enough for exp to overflow in a few places.
        projected = torch.randn(case.tokens, channels + case.gap, generator=g) * 8
        projected[torch.rand(projected.shape, generator=g) < 0.05] = -200.0
        projected[torch.rand(projected.shape, generator=g) < 0.05] = 200.0
        self.gate = projected.to(device, case.gate_dtype)[:, :channels]
        self.weight = torch.randn(channels, generator=g).to(device, case.gate_dtype)

    def run(self, implementation):
        return implementation(self.x, self.gate, self.weight, self.case.groups, self.case.eps)


def expected_of(problem):
    x, gate, weight = (part.cpu().double() for part in (problem.x, problem.gate, problem.weight))
    gated = (x * F.silu(gate)).unflatten(1, (problem.case.groups, problem.case.size))
    scale = torch.rsqrt(gated.square().mean(-1, keepdim=True) + problem.case.eps)
    return (gated * scale).flatten(1) * weight


def check_problem(problem, implementation):
    before = [part.clone() for part in (problem.x, problem.gate, problem.weight)]
    y = problem.run(implementation).cpu()
    expected = expected_of(problem)
    assert y.dtype == problem.gate.dtype and y.shape == expected.shape and y.is_contiguous()
    relative, absolute = ROUNDING[y.dtype]
    error = (y.double() - expected).abs()
    # exp() of less than -87 is below what float32 holds.
    allowed = (OUTPUTS + relative) * expected.abs() + absolute + 1e-30
    assert bool((error <= allowed).all()), f"{float((error / allowed).max())} times what is allowed"
    assert all(torch.equal(a, b) for a, b in zip(before, (problem.x, problem.gate, problem.weight), strict=True))


def check(case):
    check_problem(Problem(case), gated_rms_norm)


@given(cases())
def test_equals_the_formula(case):
    interpreted(check, case)


@given(cases())
def test_the_reference_equals_the_formula_and_the_layer(case):
    problem = Problem(case)
    check_problem(problem, gated_rms_norm_reference)
    layer = GatedRMSNorm(case.groups * case.size, case.groups, case.eps)
    layer.weight.copy_(problem.weight)
    check_problem(problem, lambda x, gate, *_: layer(x, gate))


def measure(case):
    problem = Problem(case)
    tensors = {name: getattr(problem, name) for name in ("x", "gate", "weight")}
    return count_bytes(tensors, problem.run, gated_rms_norm)


def test_traffic_is_every_element_once():
    """Counted at the shape of Nemotron-3-Nano."""
    counted, y, launches = interpreted(measure, Case(3, 8, 512, dtype=torch.bfloat16, gate_dtype=torch.bfloat16))
    row = 4096 * 2
    assert counted == {"x": (3 * row, 0, 3 * row, 0), "gate": (3 * row, 0, 3 * row, 0), "weight": (row, 0, 3 * row, 0)}
    assert y == (0, 3 * row, 0, 3 * row)
    assert launches == 1


@pytest.mark.parametrize("target", TARGETS)
def test_compiles_without_spills_to_128_bit_accesses(target):
    for case in aot_cases(TARGETS[target].warp_size):
        metrics = read_metrics(case, target, compile_case(case, target))
        assert metrics.spill_bytes == 0 and (metrics.load_bits, metrics.store_bits) == (128, 128), (case, metrics)


def check_peer(name):
    problem = Problem(Case(3, 4, 100))
    y = problem.run(gated_rms_norm)
    options = {"z": problem.gate, "eps": 1e-5, "group_size": 100, "norm_before_gate": False, "is_rms_norm": True}
    expected = load_peer(name)._layer_norm_fwd(problem.x, problem.weight, None, **options)[0].double()
    assert float((y.double() - expected).abs().max()) <= OUTPUTS * float(expected.abs().max())


@pytest.mark.parametrize(
    "name", ["vllm.model_executor.layers.mamba.ops.layernorm_gated", "mamba_ssm.ops.triton.layernorm_gated"]
)
def test_equals_a_peer(name):
    package = name.split(".")[0]
    if find_spec(package) is None:
        pytest.skip(f"{package} is not installed")
    interpreted(check_peer, name)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"x": torch.zeros(2, 2, 3)}, r"x has shape \(2, 2, 3\)"),
        ({"x": torch.zeros(6)}, r"x has shape \(6,\)"),
        ({"groups": 0}, "0 groups do not divide 6 channels"),
        ({"x": torch.zeros(2, 0)}, "2 groups do not divide 0 channels"),
        ({"x": torch.zeros(2, 5)}, "2 groups do not divide 5 channels"),
        ({"gate": torch.zeros(3, 6)}, r"gate has shape \(3, 6\); it must be \(2, 6\)"),
        ({"gate": torch.zeros(6, 2).t()}, "gate has strides"),
        ({"weight": torch.zeros(6, dtype=torch.float64)}, "weight is torch.float64"),
        ({"weight": torch.zeros(6, device="meta")}, "weight is on meta"),
    ],
)
def test_refuses_what_the_kernel_would_misread(change, message):
    arguments = {"x": torch.zeros(2, 6), "gate": torch.zeros(2, 6), "weight": torch.zeros(6)}
    with pytest.raises(ValueError, match=message):
        gated_rms_norm(**{**arguments, "groups": 2, "eps": 1e-5, **change})


@pytest.mark.gpu
@pytest.mark.parametrize("groups", [1, 8])
@pytest.mark.parametrize("dtype", list(ROUNDING))
def test_on_a_gpu(groups, dtype):
    check_problem(Problem(Case(5, groups, 8192 // groups, dtype=dtype, gate_dtype=dtype), "cuda"), gated_rms_norm)

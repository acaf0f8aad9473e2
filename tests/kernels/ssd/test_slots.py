"""The states of a verify step against a loop over tokens and heads in float64, in Triton's interpreter.

Tolerances. float32 arithmetic: each of up to six tokens multiplies and adds twice, softplus and exp err by a few 1e-7,
so states err by 5e-6 of the largest of their head; an output sums `state` products, so by 1e-5 of the sum of their
magnitudes. Storing in fewer bits adds a unit in the last place (half of one on a GPU; the interpreter truncates): 2^-7
of the value in bfloat16, 2^-10 or 2^-24 absolute in float16.
"""

import subprocess
import sys
from dataclasses import dataclass, replace
from importlib.util import find_spec
from pathlib import Path
from unittest.mock import patch

import pytest
import torch
import torch.nn.functional as F
from hypothesis import example, given
from hypothesis import strategies as st

from hybrid_kv.kernels.ssd import selective_state_update_slots, selective_state_update_slots_reference
from hybrid_kv.kernels.ssd import slots as state_update
from hybrid_kv.kernels.ssd.slots import aot_cases
from hybrid_kv.static.compile import TARGETS, compile_case, read_metrics
from tests.kernels.interpreter import count_bytes, interpreted, load_peer, share_memory_with_the_interpreter
from tests.kernels.ssd.test_reference import plain

STATES, OUTPUTS = 5e-6, 1e-5
ROUNDING = {torch.float32: (0.0, 0.0), torch.bfloat16: (2.0**-7, 0.0), torch.float16: (2.0**-10, 2.0**-24)}

# Signalling NaN: who computes with it and stores the result leaves another NaN.
POISON = {torch.float32: 0x7F810001, torch.bfloat16: 0x7F81, torch.float16: 0x7C01}


def poisoned(count, dtype):
    bits = torch.int32 if dtype == torch.float32 else torch.int16
    return torch.full((count,), POISON[dtype], dtype=bits).view(dtype)


@dataclass(frozen=True)
class Case:
    """Everything that a process needs to build the inputs of one launch.

    Attributes:
        rows: per row its tokens, whether it is padding, and the token whose block is also the row's source, or -1.
        columns: 1 + K.
        gap: elements between pages and between tokens that are not the layer's.
        initial: size of the states to start from; with 0 the first token's own contribution shows.
        lanes: of the GPU that the launch is laid out for.
        tile_bytes: of a program; with few of them heads this small take several.
    """

    rows: tuple[tuple[int, bool, int], ...]
    columns: int
    groups: int = 1
    per_group: int = 1
    head_dim: int = 4
    size: int = 4
    gap: int = 3
    state_dtype: torch.dtype = torch.float32
    dtype: torch.dtype = torch.float32
    index_dtype: torch.dtype = torch.int64
    initial: float = 1.0
    lanes: int = 32
    tile_bytes: int = 4096
    seed: int = 0


@st.composite
def cases(draw):
    columns = draw(st.integers(1, 6))
    row = st.tuples(st.integers(0, columns), st.booleans(), st.integers(-1, columns - 1))
    return Case(
        rows=tuple(draw(st.lists(row, min_size=1, max_size=2))),
        columns=columns,
        groups=draw(st.integers(1, 3)),
        per_group=draw(st.integers(1, 2)),
        head_dim=draw(st.sampled_from([1, 3, 7, 8, 11])),
        size=draw(st.sampled_from([1, 3, 16, 33])),
        gap=draw(st.sampled_from([0, 5, 16])),
        state_dtype=draw(st.sampled_from(list(ROUNDING))),
        dtype=draw(st.sampled_from(list(ROUNDING))),
        index_dtype=draw(st.sampled_from([torch.int32, torch.int64])),
        initial=draw(st.sampled_from([0.0, 1.0])),
        lanes=draw(st.sampled_from([32, 64])),
        tile_bytes=draw(st.sampled_from([64, 512, 4096])),
        seed=draw(st.integers(0, 2**31)),
    )


class Problem:
    """Inputs of one launch. The pool, its gaps and its null block hold NaN wherever no row reads."""

    def __init__(self, case, device="cpu"):
        self.case = case
        g = torch.Generator().manual_seed(case.seed)
        heads, shared = case.groups * case.per_group, case.groups * case.size
        shape = (heads, case.head_dim, case.size)
        self.lengths = [length for length, _, _ in case.rows]
        tokens = sum(self.lengths) + 2
        inner = heads * case.head_dim
        conv = torch.randn(tokens, inner + 2 * shared + case.gap, generator=g).to(case.dtype)
        conv[sum(self.lengths) :] = torch.nan
        x, B, C, _ = conv.split((inner, shared, shared, case.gap), dim=1)
        # Around every bend of softplus: where 1 + e is 1, where it is not exact, near 0, and across 20.
        dt = torch.tensor([-24.0, -16.7, -7.0, -3.0, 0.0, 2.0, 19.0, 21.0])
        dt = dt[torch.randint(len(dt), (tokens, heads + 1), generator=g)] + torch.rand(tokens, heads + 1, generator=g)
        blocks = 1 + len(case.rows) * (2 + case.columns)
        self.ids = (1 + torch.randperm(blocks - 1, generator=g)).view(len(case.rows), -1)
        sources, targets = self.ids[:, 0].clone(), self.ids[:, 1:-1].clone()
        for row, (length, padding, alias) in enumerate(case.rows):
            if padding:
                sources[row], targets[row] = 0, 0
            elif 0 <= alias < length:
                sources[row] = targets[row, alias]
            # Behind the row's length stays a block that must not be written, not the null block.
        elements = heads * case.head_dim * case.size
        storage = poisoned(2 + blocks * (elements + case.gap), case.state_dtype)
        strides = (elements + case.gap, case.head_dim * case.size, case.size, 1)
        self.storage = storage.to(device)
        self.state = self.storage.as_strided((blocks, *shape), strides, 2)
        used = sources[sources > 0]
        drawn = torch.randn(len(used), *shape, generator=g) * case.initial
        self.state[used.to(device)] = drawn.to(device, case.state_dtype)
        self.x, self.dt = x.unflatten(1, shape[:2]).to(device), dt[:, :heads].to(case.dtype).to(device)
        self.B, self.C = (part.unflatten(1, (case.groups, case.size)).to(device) for part in (B, C))
        self.dt_bias = torch.rand(heads, generator=g).sub(0.5).to(case.dtype).to(device)
        self.A_log, self.D = (torch.randn(heads, generator=g).to(device) for _ in range(2))
        ends = torch.tensor([0, *self.lengths]).cumsum(0)
        self.cu_seqlens, self.sources, self.targets = (
            part.to(device, case.index_dtype) for part in (ends, sources, targets)
        )

    def run(self, implementation):
        per_token = (self.x, self.dt, self.dt_bias, self.A_log, self.B, self.C, self.D)
        return implementation(self.state, *per_token, self.cu_seqlens, self.sources, self.targets)


def near(what, got, expected, share, scale, dtype):
    """Within the arithmetic's share of `scale`, and the rounding of `dtype`."""
    relative, absolute = ROUNDING[dtype]
    allowed = share * scale + relative * expected.abs() + absolute
    excess = (got.double() - expected).abs() / (allowed + 1e-300)
    assert bool((excess <= 1).all()), f"{what}: {float(excess.max())} times what is allowed"


def check_problem(problem, implementation):
    case, before = problem.case, problem.storage.cpu().clone()
    states = problem.state.cpu().double()
    y = problem.run(implementation).cpu()
    assert y.dtype == problem.x.dtype and y.is_contiguous()
    after = problem.state.cpu()
    may_change = torch.zeros(len(before), dtype=torch.bool)
    owned = may_change.as_strided(after.shape, after.stride(), problem.state.storage_offset())
    first = 0
    for row, (length, padding, _) in enumerate(case.rows):
        span, source = slice(first, first + length), int(problem.sources[row])
        first += length
        x, dt, B, C = (part[span].cpu().double() for part in (problem.x, problem.dt, problem.B, problem.C))
        step = F.softplus(dt + problem.dt_bias.cpu().double())
        A, D = -problem.A_log.cpu().double().exp(), problem.D.cpu().double()
        initial = states[source] if source else torch.zeros_like(states[0])
        expected, passed = plain(initial, x, step, A, B, C, D)
        magnitude, _ = plain(initial.abs(), x.abs(), step, A, B.abs(), C.abs(), D.abs())
        near(f"y of row {row}", y[span], expected, OUTPUTS, magnitude, case.dtype)
        for j in range(0 if padding else length):
            target = int(problem.targets[row, j])
            scale = passed[j].abs().amax((1, 2), keepdim=True)
            near(f"state {row}, {j}", after[target], passed[j], STATES, scale, case.state_dtype)
            owned[target] = True
    changed = problem.storage.cpu().view(torch.uint8) != before.view(torch.uint8)
    changed = changed.view(len(before), -1).any(1)
    assert not bool((changed & ~may_change).any()), "something else was written"


def check(case):
    with patch.multiple(state_update, warp_size=lambda: case.lanes, TILE_BYTES=case.tile_bytes):
        check_problem(Problem(case), selective_state_update_slots)


SEVERAL_TILES = Case(rows=((2, False, -1), (3, False, 1)), columns=3, groups=2, head_dim=11, size=16, tile_bytes=512)


@given(cases())
@example(SEVERAL_TILES)
def test_equals_the_loop_and_writes_nothing_else(case):
    interpreted(check, case)


@given(cases())
def test_the_reference_equals_the_loop_and_writes_nothing_else(case):
    check_problem(Problem(case), selective_state_update_slots_reference)


def check_far(dtype):
    """Blocks 2^31 elements and more behind the start of a pool that is never committed as a whole."""
    share_memory_with_the_interpreter()
    case = Case(rows=((2, False, -1),), columns=2, state_dtype=dtype)
    near_problem, far_problem = Problem(case), Problem(case)
    stride = 2**30 + 8
    pool = torch.empty(3 * stride, dtype=dtype)
    far = pool.as_strided((3, *near_problem.state.shape[1:]), (stride, *near_problem.state.stride()[1:]))
    far[2] = near_problem.state[near_problem.sources[0]]
    far_problem.state, far_problem.sources, far_problem.targets = far, torch.tensor([2]), torch.tensor([[1, 2]])
    outputs = [problem.run(selective_state_update_slots) for problem in (near_problem, far_problem)]
    assert torch.equal(outputs[0][:2], outputs[1][:2])
    assert torch.equal(far[1:], near_problem.state[near_problem.targets[0]])


def test_offsets_pass_int32():
    interpreted(check_far, torch.float16)


EIGHTH = Case(((4, False, -1),), 4, groups=1, per_group=8, head_dim=64, size=128, gap=4096, dtype=torch.bfloat16)


def measure(case):
    problem = Problem(case)
    names = ("state", "x", "dt", "B", "C", "dt_bias", "A_log", "D", "cu_seqlens", "sources", "targets")
    return count_bytes({name: getattr(problem, name) for name in names}, problem.run, selective_state_update_slots)


@pytest.mark.parametrize("length", [1, 4])
@pytest.mark.parametrize("state_dtype", [torch.float32, torch.bfloat16])
def test_traffic_is_one_state_read_and_one_written_per_token(length, state_dtype):
    """Counted on the heads of one group of Nemotron-3-Nano, an eighth of a layer."""
    case = replace(EIGHTH, rows=((length, False, -1),), columns=length, state_dtype=state_dtype)
    counted, y, launches = interpreted(measure, case)
    one = 8 * 64 * 128 * state_dtype.itemsize
    # Nothing of a state is loaded or stored twice.
    assert counted["state"] == (one, length * one, one, length * one)
    inputs = sum(counted[name][0] for name in ("x", "dt", "B", "C"))
    assert inputs == length * 2 * (8 * 64 + 8 + 2 * 128)
    assert y == (0, length * 2 * 8 * 64, 0, length * 2 * 8 * 64)
    assert sum(counted[name][0] for name in ("dt_bias", "A_log", "D", "cu_seqlens", "sources", "targets")) < 256
    assert launches == 1


def test_a_padding_row_moves_no_state():
    counted, _, _ = interpreted(measure, replace(EIGHTH, rows=((4, True, -1),)))
    assert counted["state"] == (0, 0, 0, 0)


@pytest.mark.parametrize("target", TARGETS)
def test_compiles_without_spills_to_128_bit_accesses(target):
    """One configuration per dtype of the state; `hybrid-kv kernels` compiles all."""
    for case in aot_cases(TARGETS[target].warp_size):
        if case.shape == "Nemotron-3-Nano, K=3":
            metrics = read_metrics(case, target, compile_case(case, target))
            assert metrics.spill_bytes == 0 and (metrics.load_bits, metrics.store_bits) == (128, 128), (case, metrics)
            assert metrics.blocks_per_sm * state_update.TILE_BYTES >= 48 << 10, (case, metrics)


def check_peer(package):
    case = Case(
        rows=((3, False, -1), (4, False, 1), (1, False, 0)), columns=4, groups=2, per_group=2, head_dim=8, size=16
    )
    ours, theirs = Problem(case), Problem(case)
    y = ours.run(selective_state_update_slots)
    expected = {"vllm": run_vllm, "mamba_ssm": run_mamba_ssm}[package](theirs)
    tokens = int(ours.cu_seqlens[-1])
    near("y", y[:tokens], expected[:tokens].double(), OUTPUTS, expected[:tokens].abs().max(), torch.float32)
    for row, length in enumerate(ours.lengths):
        targets = ours.targets[row, :length]
        wanted = theirs.state[targets].double()
        near(f"states of row {row}", ours.state[targets], wanted, STATES, wanted.abs().max(), torch.float32)


def expanded(problem):
    """Per head what these take per channel; a stride of 0 tells them so."""
    _, heads, head_dim, size = problem.state.shape
    A = -problem.A_log.exp()[:, None, None].expand(heads, head_dim, size)
    dt = problem.dt[..., None].expand(*problem.dt.shape, head_dim)
    return A, dt, *(part[:, None].expand(heads, head_dim) for part in (problem.D, problem.dt_bias))


def run_vllm(problem):
    peer = load_peer("vllm.model_executor.layers.mamba.ops.mamba_ssm")
    peer.try_get_optimal_ssm_config = lambda *_: (4, 4)
    A, dt, D, dt_bias = expanded(problem)
    y = torch.full_like(problem.x, torch.nan)
    peer.selective_state_update(
        problem.state,
        problem.x,
        dt,
        A,
        problem.B,
        problem.C,
        D,
        dt_bias,
        dt_softplus=True,
        state_batch_indices=problem.sources[:, None].expand(-1, problem.case.columns),
        dst_state_batch_indices=problem.targets,
        null_block_id=0,
        out=y,
        num_accepted_tokens=torch.ones(len(problem.sources), dtype=torch.int64),
        cu_seqlens=problem.cu_seqlens,
    )
    return y


def run_mamba_ssm(problem):
    """One token at a time, in place."""
    peer = load_peer("mamba_ssm.ops.triton.selective_state_update")
    A, dt, D, dt_bias = expanded(problem)
    outputs, token = [], 0
    for row, length in enumerate(problem.lengths):
        state = problem.state[problem.sources[row : row + 1]]
        for j in range(length):
            now = slice(token, token + 1)
            per_token = (problem.x[now], dt[now], A, problem.B[now], problem.C[now], D)
            outputs.append(peer.selective_state_update(state, *per_token, dt_bias=dt_bias, dt_softplus=True))
            problem.state[problem.targets[row, j]] = state[0]
            token += 1
    return torch.cat(outputs)


@pytest.mark.parametrize("package", ["vllm", "mamba_ssm"])
def test_equals_a_peer(package):
    if find_spec(package) is None:
        pytest.skip(f"{package} is not installed")
    interpreted(check_peer, package)


BAD = {
    "state": (lambda t: t.mT.contiguous().mT, "from dimension 1 on it must be contiguous"),
    "x": (lambda t: t.double(), "torch.float64"),
    "dt": (lambda t: t[:-1], "must be"),
    "dt_bias": (lambda t: t[:-1], "must be"),
    "A_log": (lambda t: t.to("meta"), "is on meta"),
    "B": (lambda t: t[:, :0], "0 groups of B do not divide 2 heads"),
    "C": (lambda t: t.transpose(1, 2).contiguous().transpose(1, 2), "strides"),
    "D": (lambda t: t[:, None], r"\(2, 1\)"),
    "cu_seqlens": (lambda t: t[1:], r"has shape \(1,\); it must be \(2,\)"),
    "sources": (lambda t: t.float(), "torch.float32"),
    "targets": (lambda t: t[:, 0], "dimensions"),
    "targets deep": (lambda t: t[None], "dimensions"),
    "B uneven": (lambda t: torch.cat([t, t[:, :1]], 1), "3 groups of B do not divide 2 heads"),
    "x flat": (lambda t: t[0], "dimensions"),
    "x deep": (lambda t: t[None], "dimensions"),
    "B flat": (lambda t: t[0], "dimensions"),
    "B deep": (lambda t: t[None], "dimensions"),
    "state flat": (lambda t: t[0], "dimensions"),
    "state deep": (lambda t: t[None], "dimensions"),
}


@pytest.mark.parametrize("name", BAD)
def test_refuses_what_the_kernel_would_misread(name):
    problem = Problem(Case(rows=((2, False, -1),), columns=2, groups=2, size=3))
    change, message = BAD[name]
    name = name.split()[0]
    setattr(problem, name, change(getattr(problem, name)))
    with pytest.raises(ValueError, match=message):
        problem.run(selective_state_update_slots)


def test_imports_without_triton():
    names = ("ssd", "causal_conv1d", "gated_norm")
    imports = "; ".join(f"import hybrid_kv.kernels.{name}" for name in names)
    code = f"import sys; sys.modules['triton'] = None; {imports}"
    subprocess.run([sys.executable, "-c", code], check=True, cwd=Path(__file__).parents[3])


@pytest.mark.gpu
@pytest.mark.parametrize("state_dtype", list(ROUNDING))
def test_on_a_gpu(state_dtype):
    rows = ((6, False, -1), (1, True, -1), (3, False, 2), (0, False, -1), (4, False, 0))
    case = replace(EIGHTH, rows=rows, columns=6, groups=8, state_dtype=state_dtype)
    check_problem(Problem(case, "cuda"), selective_state_update_slots)

"""The scan of a prefill against a loop over tokens and heads in float64, in Triton's interpreter.

Tolerances are shares of the sum of the magnitudes that meet in a result. In float32 1e-5: a few hundred roundings of
6e-8, and decays between tokens that err by 2e-6, the last place of sums up to 32. With 16-bit inputs every product has
been rounded twice at most on its way (weighted inputs, then the state; or the weighted scores), to 2^-8 in bfloat16 and
2^-11 in float16, twice that in the interpreter, which truncates; float16 besides loses 2^-24 of each where it
underflows. Storing adds its own rounding.
"""

import sys
from dataclasses import dataclass, replace
from functools import partial
from importlib.util import find_spec
from itertools import pairwise
from unittest.mock import MagicMock, patch

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from hypothesis import example, given
from hypothesis import strategies as st

from hybrid_kv.kernels.common.spans import Spans
from hybrid_kv.kernels.ssd import chunk_scan_prefill, chunk_scan_prefill_reference
from hybrid_kv.kernels.ssd import prefill as ssd_prefill
from hybrid_kv.kernels.ssd.prefill import aot_cases
from hybrid_kv.static.compile import TARGETS, compile_case, read_metrics
from tests.kernels.common.test_spans import Cut, Row, rows
from tests.kernels.interpreter import count_bytes, interpreted, load_peer, share_memory_with_the_interpreter
from tests.kernels.programs import backwards, programs
from tests.kernels.ssd.test_reference import plain
from tests.kernels.ssd.test_slots import ROUNDING, near, poisoned

EXACT = 1e-5
PRODUCTS = {torch.float32: 0.0, torch.bfloat16: 2.0**-6, torch.float16: 2.0**-9}


@dataclass(frozen=True)
class Case:
    """Everything that a process needs to build the inputs of one call.

    Attributes:
        chunk_size: of the spans.
        gap: elements between pages and between tokens that are not the layer's.
        initial: size of the states to start from; with 0 the first tokens' own contribution shows.
        block_p: rows of a state that a program owns; with few of them heads this small take several.
    """

    rows: tuple[Row, ...]
    chunk_size: int = 16
    groups: int = 1
    per_group: int = 1
    head_dim: int = 4
    size: int = 4
    gap: int = 3
    state_dtype: torch.dtype = torch.float32
    dtype: torch.dtype = torch.float32
    index_dtype: torch.dtype = torch.int64
    initial: float = 1.0
    block_p: int = 64
    tile_bytes: int = 128
    seed: int = 0


@st.composite
def cases(draw):
    return Case(
        rows=tuple(draw(st.lists(rows([0, 1, 2, 15, 16, 17, 33, 40]), max_size=3))),
        chunk_size=draw(st.sampled_from([16, 32, 64])),
        groups=draw(st.integers(1, 3)),
        per_group=draw(st.integers(1, 2)),
        head_dim=draw(st.sampled_from([1, 3, 7, 16, 20])),
        size=draw(st.sampled_from([1, 3, 16, 33])),
        gap=draw(st.sampled_from([0, 5, 16])),
        state_dtype=draw(st.sampled_from(list(ROUNDING))),
        dtype=draw(st.sampled_from(list(ROUNDING))),
        index_dtype=draw(st.sampled_from([torch.int32, torch.int64])),
        initial=draw(st.sampled_from([0.0, 1.0])),
        block_p=draw(st.sampled_from([16, 64])),
        tile_bytes=draw(st.sampled_from([64, 128])),
        seed=draw(st.integers(0, 2**31)),
    )


class Problem:
    """Inputs of one call. The pool, its gaps and its null block hold NaN wherever no row reads."""

    def __init__(self, case, device="cpu"):
        self.case = case
        g = torch.Generator().manual_seed(case.seed)
        self.cut = Cut(case.rows, case.chunk_size, g, device, case.index_dtype)
        self.spans, tokens, num_blocks = self.cut.spans, self.cut.spans.num_tokens + 2, self.cut.num_blocks
        heads, shared = case.groups * case.per_group, case.groups * case.size
        shape, inner = (heads, case.head_dim, case.size), heads * case.head_dim
        conv = torch.randn(tokens, inner + 2 * shared + case.gap, generator=g).to(case.dtype)
        conv[tokens - 2 :] = torch.nan
        x, B, C, _ = conv.split((inner, shared, shared, case.gap), dim=1)
        # Around every bend of softplus, and strong decays in front of weak ones.
        dt = torch.tensor([-24.0, -16.7, -7.0, -7.0, -3.0, -3.0, 0.0, 2.0, 19.0, 21.0])
        dt = dt[torch.randint(len(dt), (tokens, heads + 1), generator=g)] + torch.rand(tokens, heads + 1, generator=g)
        dt[tokens - 2 :] = torch.nan
        elements = heads * case.head_dim * case.size
        storage = poisoned(2 + num_blocks * (elements + case.gap), case.state_dtype)
        strides = (elements + case.gap, case.head_dim * case.size, case.size, 1)
        state = storage.as_strided((num_blocks, *shape), strides, 2)
        for row, source in zip(case.rows, self.cut.sources, strict=True):
            if row.initial and source > 0:
                state[source] = (torch.randn(*shape, generator=g) * case.initial).to(case.state_dtype)
        self.storage = storage.to(device)
        self.state = self.storage.as_strided((num_blocks, *shape), strides, 2)
        self.x, self.dt = x.unflatten(1, shape[:2]).to(device), dt[:, :heads].to(case.dtype).to(device)
        self.B, self.C = (part.unflatten(1, (case.groups, case.size)).to(device) for part in (B, C))
        self.dt_bias = torch.rand(heads, generator=g).sub(0.5).to(case.dtype).to(device)
        self.A_log, self.D = (torch.randn(heads, generator=g).to(device) for _ in range(2))
        self.sources = torch.tensor(self.cut.sources, dtype=case.index_dtype, device=device)
        self.initial = torch.tensor([row.initial for row in case.rows], dtype=torch.bool, device=device)

    def run(self, implementation):
        per_token = (self.x, self.dt, self.dt_bias, self.A_log, self.B, self.C, self.D)
        return implementation(self.state, *per_token, self.spans, self.sources, self.initial)


def check_problem(problem, implementation):
    case, before = problem.case, problem.storage.cpu().clone()
    states = problem.state.cpu().double()
    y = problem.run(implementation).cpu()
    assert y.dtype == problem.x.dtype and y.shape == problem.x.shape and y.is_contiguous()
    after = problem.state.cpu()
    may_change = torch.zeros(len(before), dtype=torch.bool)
    owned = may_change.as_strided(after.shape, after.stride(), problem.state.storage_offset())
    share = EXACT + PRODUCTS[case.dtype]
    first = 0
    for index, (row, source) in enumerate(zip(case.rows, problem.cut.sources, strict=True)):
        span = slice(first, first + row.length)
        first += row.length
        if not row.length:
            continue
        x, dt, B, C = (part[span].cpu().double() for part in (problem.x, problem.dt, problem.B, problem.C))
        step = F.softplus(dt + problem.dt_bias.cpu().double())
        A, D = -problem.A_log.cpu().double().exp(), problem.D.cpu().double()
        initial = states[source] if source > 0 and row.initial else torch.zeros_like(states[0])
        expected, passed = plain(initial, x, step, A, B, C, D)
        magnitude, sizes = plain(initial.abs(), x.abs(), step, A, B.abs(), C.abs(), D.abs())
        lost = 2.0**-24 * (row.length + 1) if case.dtype == torch.float16 else 0.0
        lost_state = lost * B.abs().amax() / share
        lost_y = lost * (case.size * C.abs().amax() * (1 + B.abs().amax()) + x.abs().amax()) / share
        near(f"y of row {index}", y[span], expected, share, magnitude + lost_y, case.dtype)
        for offset, block in problem.cut.kept[index]:
            allowed = sizes[offset - 1] + lost_state
            near(f"state {index}, {offset}", after[block], passed[offset - 1], share, allowed, case.state_dtype)
            owned[block] = True
    changed = problem.storage.cpu().view(torch.uint8) != before.view(torch.uint8)
    changed = changed.view(len(before), -1).any(1)
    assert not bool((changed & ~may_change).any()), "something else was written"


def multiply_bfloat16():
    """The interpreter multiplies matrices of bfloat16 as if their bits were integers (triton#4972)."""
    from triton.runtime.interpreter import InterpreterBuilder, TensorHandle, tl

    dot = InterpreterBuilder.create_dot

    def widened(handle):
        if handle.dtype.scalar != tl.bfloat16:
            return handle
        return TensorHandle((handle.data.astype(np.uint32) << 16).view(np.float32), tl.float32)

    def create_dot(self, a, b, *rest):
        return dot(self, widened(a), widened(b), *rest)

    return patch.object(InterpreterBuilder, "create_dot", create_dot)


def check(case):
    patched = {"BLOCK_P": case.block_p, "TILE_BYTES": case.tile_bytes}
    with patch.multiple(ssd_prefill, **patched), multiply_bfloat16():
        check_problem(Problem(case), chunk_scan_prefill)


SEVERAL = Case(
    (
        Row(2, (1, 2), start="first"),
        Row(0),
        Row(40, (7, 40), start="last", initial=False),
        Row(33, (32,), start="last"),
    ),
    groups=2,
    per_group=2,
    head_dim=20,
    size=16,
    block_p=16,
    tile_bytes=64,
    chunk_size=32,
)
NOTHING = Case(())


@given(cases())
@example(SEVERAL)
@example(replace(SEVERAL, dtype=torch.bfloat16))
@example(NOTHING)
def test_equals_the_loop_and_writes_nothing_else(case):
    interpreted(check, case)


@given(cases())
@example(SEVERAL)
@example(NOTHING)
def test_the_reference_equals_the_loop_and_writes_nothing_else(case):
    check_problem(Problem(case), chunk_scan_prefill_reference)


def check_backwards(case):
    """Programs have no order: what the last ones store, the first must not read. Two launches, of so many programs."""
    with programs(backwards) as grids:
        check(case)
    heads, tiles = case.groups * case.per_group, case.chunk_size // (case.tile_bytes // 4)
    slices = -(-case.head_dim // case.block_p)
    assert grids == [(heads * slices, len(case.rows)), (heads * tiles, len(Problem(case).spans.chunks))]


def test_two_launches_whose_programs_need_no_order():
    interpreted(check_backwards, SEVERAL)


def check_far_blocks(dtype):
    """Blocks 2^31 elements and more behind the start of a pool that is never committed as a whole."""
    share_memory_with_the_interpreter()
    case = Case((Row(17),), state_dtype=dtype)
    near_problem, far_problem = Problem(case), Problem(case)
    stride = 2**30 + 8
    pool = torch.empty(3 * stride, dtype=dtype)
    far = pool.as_strided((3, *near_problem.state.shape[1:]), (stride, *near_problem.state.stride()[1:]))
    far[2] = near_problem.state[near_problem.sources[0]]
    far_problem.state, far_problem.sources = far, torch.tensor([2])
    far_problem.spans.span_blocks.fill_(2)
    outputs = [problem.run(chunk_scan_prefill) for problem in (near_problem, far_problem)]
    assert torch.equal(outputs[0][:17], outputs[1][:17])
    assert torch.equal(far[2], near_problem.state[near_problem.spans.span_blocks[0]])


def check_far_tokens(dtype):
    """Tokens 2^31 elements and more behind the first, in every input."""
    share_memory_with_the_interpreter()
    case = Case((Row(300),), chunk_size=128, dtype=dtype)
    near_problem, far_problem = Problem(case), Problem(case)
    stride = 2**23 + 8
    for name in ("x", "dt", "B", "C"):
        tensor = getattr(near_problem, name)
        strides = (stride, *tensor.stride()[1:])
        far = torch.empty(302 * stride, dtype=dtype).as_strided(tensor.shape, strides)
        far[:300] = tensor[:300]
        setattr(far_problem, name, far)
    outputs = [problem.run(chunk_scan_prefill) for problem in (near_problem, far_problem)]
    assert torch.equal(outputs[0][:300], outputs[1][:300])
    assert torch.equal(near_problem.storage.view(torch.int32), far_problem.storage.view(torch.int32))


def check_far_outputs(dtype):
    """Outputs and states of chunks 2^31 elements behind the first: the last programs of a call as large as that."""
    share_memory_with_the_interpreter()
    tokens, heads, head_dim, size = 2**17, 16, 1024, 128
    g = torch.Generator().manual_seed(0)
    x, B, C = (torch.randn(1, *shape, generator=g) for shape in ((heads, head_dim), (1, size), (1, size)))
    x, B, C = (part.to(dtype).expand(tokens + 1, -1, -1) for part in (x, B, C))
    parameters = torch.rand(4, heads, generator=g)
    dt = parameters[0].to(dtype).expand(tokens + 1, -1)
    state = torch.randn(2, heads, head_dim, size, generator=g)
    spans = Spans(torch.tensor([tokens, 1]), torch.tensor([0, 0]))
    # Those of the last head, in the last row or chunk.
    with programs(lambda grid: [(x, grid[1] - 1) for x in range(grid[0] - grid[0] // heads, grid[0])]):
        y = chunk_scan_prefill(
            state, x, dt, *parameters[1:3], B, C, parameters[3], spans, torch.tensor([0, 1]), torch.tensor([True, True])
        )
    assert y.numel() > 2**31 and len(spans.chunks) * state[0].numel() > 2**31
    step = F.softplus(dt[:1].double() + parameters[1].double())
    last = [part[:, -1:] for part in (x[:1], step, -parameters[2].double().exp()[None])]
    expected, _ = plain(state[1, -1:], *last[:2], last[2][0], B[:1], C[:1], parameters[3, -1:])
    scale = expected.abs().amax()
    near("y", y[-1:, -1:], expected, PRODUCTS[dtype], scale, dtype)


@pytest.mark.parametrize("checked", [check_far_blocks, check_far_tokens, check_far_outputs])
def test_offsets_pass_int32(checked):
    interpreted(checked, torch.float16)


# The heads of one group of Nemotron-3-Nano, an eighth of a layer.
EIGHTH = Case((Row(200, (128,)),), 128, 1, 8, 64, 128, gap=4096, dtype=torch.bfloat16)


def measure(case):
    problem, empty = Problem(case), torch.empty
    tensors = {name: getattr(problem, name) for name in ("state", "x", "dt", "B", "C")}
    tensors["chunk_states"] = empty(len(problem.spans.chunks), *problem.state.shape[1:], dtype=case.dtype)
    tensors["times"] = empty(3, problem.x.shape[1], problem.spans.num_tokens)
    scratch = {tuple(tensor.shape): tensor for tensor in tensors.values()}
    with patch.object(torch, "empty", lambda *shape, **options: scratch.get(shape, empty(0))):
        return count_bytes(tensors, problem.run, chunk_scan_prefill)


def test_traffic_is_two_reads_of_the_inputs_and_the_states_of_chunks_once():
    counted, y, launches = interpreted(measure, EIGHTH)
    state, x, shared = 8 * 64 * 128, 200 * 8 * 64 * 2, 200 * 128 * 2
    # One state read, one stored at the boundary and one at the end; nothing of them twice.
    assert counted["state"] == (4 * state, 2 * 4 * state, 4 * state, 2 * 4 * state)
    # Each launch reads and writes its part of two chunks' states; the outputs of 128 tokens are two programs' work.
    assert counted["chunk_states"] == (2 * 2 * state, 2 * 2 * state, 2 * 2 * 2 * state, 2 * 2 * state)
    assert counted["times"][:2] == (3 * 8 * 200 * 4, 3 * 8 * 200 * 4)
    assert counted["x"][:2] == (x, 0) and counted["B"][:2] == counted["C"][:2] == (shared, 0)
    # The states ask for x once; the outputs for the tile's own twice, and for earlier tiles.
    assert counted["x"][2] == x + 2 * x + 2 * 64 * 8 * 64 * 2
    assert y == (0, x, 0, x)
    assert launches == 2


def check_sizes_of_real_models(dtype):
    """Heads of 64 x 128, in chunks of all sizes."""
    drawn = (Row(300, (1, 128, 160)), Row(128, start="last"), Row(129, initial=False))
    case = replace(EIGHTH, rows=drawn, per_group=2, dtype=dtype, gap=0)
    with multiply_bfloat16():
        for chunk_size in (16, 64, 128):
            if chunk_size * dtype.itemsize <= ssd_prefill.CHUNK_BYTES:
                check_problem(Problem(replace(case, chunk_size=chunk_size)), chunk_scan_prefill)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_heads_of_real_models(dtype):
    interpreted(check_sizes_of_real_models, dtype)


def check_strong_decay(chunk_size):
    """Decays of 2^-2900 a chunk: above the diagonal their inverse is infinite. Behind, weak ones must count exactly."""
    case = replace(SEVERAL, rows=(Row(64, (40,)),), chunk_size=chunk_size)
    problem = Problem(case)
    problem.dt[:32], problem.dt[32:64] = 40.0, -6.0
    problem.A_log.fill_(1.0)
    check_problem(problem, chunk_scan_prefill)


@pytest.mark.parametrize("chunk_size", [16, 64])
def test_strong_decay_neither_overflows_nor_blurs_what_follows(chunk_size):
    interpreted(check_strong_decay, chunk_size)


@pytest.mark.parametrize("target", TARGETS)
def test_compiles_without_spills_to_128_bit_accesses(target):
    for case in aot_cases(TARGETS[target].warp_size):
        if case.dtype == "bfloat16":  # `hybrid-kv kernels` compiles all.
            metrics = read_metrics(case, target, compile_case(case, target))
            assert metrics.spill_bytes == 0 and metrics.load_bits == 128, (case, metrics)
            # A wave of the outputs must not leave an SM to one block; AMD's keeps its tiles in registers.
            least = 1 if "states" in case.kernel or target == "gfx942" else 2
            assert metrics.blocks_per_sm >= least, (case, metrics)


class FirstConfig:
    """`triton.autotune` needs a device; the results of all configurations are the same."""

    def __init__(self, configs, **_):
        if isinstance(configs, MagicMock):  # What mamba_ssm's own filter, which is not loaded, was given.
            configs = sys.modules["mamba_ssm.utils.determinism"].autotune_configs.call_args.args[0]
        self.configs = configs

    def __call__(self, kernel):
        self.kernel = kernel
        return self

    def __getitem__(self, grid):
        return partial(self.kernel[grid], **self.configs[0].kwargs)


def load_with_first_config(name):
    import triton

    with patch.object(triton, "autotune", FirstConfig):
        return load_peer(name)


def check_peer(package):
    drawn = (Row(37, (16, 32)), Row(1), Row(19, (3,), initial=False), Row(16, (16,)))
    case = Case(drawn, groups=2, per_group=2, head_dim=16, size=16, initial=1.0)
    ours, theirs = Problem(case), Problem(case)
    spans, tokens = ours.spans, ours.spans.num_tokens
    y = ours.run(chunk_scan_prefill)[:tokens]
    expected, ends, states = {"vllm": run_vllm, "mamba_ssm": run_mamba_ssm}[package](theirs)
    # Each of them multiplies in float32 here, and takes differences of summed decays.
    differences = [float((y - expected).abs().max() / expected.abs().max())]
    for end, wanted in zip(ends, states, strict=True):
        for span in (spans.cu_spans[1:] == end).nonzero()[:, 0].tolist():
            got = ours.state[spans.span_blocks[span]]
            differences.append(float((got - wanted).abs().max() / wanted.abs().max()))
    assert len(differences) == 1 + len(spans.span_blocks) if package == "vllm" else 1 + len(drawn)
    assert max(differences) <= 2e-5, differences
    return max(differences)


def initial_states(problem):
    readable = (problem.initial & (problem.sources > 0))[:, None, None, None]
    return problem.state[problem.sources.clamp(min=0)].masked_fill(~readable, 0)


def run_vllm(problem):
    """Its chunks may begin and end where ours do, and it returns the state after each."""
    folder = "vllm.model_executor.layers.mamba.ops"
    peer = load_with_first_config(f"{folder}.ssd_combined")
    spans, tokens = problem.spans, problem.spans.num_tokens
    y = torch.empty_like(problem.x[:tokens])
    starts, ends = spans.chunks.unbind(1)
    rows = torch.searchsorted(spans.cu_seqlens, starts, right=True, out_int32=True) - 1
    last = torch.searchsorted(ends.contiguous(), spans.cu_seqlens[1:], out_int32=True)
    states = peer.mamba_chunk_scan_combined_varlen(
        problem.x[:tokens],
        problem.dt[:tokens],
        -problem.A_log.exp(),
        problem.B[:tokens],
        problem.C[:tokens],
        problem.case.chunk_size,
        cu_seqlens=spans.cu_seqlens,
        cu_chunk_seqlens=torch.cat([starts, ends[-1:]]),
        last_chunk_indices=last,
        seq_idx=rows,
        out=y,
        D=problem.D,
        dt_bias=problem.dt_bias,
        initial_states=initial_states(problem),
        dt_softplus=True,
        return_intermediate_states=True,
        state_dtype=torch.float32,
    )
    return y, ends, states


def run_mamba_ssm(problem):
    """One row at a time; it has the state at the end alone."""
    peer = load_with_first_config("mamba_ssm.ops.triton.ssd_combined")
    bounds, initial, outputs, states = problem.spans.cu_seqlens.tolist(), initial_states(problem), [], []
    for row, (first, end) in enumerate(pairwise(bounds)):
        x, dt, B, C = (part[None, first:end] for part in (problem.x, problem.dt, problem.B, problem.C))
        options = {"D": problem.D, "dt_bias": problem.dt_bias, "initial_states": initial[row : row + 1]}
        y, *_, final = peer._mamba_chunk_scan_combined_fwd(
            x, dt, -problem.A_log.exp(), B, C, problem.case.chunk_size, dt_softplus=True, **options
        )
        outputs.append(y[0])
        states.append(final[0])
    return torch.cat(outputs), bounds[1:], states


@pytest.mark.parametrize("package", ["vllm", "mamba_ssm"])
def test_equals_a_peer(package):
    for needed in (package, "einops"):
        if find_spec(needed) is None:
            pytest.skip(f"{needed} is not installed")
    interpreted(check_peer, package)


BAD = {
    "state": (lambda t: t.mT.contiguous().mT, "from dimension 1 on it must be contiguous"),
    "x": (lambda t: t.double(), "torch.float64"),
    "dt": (lambda t: t[:-1], "must be"),
    "dt_bias": (lambda t: t[:-1], "must be"),
    "A_log": (lambda t: t.to("meta"), "is on meta"),
    "B": (lambda t: t[:, :0], "0 groups of B do not divide 2 heads"),
    "C": (lambda t: t.bfloat16(), "it must be one of torch.float32"),
    "D": (lambda t: t[:, None], r"\(2, 1\)"),
    "sources": (lambda t: t.float(), "torch.float32"),
    "initial": (lambda t: t[1:], r"has shape \(0,\); it must be \(1,\)"),
    "B uneven": (lambda t: torch.cat([t, t[:, :1]], 1), "3 groups of B do not divide 2 heads"),
    "x flat": (lambda t: t[0], "dimensions"),
    "x deep": (lambda t: t[None], "dimensions"),
    "B flat": (lambda t: t[0], "dimensions"),
    "B deep": (lambda t: t[None], "dimensions"),
    "state flat": (lambda t: t[0], "dimensions"),
    "state deep": (lambda t: t[None], "dimensions"),
    "spans": (lambda s: Cut((Row(5),), 16, torch.Generator()).spans, "x has 4 tokens; the spans have 5"),
}


@pytest.mark.parametrize("name", BAD)
def test_refuses_what_the_kernel_would_misread(name):
    problem = Problem(Case((Row(2),), groups=2, size=3))
    change, message = BAD[name]
    name = name.split()[0]
    setattr(problem, name, change(getattr(problem, name)))
    with pytest.raises(ValueError, match=message):
        problem.run(chunk_scan_prefill)


def test_tokens_too_far_apart_for_32_bits_are_refused():
    problem = Problem(Case((Row(2),)))
    problem.dt = torch.empty(2**26).as_strided(problem.dt.shape, (2**24, 1))
    with pytest.raises(ValueError, match="tokens lie 16777216 elements apart; it must be fewer than 16777216"):
        problem.run(chunk_scan_prefill)


@pytest.mark.parametrize(("dtype", "largest"), [(torch.float32, 64), (torch.bfloat16, 128)])
def test_chunks_that_shared_memory_does_not_hold_are_refused(dtype, largest):
    with pytest.raises(ValueError, match=f"chunk_size is {2 * largest}; it must be at most {largest}"):
        Problem(Case((Row(2),), chunk_size=2 * largest, dtype=dtype)).run(chunk_scan_prefill)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", list(ROUNDING))
def test_on_a_gpu(dtype):
    drawn = (Row(600, (528,), start="first"), Row(0), Row(3, (1, 2), start="last"), Row(133, initial=False))
    chunk_size = 64 if dtype == torch.float32 else 128
    case = replace(EIGHTH, rows=drawn, groups=8, dtype=dtype, chunk_size=chunk_size)
    check_problem(Problem(case, "cuda"), chunk_scan_prefill)

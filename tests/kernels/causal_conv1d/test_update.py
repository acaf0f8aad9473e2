"""The convolution of a verify step against a loop over tokens in float64, in Triton's interpreter.

Tolerances: in float32 1e-6 of the sum of the magnitudes that meet before SiLU (as many roundings as taps, and exp),
whose slope is at most 1.1; plus the rounding of a 16-bit output (a unit in the last place, since the interpreter
truncates). What is stored is compared bit for bit: it is copied.
"""

from dataclasses import dataclass, replace
from importlib.util import find_spec
from unittest.mock import patch

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from hybrid_kv.kernels.causal_conv1d import causal_conv1d_update, causal_conv1d_update_reference
from hybrid_kv.kernels.causal_conv1d import update as conv_update
from hybrid_kv.kernels.causal_conv1d.update import aot_cases
from hybrid_kv.static.compile import TARGETS, compile_case, read_metrics
from tests.kernels.causal_conv1d.test_reference import plain
from tests.kernels.interpreter import count_bytes, interpreted, load_peer, share_memory_with_the_interpreter
from tests.kernels.ssd.test_slots import ROUNDING, near, poisoned

OUTPUTS = 1e-6


@dataclass(frozen=True)
class Case:
    """Everything that a process needs to build the inputs of one launch.

    Attributes:
        rows: per row its tokens, the tokens accepted before, whether it is padding, and whether the window lies in the
            block that is written.
        columns: 1 + K.
        gap: elements between pages and between tokens that are not the layer's.
        lanes: of the GPU that the launch is laid out for.
        scale: of the tokens; large ones overflow the exponential of SiLU.
    """

    rows: tuple[tuple[int, int, bool, bool], ...]
    columns: int
    channels: int
    kernel: int = 4
    bias: bool = True
    tap_major: bool = True
    gap: int = 3
    state_dtype: torch.dtype = torch.float32
    dtype: torch.dtype = torch.float32
    index_dtype: torch.dtype = torch.int64
    lanes: int = 32
    scale: float = 1.0
    seed: int = 0


@st.composite
def cases(draw):
    columns = draw(st.integers(1, 6))
    row = st.tuples(st.integers(0, columns), st.integers(1, columns), st.booleans(), st.booleans())
    return Case(
        rows=tuple(draw(st.lists(row, min_size=1, max_size=4))),
        columns=columns,
        channels=draw(st.sampled_from([1, 7, 128, 150, 256, 300])),
        kernel=draw(st.integers(2, 5)),
        bias=draw(st.booleans()),
        tap_major=draw(st.booleans()),
        gap=draw(st.sampled_from([0, 5, 16])),
        state_dtype=draw(st.sampled_from(list(ROUNDING))),
        dtype=draw(st.sampled_from(list(ROUNDING))),
        index_dtype=draw(st.sampled_from([torch.int32, torch.int64])),
        lanes=draw(st.sampled_from([32, 64])),
        scale=draw(st.sampled_from([1.0, 100.0])),
        seed=draw(st.integers(0, 2**31)),
    )


class Problem:
    """Inputs of one launch. The pool, its gaps and its null block hold NaN wherever no row reads."""

    def __init__(self, case, device="cpu"):
        self.case = case
        g = torch.Generator().manual_seed(case.seed)
        lengths = [length for length, *_ in case.rows]
        tokens, height = sum(lengths) + 2, case.kernel - 2 + case.columns
        # Values that both types hold, so that what is stored can be compared bit for bit: the interpreter does not
        # round as a GPU does.
        projected = torch.randn(tokens, 2 + case.channels + case.gap, generator=g) * case.scale
        projected = projected.to(case.state_dtype).to(case.dtype)
        projected[sum(lengths) :] = torch.nan
        blocks = 1 + len(case.rows) * 3
        self.ids = (1 + torch.randperm(blocks - 1, generator=g)).view(len(case.rows), 3)
        # The columns behind the first are none of this kernel's business.
        sources, targets = self.ids[:, 0].clone(), self.ids[:, 1:2].repeat(1, case.columns)
        targets[:, 1:] = self.ids[:, 2:]
        for row, (_, _, padding, alias) in enumerate(case.rows):
            if padding:
                sources[row], targets[row, 0] = 0, 0
            elif alias:
                sources[row] = targets[row, 0]
        page = height * case.channels + case.gap
        self.storage = poisoned(2 + blocks * page, case.state_dtype).to(device)
        strides = (page, case.channels, 1)
        self.conv_state = self.storage.as_strided((blocks, height, case.channels), strides, 2)
        for row, (_, accepted, *_) in enumerate(case.rows):
            if int(sources[row]):
                window = torch.randn(case.kernel - 1, case.channels, generator=g)
                self.conv_state[sources[row], accepted - 1 : accepted + case.kernel - 2] = window.to(self.storage)
        self.x = projected[:, 2 : 2 + case.channels].to(device)
        shape = (case.kernel, case.channels) if case.tap_major else (case.channels, case.kernel)
        weight = torch.randn(*shape, generator=g).to(device, case.dtype)
        self.weight = weight.t() if case.tap_major else weight
        self.bias = torch.randn(case.channels, generator=g).to(device, case.dtype) if case.bias else None
        window_rows = torch.tensor([accepted - 1 for _, accepted, *_ in case.rows])
        self.cu_seqlens, self.sources, self.window_rows, self.targets = (
            part.to(device, case.index_dtype)
            for part in (torch.tensor([0, *lengths]).cumsum(0), sources, window_rows, targets)
        )

    def run(self, implementation):
        parameters = (self.weight, self.bias, self.cu_seqlens, self.sources, self.window_rows, self.targets)
        return implementation(self.conv_state, self.x, *parameters)


def check_problem(problem, implementation):
    case, before = problem.case, problem.storage.cpu().clone()
    blocks = problem.conv_state.cpu().clone()
    y = problem.run(implementation).cpu()
    assert y.dtype == problem.x.dtype and y.is_contiguous()
    expected_storage = before.clone()
    stored = expected_storage.as_strided(blocks.shape, problem.conv_state.stride(), problem.conv_state.storage_offset())
    weight, bias = problem.weight.cpu(), None if problem.bias is None else problem.bias.cpu()
    first = 0
    for row, (length, accepted, padding, _) in enumerate(case.rows):
        x = problem.x[first : first + length].cpu()
        source = int(problem.sources[row])
        window = blocks[source, accepted - 1 : accepted + case.kernel - 2]
        window = window if source else torch.zeros_like(window)
        if length:
            expected, _ = plain(x, weight, bias, window)
            largest = torch.cat([window.double(), x.double()]).abs().max()
            magnitude = largest * weight.abs().double().sum(1).max() + (
                0 if bias is None else bias.abs().double().max()
            )
            near(f"y of row {row}", y[first : first + length], expected, OUTPUTS, magnitude, case.dtype)
        if length and not padding:
            inputs = torch.cat([window, x.to(window)])[1:]
            stored[int(problem.targets[row, 0]), : len(inputs)] = inputs
        first += length
    got, wanted = (tensor.view(torch.uint8) for tensor in (problem.storage.cpu(), expected_storage))
    assert torch.equal(got, wanted), "the blocks are not as they should be"


def check(case):
    with patch.object(conv_update, "warp_size", lambda: case.lanes):
        check_problem(Problem(case), causal_conv1d_update)


@given(cases())
def test_equals_the_loop_and_writes_nothing_else(case):
    interpreted(check, case)


@given(cases())
def test_the_reference_equals_the_loop_and_writes_nothing_else(case):
    check_problem(Problem(case), causal_conv1d_update_reference)


def check_far(dtype):
    """Blocks 2^31 elements and more behind the start of a pool that is never committed as a whole."""
    share_memory_with_the_interpreter()
    case = Case(rows=((2, 1, False, False),), columns=2, channels=8, state_dtype=dtype)
    near_problem, far_problem = Problem(case), Problem(case)
    stride = 2**30 + 8
    pool = torch.empty(3 * stride, dtype=dtype)
    far = pool.as_strided((3, *near_problem.conv_state.shape[1:]), (stride, 8, 1))
    far[2] = near_problem.conv_state[near_problem.sources[0]]
    far_problem.conv_state, far_problem.sources, far_problem.targets = far, torch.tensor([2]), torch.tensor([[2, 0]])
    outputs = [problem.run(causal_conv1d_update) for problem in (near_problem, far_problem)]
    assert torch.equal(outputs[0][:2], outputs[1][:2])
    assert torch.equal(far[2, :4], near_problem.conv_state[near_problem.targets[0, 0], :4])


def test_offsets_pass_int32():
    interpreted(check_far, torch.float16)


NANO = Case(((4, 2, False, False),), 4, 6144, dtype=torch.bfloat16, state_dtype=torch.bfloat16, gap=4096)


def measure(case):
    problem = Problem(case)
    tensors = {name: getattr(problem, name) for name in ("conv_state", "x", "weight", "bias")}
    return count_bytes(tensors, problem.run, causal_conv1d_update)


@pytest.mark.parametrize("length", [1, 2, 4, 6])
def test_traffic_is_every_row_once(length):
    """Counted at the shape of Nemotron-3-Nano: 3T + 5 rows of 12,288 bytes."""
    case = replace(NANO, rows=((length, 1, False, False),), columns=length)
    counted, y, launches = interpreted(measure, case)
    row = 6144 * 2
    assert counted["conv_state"] == (3 * row, (length + 2) * row, 3 * row, (length + 2) * row)
    assert counted["x"] == (length * row, 0, length * row, 0)
    assert y == (0, length * row, 0, length * row)
    # Once a request, out of the cache for all but the first.
    assert (counted["weight"], counted["bias"]) == ((4 * row, 0, 4 * row, 0), (row, 0, row, 0))
    assert launches == 1


@pytest.mark.parametrize("target", TARGETS)
def test_compiles_without_spills_to_128_bit_accesses(target):
    for case in aot_cases(TARGETS[target].warp_size):
        if case.shape in ("Nemotron-3-Nano, K=0", "Nemotron-3-Nano, K=5"):
            metrics = read_metrics(case, target, compile_case(case, target))
            assert metrics.spill_bytes == 0 and (metrics.load_bits, metrics.store_bits) == (128, 128), (case, metrics)


def check_vllm():
    """It keeps a window and its drafts in one block, so each row writes the block that it starts from."""
    rows = ((3, 2, False, True), (4, 1, False, True), (1, 4, False, True))
    ours, theirs = (Problem(Case(rows, columns=4, channels=300, tap_major=False)) for _ in range(2))
    y = ours.run(causal_conv1d_update)
    peer = load_peer("vllm.model_executor.layers.mamba.ops.causal_conv1d")
    expected = peer.causal_conv1d_update(
        theirs.x,
        theirs.conv_state.transpose(1, 2),
        theirs.weight,
        theirs.bias,
        "silu",
        conv_state_indices=theirs.sources,
        num_accepted_tokens=theirs.window_rows + 1,
        query_start_loc=theirs.cu_seqlens,
        max_query_len=4,
        null_block_id=0,
    )
    tokens = int(ours.cu_seqlens[-1])
    near("y", y[:tokens], expected[:tokens].double(), OUTPUTS, 20.0, torch.float32)
    for row, (length, *_) in enumerate(rows):
        block = int(ours.sources[row])
        assert torch.equal(ours.conv_state[block, : 2 + length], theirs.conv_state[block, : 2 + length])


def test_equals_vllm():
    if find_spec("vllm") is None:
        pytest.skip("vllm is not installed")
    interpreted(check_vllm)


BAD = {
    "conv_state": (lambda t: t[:, 1:], r"must be \(4, 4, 5\)"),
    "x": (lambda t: t.t().contiguous().t(), "from dimension 1 on it must be contiguous"),
    "weight": (lambda t: t[:, :1], "1 taps"),
    "bias": (lambda t: t.to("meta"), "is on meta"),
    "cu_seqlens": (lambda t: t[1:], r"has shape \(1,\); it must be \(2,\)"),
    "sources": (lambda t: t.double(), "torch.float64"),
    "window_rows": (lambda t: t[None], "must be"),
    "targets": (lambda t: t[:, 0], "dimensions"),
    "targets deep": (lambda t: t[None], "dimensions"),
    "x flat": (lambda t: t[0], "dimensions"),
    "x deep": (lambda t: t[None], "dimensions"),
    "weight flat": (lambda t: t[0], "dimensions"),
    "weight deep": (lambda t: t[None], "dimensions"),
    "conv_state flat": (lambda t: t[0], "dimensions"),
    "conv_state deep": (lambda t: t[None], "dimensions"),
}


@pytest.mark.parametrize("name", BAD)
def test_refuses_what_the_kernel_would_misread(name):
    problem = Problem(Case(rows=((2, 1, False, False),), columns=2, channels=5))
    change, message = BAD[name]
    name = name.split()[0]
    setattr(problem, name, change(getattr(problem, name)))
    with pytest.raises(ValueError, match=message):
        problem.run(causal_conv1d_update)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", list(ROUNDING))
def test_on_a_gpu(dtype):
    rows = ((6, 3, False, False), (1, 1, True, False), (3, 6, False, True), (0, 1, False, False), (4, 1, False, True))
    check_problem(Problem(replace(NANO, rows=rows, columns=6, state_dtype=dtype), "cuda"), causal_conv1d_update)

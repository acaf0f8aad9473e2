"""The convolution of a prefill against a loop over tokens in float64, in Triton's interpreter.

Tolerances as in `test_conv_update`. What is stored is compared bit for bit: it is copied.
"""

from dataclasses import dataclass, replace
from importlib.util import find_spec
from types import SimpleNamespace
from unittest.mock import MagicMock, patch

import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st

from hybrid_kv.kernels.causal_conv1d import causal_conv1d_prefill, causal_conv1d_prefill_reference
from hybrid_kv.kernels.causal_conv1d import prefill as conv_prefill
from hybrid_kv.kernels.causal_conv1d.prefill import aot_cases
from hybrid_kv.static.compile import TARGETS, compile_case, read_metrics
from tests.kernels.causal_conv1d.test_reference import plain
from tests.kernels.causal_conv1d.test_update import OUTPUTS
from tests.kernels.common.test_spans import Cut, Row, rows
from tests.kernels.interpreter import count_bytes, interpreted, load_peer, share_memory_with_the_interpreter
from tests.kernels.programs import backwards, programs
from tests.kernels.ssd.test_slots import ROUNDING, near, poisoned


@dataclass(frozen=True)
class Case:
    """Everything that a process needs to build the inputs of one launch.

    Attributes:
        height: rows of a block.
        gap: elements between pages and between tokens that are not the layer's.
        lanes: of the GPU that the launch is laid out for.
        scale: of the tokens; large ones overflow the exponential of SiLU.
    """

    rows: tuple[Row, ...]
    channels: int
    kernel: int = 4
    height: int = 6
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
    kernel = draw(st.integers(2, 5))
    return Case(
        rows=tuple(draw(st.lists(rows([0, 1, 2, 3, 15, 16, 17, 33]), max_size=4))),
        channels=draw(st.sampled_from([1, 7, 128, 150, 256, 300])),
        kernel=kernel,
        height=kernel + 1 + draw(st.integers(0, 2)),
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
        self.cut = Cut(case.rows, 16, g, device, case.index_dtype)
        tokens, num_blocks = self.cut.spans.num_tokens + 2, self.cut.num_blocks
        # Values that both types hold, so that what is stored can be compared bit for bit: the interpreter does not
        # round as a GPU does.
        projected = torch.randn(tokens, 2 + case.channels + case.gap, generator=g) * case.scale
        projected = projected.to(case.state_dtype).to(case.dtype)
        projected[tokens - 2 :] = torch.nan
        page = case.height * case.channels + case.gap
        self.storage = poisoned(2 + num_blocks * page, case.state_dtype)
        self.conv_state = self.storage.as_strided((num_blocks, case.height, case.channels), (page, case.channels, 1), 2)
        for row, source in zip(case.rows, self.cut.sources, strict=True):
            if row.initial and source > 0:
                window = torch.randn(case.kernel - 1, case.channels, generator=g)
                self.conv_state[source, row.accepted - 1 : row.accepted + case.kernel - 2] = window.to(self.storage)
        self.storage = self.storage.to(device)
        self.conv_state = self.storage.as_strided(self.conv_state.shape, self.conv_state.stride(), 2)
        self.x = projected[:, 2 : 2 + case.channels].to(device)
        shape = (case.kernel, case.channels) if case.tap_major else (case.channels, case.kernel)
        weight = torch.randn(*shape, generator=g).to(device, case.dtype)
        self.weight = weight.t() if case.tap_major else weight
        self.bias = torch.randn(case.channels, generator=g).to(device, case.dtype) if case.bias else None
        self.spans = self.cut.spans
        window_rows = [row.accepted - 1 for row in case.rows]
        self.sources, self.window_rows = (
            torch.tensor(part, dtype=case.index_dtype, device=device) for part in (self.cut.sources, window_rows)
        )
        self.initial = torch.tensor([row.initial for row in case.rows], dtype=torch.bool, device=device)

    def run(self, implementation):
        per_row = (self.spans, self.sources, self.window_rows, self.initial)
        return implementation(self.conv_state, self.x, self.weight, self.bias, *per_row)


def check_problem(problem, implementation):
    case, before = problem.case, problem.storage.cpu().clone()
    blocks = problem.conv_state.cpu().clone()
    y = problem.run(implementation).cpu()
    assert y.dtype == problem.x.dtype and y.shape == problem.x.shape and y.is_contiguous()
    expected_storage = before.clone()
    stored = expected_storage.as_strided(blocks.shape, problem.conv_state.stride(), problem.conv_state.storage_offset())
    weight, bias = problem.weight.cpu(), None if problem.bias is None else problem.bias.cpu()
    first = 0
    for index, (row, source) in enumerate(zip(case.rows, problem.cut.sources, strict=True)):
        x = problem.x[first : first + row.length].cpu()
        window = blocks[source, row.accepted - 1 : row.accepted + case.kernel - 2]
        window = window if source > 0 and row.initial else torch.zeros_like(window)
        if row.length:
            expected, windows = plain(x, weight, bias, window)
            largest = torch.cat([window.double(), x.double()]).abs().max()
            magnitude = largest * weight.abs().double().sum(1).max() + (
                0 if bias is None else bias.abs().double().max()
            )
            near(f"y of row {index}", y[first : first + row.length], expected, OUTPUTS, magnitude, case.dtype)
            for offset, block in problem.cut.kept[index]:
                stored[block, : case.kernel - 1] = windows[offset].to(stored)
        first += row.length
    got, wanted = (tensor.view(torch.uint8) for tensor in (problem.storage.cpu(), expected_storage))
    assert torch.equal(got, wanted), "the blocks are not as they should be"


def check(case):
    with patch.object(conv_prefill, "warp_size", lambda: case.lanes):
        check_problem(Problem(case), causal_conv1d_prefill)


# A row whose first states are kept before the window is full, in the block that it starts from.
SHORT = Case((Row(2, (1, 2), start="first"), Row(0), Row(1, start="last"), Row(18, (17, 1, 2), start="first")), 7)
NOTHING = Case((), 7)


@given(cases())
@example(SHORT)
@example(NOTHING)
def test_equals_the_loop_and_writes_nothing_else(case):
    interpreted(check, case)


@given(cases())
@example(SHORT)
@example(NOTHING)
def test_the_reference_equals_the_loop_and_writes_nothing_else(case):
    check_problem(Problem(case), causal_conv1d_prefill_reference)


def check_backwards(case):
    """Programs have no order: what the last ones store, the first must not read."""
    with programs(backwards) as grids:
        check(case)
    assert grids == [(-(-case.channels // 128) * sum(-(-row.length // 16) for row in case.rows),)]


def test_programs_need_no_order_though_rows_write_the_blocks_that_they_start_from():
    drawn = tuple(Row(40, boundaries, start=start) for boundaries in ((17, 33), (1, 40)) for start in ("first", "last"))
    interpreted(check_backwards, Case(drawn, 150))


def check_far(dtype):
    """Blocks 2^31 elements and more behind the start of a pool that is never committed as a whole."""
    share_memory_with_the_interpreter()
    case = Case((Row(2),), channels=8, state_dtype=dtype)
    near_problem, far_problem = Problem(case), Problem(case)
    stride = 2**30 + 8
    pool = torch.empty(3 * stride, dtype=dtype)
    far = pool.as_strided((3, *near_problem.conv_state.shape[1:]), (stride, 8, 1))
    far[2] = near_problem.conv_state[near_problem.sources[0]]
    far_problem.conv_state, far_problem.sources = far, torch.tensor([2])
    far_problem.spans.span_blocks.fill_(2)
    outputs = [problem.run(causal_conv1d_prefill) for problem in (near_problem, far_problem)]
    assert torch.equal(outputs[0][:2], outputs[1][:2])
    assert torch.equal(far[2, :3], near_problem.conv_state[near_problem.spans.span_blocks[0], :3])


def check_far_tokens(dtype):
    """Tokens 2^31 elements and more behind the first."""
    share_memory_with_the_interpreter()
    case = Case((Row(19, (18,)),), channels=8, dtype=dtype)
    near_problem, far_problem = Problem(case), Problem(case)
    stride = 2**27
    far_problem.x = torch.empty(21 * stride, dtype=dtype).as_strided((21, 8), (stride, 1))
    far_problem.x[:19] = near_problem.x[:19]
    outputs = [problem.run(causal_conv1d_prefill) for problem in (near_problem, far_problem)]
    assert torch.equal(outputs[0][:19], outputs[1][:19])
    assert torch.equal(near_problem.storage.view(torch.int32), far_problem.storage.view(torch.int32))


@pytest.mark.parametrize("checked", [check_far, check_far_tokens])
def test_offsets_pass_int32(checked):
    interpreted(checked, torch.float16)


NANO = Case((Row(48, (32,)),), 6144, dtype=torch.bfloat16, state_dtype=torch.bfloat16, gap=4096)


def measure(case):
    problem = Problem(case)
    tensors = {name: getattr(problem, name) for name in ("conv_state", "x", "weight", "bias")}
    return count_bytes(tensors, problem.run, causal_conv1d_prefill)


def test_traffic_is_every_token_once_and_the_windows():
    """Counted at the shape of Nemotron-3-Nano; a tile asks for the three tokens before it once more."""
    counted, y, launches = interpreted(measure, NANO)
    row = 6144 * 2
    assert counted["conv_state"] == (3 * row, 2 * 3 * row, 3 * row, 2 * 3 * row)
    assert counted["x"] == (48 * row, 0, (48 + 2 * 3 + 2 * 3) * row, 0)
    assert y == (0, 48 * row, 0, 48 * row)
    assert (counted["weight"][0], counted["bias"][0]) == (4 * row, row)
    assert launches == 1


def test_a_window_that_reaches_back_loads_no_token_before_its_row():
    """It would be another row's, or, in front of the first row, no memory of ours."""
    case = Case((Row(16), Row(1, start="last"), Row(2, (1,), initial=False)), 128)
    counted, _, _ = interpreted(measure, case)
    tokens, in_windows = 16 + 1 + 2, 3 + 1 + (1 + 2)
    assert counted["x"][2] == (tokens + in_windows) * 128 * 4


@pytest.mark.parametrize("target", TARGETS)
def test_compiles_without_spills_to_128_bit_accesses(target):
    for case in aot_cases(TARGETS[target].warp_size):
        metrics = read_metrics(case, target, compile_case(case, target))
        assert metrics.spill_bytes == 0 and (metrics.load_bits, metrics.store_bits) == (128, 128), (case, metrics)
        # Each holds the 8 KB of its tile; 48 KB under way are what an SM's share of the bus takes.
        assert metrics.blocks_per_sm * 8 >= 48, (case, metrics)


def check_vllm():
    """It keeps one block per row, or every window at multiples of a block size from the request's start."""
    drawn = (Row(5, start="last"), Row(1, start="last"), Row(19, start="last", initial=False), Row(2, start="last"))
    case = Case(drawn, channels=150, kernel=4, height=3, tap_major=False)
    ours, theirs = Problem(case), Problem(case)
    peer = load_peer("vllm.model_executor.layers.mamba.ops.causal_conv1d")
    # Its grid is a function that asks the kernel's arguments for what tensors of the interpreter do not know.
    pieces = [(row, piece) for row, one in enumerate(drawn) for piece in range(-(-one.length // 8))]
    programs, offsets = torch.tensor(pieces, dtype=torch.int32).t().contiguous()
    kernel = peer._causal_conv1d_fwd_kernel
    peer._causal_conv1d_fwd_kernel = MagicMock(__getitem__=lambda *_: kernel[len(pieces), 1])
    tokens = ours.spans.num_tokens
    y = ours.run(causal_conv1d_prefill)[:tokens]
    expected = peer.causal_conv1d_fn(
        theirs.x[:tokens].t(),
        theirs.weight,
        theirs.bias,
        theirs.conv_state.transpose(1, 2),
        theirs.spans.cu_seqlens,
        cache_indices=theirs.sources.int(),
        has_initial_state=theirs.initial,
        activation="silu",
        pad_slot_id=-1,
        null_block_id=0,
        metadata=SimpleNamespace(nums_dict=None, batch_ptr=programs, token_chunk_offset_ptr=offsets),
    ).t()
    near("y", y, expected.double(), OUTPUTS, 20.0, torch.float32)
    assert torch.equal(ours.conv_state[ours.sources], theirs.conv_state[theirs.sources])
    return float((y - expected).abs().max())


def test_equals_vllm():
    if find_spec("vllm") is None:
        pytest.skip("vllm is not installed")
    interpreted(check_vllm)


BAD = {
    "conv_state": (lambda t: t[:, :2], r"conv_state 2 rows; spans and weight need 4 and 3"),
    "x": (lambda t: t.t().contiguous().t(), "from dimension 1 on it must be contiguous"),
    "weight": (lambda t: t[:, :1], "1 taps; there must be 2 to 17"),
    "weight long": (lambda t: t[:, :1].repeat(1, 18), "18 taps; there must be 2 to 17"),
    "bias": (lambda t: t.to("meta"), "is on meta"),
    "x flat": (lambda t: t[0], "dimensions"),
    "x deep": (lambda t: t[None], "dimensions"),
    "weight flat": (lambda t: t[0], "dimensions"),
    "weight deep": (lambda t: t[None], "dimensions"),
    "conv_state flat": (lambda t: t[0], "dimensions"),
    "conv_state deep": (lambda t: t[None], "dimensions"),
    "sources": (lambda t: t.double(), "torch.float64"),
    "window_rows": (lambda t: t[1:], r"has shape \(1,\); it must be \(2,\)"),
    "initial": (lambda t: t.long(), "it must be one of torch.bool"),
    "spans": (lambda s: Cut((Row(4), Row(4)), 16, torch.Generator()).spans, "x has 6 tokens"),
}


@pytest.mark.parametrize("name", BAD)
def test_refuses_what_the_kernel_would_misread(name):
    problem = Problem(Case((Row(2), Row(2)), channels=5))
    change, message = BAD[name]
    name = name.split()[0]
    setattr(problem, name, change(getattr(problem, name)))
    with pytest.raises(ValueError, match=message):
        problem.run(causal_conv1d_prefill)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", list(ROUNDING))
def test_on_a_gpu(dtype):
    drawn = (Row(600, (528,), start="first"), Row(0), Row(3, (1, 2), start="last"), Row(33, initial=False))
    check_problem(Problem(replace(NANO, rows=drawn, state_dtype=dtype), "cuda"), causal_conv1d_prefill)

"""The recurrence, its chunked form and its compiled loop against a loop over tokens and heads in float64.

Tolerances are shares of max|ref| (relative error of single elements is unbounded under cancellation). In float32:
recurrent 1e-5, chunked 2e-5; a chunk of 256 tokens erred by 4.8e-6 over 3000 tokens, and a chunk sums in another order.
In float64: 1e-12, some thousand roundings.
"""

from functools import partial

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from hybrid_kv.guard import definitions
from hybrid_kv.kernels.ssd import chunk_scan, host, selective_state_update
from tests.kernels.defined import defined

RECURRENT, CHUNKED, DOUBLE = 1e-5, 2e-5, 1e-12
plain = partial(defined, definitions.mamba2)


@pytest.fixture(autouse=True, params=["in chunks", "in the compiled loop"], scope="module")
def way(request):
    """What `chunk_scan` takes: chunks where torch has more than `MAX_THREADS`."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(host, "MAX_THREADS", 0 if request.param == "in chunks" else torch.get_num_threads())
        yield request.param


def test_a_block_in_which_prefills_are_scanned_in_chunks_ends():
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(host, "MAX_THREADS", torch.get_num_threads())
        with host.in_chunks():
            assert host.scan_loop(torch.empty(1)) is None
        assert host.scan_loop(torch.empty(1)) is not None


def test_the_compiled_loop_is_taken_on_few_cores_of_a_cpu(way):
    assert (host.scan_loop(torch.empty(1)) is None) == (way == "in chunks")
    assert host.scan_loop(torch.empty(1, dtype=torch.bfloat16)) is None
    assert host.scan_loop(torch.empty(1, device="meta")) is None


def plain_row(row, length, problem):
    (x, dt, A, B, C, D), state = problem
    return plain(state[row], x[row, :length], dt[row, :length], A, B[row, :length], C[row, :length], D)


def assert_close(got, expected, share):
    assert float((got.double() - expected).abs().max()) <= share * max(float(expected.abs().max()), 1e-3)


@st.composite
def problems(draw):
    """Row lengths, and inputs of the kernels with anything finite behind them."""
    lengths = draw(st.lists(st.integers(1, 11), min_size=1, max_size=3))
    groups, per_group = draw(st.integers(1, 3)), draw(st.integers(1, 3))
    head_dim, size = draw(st.integers(1, 5)), draw(st.integers(1, 5))
    dtype = draw(st.sampled_from([torch.float32, torch.float64]))
    heads = groups * per_group
    g = torch.Generator().manual_seed(draw(st.integers(0, 2**31)))
    shape = (len(lengths), max(lengths))
    x = torch.randn(*shape, heads, head_dim, generator=g, dtype=dtype)
    dt = torch.rand(*shape, heads, generator=g, dtype=dtype) * 2
    A, D = -0.01 - torch.rand(heads, generator=g, dtype=dtype) * 4, torch.randn(heads, generator=g, dtype=dtype)
    B, C = (torch.randn(*shape, groups, size, generator=g, dtype=dtype) for _ in "BC")
    padding = torch.arange(shape[1]) >= torch.tensor(lengths)[:, None]
    for part in (x, B, C):
        part[padding] = 1e6
    # As `cache.layout` hands them out: a view with gaps between the pages.
    pages = torch.full((len(lengths), heads * head_dim * size + 5), torch.nan, dtype=dtype)
    state = pages.as_strided((len(lengths), heads, head_dim, size), (pages.stride(0), head_dim * size, size, 1), 2)
    state.copy_(torch.randn(state.shape, generator=g, dtype=dtype))
    return lengths, ((x, dt, A, B, C, D), state)


@given(problems(), st.integers(1, 13), st.data())
def test_chunks_of_any_size_equal_the_loop_with_the_state_at_any_offset(problem, chunk_size, data):
    lengths, (inputs, state) = problem
    wanted = data.draw(st.lists(st.sampled_from([(r, n + 1) for r, end in enumerate(lengths) for n in range(end)])))
    rows, offsets = (
        torch.tensor(part, dtype=torch.int64) for part in (zip(*wanted, strict=True) if wanted else ((), ()))
    )
    y, states = chunk_scan(*inputs, state, chunk_size, rows, offsets)
    assert y.dtype == states.dtype == state.dtype
    share = CHUNKED if state.dtype == torch.float32 else DOUBLE
    loops = [plain_row(row, length, problem[1]) for row, length in enumerate(lengths)]
    for row, length in enumerate(lengths):
        assert_close(y[row, :length], loops[row][0], share)
    assert len(states) == len(wanted)
    for (row, offset), got in zip(wanted, states, strict=True):
        assert_close(got, loops[row][1][offset - 1], share)


@given(problems())
def test_a_few_tokens_equal_the_loop_with_the_state_after_each(problem):
    lengths, (inputs, state) = problem
    before = state.clone()
    y, states = selective_state_update(state, *inputs)
    assert y.dtype == states.dtype == state.dtype
    assert torch.equal(state, before)
    share = RECURRENT if state.dtype == torch.float32 else DOUBLE
    for row, length in enumerate(lengths):
        expected, expected_states = plain_row(row, length, problem[1])
        assert_close(y[row, :length], expected, share)
        for t in range(length):
            assert_close(states[row, t], expected_states[t], share)


@given(problems(), st.integers(1, 12), st.integers(1, 12))
def test_a_carried_state_equals_one_shot(problem, cut, chunk_size):
    _, (inputs, state) = problem
    x, dt, A, B, C, D = (t.double().clamp(-9, 9) for t in inputs)
    state, length, rows = state.double(), x.shape[1], torch.arange(len(x))
    expected, expected_state = chunk_scan(x, dt, A, B, C, D, state, chunk_size, rows, torch.full_like(rows, length))
    outputs = []
    for span in (slice(0, cut), slice(cut, None)):
        if part := x[:, span].shape[1]:
            parts = (x[:, span], dt[:, span], A, B[:, span], C[:, span], D, state, chunk_size)
            y, state = chunk_scan(*parts, rows, torch.full_like(rows, part))
            outputs.append(y)
    assert_close(torch.cat(outputs, 1), expected, DOUBLE)
    assert_close(state, expected_state, DOUBLE)


def test_a_token_with_dt_zero_leaves_the_state_alone_bit_for_bit():
    g = torch.Generator().manual_seed(0)
    state = torch.randn(2, 4, 3, 5, generator=g)
    x, B = torch.randn(2, 6, 4, 3, generator=g), torch.randn(2, 6, 2, 5, generator=g)
    dt, A, D = torch.zeros(2, 6, 4), -torch.ones(4), torch.ones(4)
    rows = torch.arange(2)
    assert torch.equal(chunk_scan(x, dt, A, B, B, D, state, 4, rows, torch.tensor([6, 5]))[1], state)
    assert torch.equal(
        selective_state_update(state, x, dt, A, B, B, D)[1], state.unsqueeze(1).expand(-1, 6, -1, -1, -1)
    )


@pytest.mark.parametrize("chunk_size", [64, 128])
def test_tokens_behind_a_strong_decay_keep_their_digits(chunk_size):
    """Half of a chunk decays by exp(-1300), the other hardly: their differences are those of sums of 1300."""
    g = torch.Generator().manual_seed(0)
    x, B, C = (torch.randn(1, 128, 2, 8, generator=g) for _ in range(3))
    dt = (
        torch.rand(1, 128, 2, generator=g)
        * torch.where(torch.arange(128) % chunk_size < chunk_size // 2, 5, 0.005)[:, None]
    )
    A, D, state = torch.tensor([-16.0, -8.0]), torch.ones(2), torch.randn(1, 2, 8, 8, generator=g)
    y, states = chunk_scan(
        x, dt, A, B, C, D, state, chunk_size, torch.zeros(2, dtype=torch.int64), torch.tensor([100, 128])
    )
    expected, expected_states = plain(state[0], x[0], dt[0], A, B[0], C[0], D)
    assert_close(y[0], expected, 2e-6)
    assert_close(states, torch.stack([expected_states[99], expected_states[127]]), 2e-6)


@pytest.mark.parametrize("chunk_size", [4, 16])
def test_strong_decay_does_not_overflow(chunk_size):
    """exp(-cumsum) of the upper triangle is exp(+2000) here: infinity times a mask of zeros would be NaN."""
    g = torch.Generator().manual_seed(0)
    x, B, C = (torch.randn(1, 16, 2, 4, generator=g) for _ in range(3))
    dt, A, D = torch.full((1, 16, 2), 50.0), torch.tensor([-4.0, -0.001]), torch.zeros(2)
    state = torch.randn(1, 2, 4, 4, generator=g)
    y, states = chunk_scan(
        x, dt, A, B, C, D, state, chunk_size, torch.zeros(16, dtype=torch.int64), 1 + torch.arange(16)
    )
    expected, expected_states = plain(state[0], x[0], dt[0], A, B[0], C[0], D)
    assert_close(y[0], expected, CHUNKED)
    assert_close(states, torch.stack(expected_states), CHUNKED)

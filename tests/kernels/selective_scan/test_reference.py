"""The recurrence of Mamba-1 against a loop over tokens and channels in float64, and against transformers.

Tolerances are shares of max|ref|: in float32 1e-5, some dozen roundings of 6e-8 behind one another; in float64 1e-12.
Inputs in bfloat16 are exact in float32, so they change nothing.
"""

from functools import partial

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from hybrid_kv.guard import definitions
from hybrid_kv.kernels.selective_scan import selective_scan, selective_scan_update
from tests.kernels.defined import defined

SHARE = {torch.float32: 1e-5, torch.float64: 1e-12}
plain = partial(defined, definitions.mamba1)


def plain_row(row, length, inputs, state):
    x, dt, A, B, C, D = inputs
    return plain(state[row], x[row, :length], dt[row, :length], A, B[row, :length], C[row, :length], D)


def assert_close(got, expected, share):
    assert float((got.double() - expected.double()).abs().max()) <= share * max(float(expected.abs().max()), 1e-3)


@st.composite
def problems(draw):
    """Row lengths, inputs with anything finite behind them, and a state with gaps between its pages."""
    lengths = draw(st.lists(st.integers(1, 11), min_size=1, max_size=3))
    channels, size = draw(st.integers(1, 6)), draw(st.integers(1, 6))
    dtype, inputs_dtype = draw(
        st.sampled_from([(torch.float32,) * 2, (torch.float64,) * 2, (torch.float32, torch.bfloat16)])
    )
    g = torch.Generator().manual_seed(draw(st.integers(0, 2**31)))
    shape, strength = (len(lengths), max(lengths)), draw(st.sampled_from([0.1, 4.0, 200.0]))
    x, B, C = (torch.randn(*shape, n, generator=g, dtype=dtype) for n in (channels, size, size))
    dt = torch.rand(*shape, channels, generator=g, dtype=dtype) * 2
    padding = torch.arange(shape[1]) >= torch.tensor(lengths)[:, None]
    for part in (x, B, C):
        part[padding] = 1e6
    A = -strength * torch.rand(channels, size, generator=g, dtype=dtype)
    D = torch.randn(channels, generator=g, dtype=dtype)
    pages = torch.full((len(lengths), channels * size + 5), torch.nan, dtype=dtype)
    state = pages.as_strided((len(lengths), channels, size), (pages.stride(0), size, 1), 2)
    state.copy_(torch.randn(state.shape, generator=g, dtype=dtype))
    return lengths, (x.to(inputs_dtype), dt, A, B.to(inputs_dtype), C.to(inputs_dtype), D), state


@given(problems(), st.integers(1, 13), st.data())
def test_chunks_of_any_size_equal_the_loop_with_the_state_at_any_offset(problem, chunk_size, data):
    lengths, inputs, state = problem
    places = st.sampled_from([(r, n + 1) for r, end in enumerate(lengths) for n in range(end)])
    wanted = data.draw(st.lists(places))
    row, offsets = (
        torch.tensor(part, dtype=torch.int64) for part in (zip(*wanted, strict=True) if wanted else ((), ()))
    )
    before = [part.clone() for part in (*inputs, state)]
    y, states = selective_scan(*inputs, state, row, offsets, chunk_size)
    assert all(torch.equal(part, old) for part, old in zip((*inputs, state), before, strict=True))
    assert y.dtype == states.dtype == state.dtype
    assert states.shape == (len(wanted), *state.shape[1:])
    loops = [plain_row(r, length, inputs, state) for r, length in enumerate(lengths)]
    for r, length in enumerate(lengths):
        assert_close(y[r, :length], loops[r][0], SHARE[state.dtype])
    for (r, offset), got in zip(wanted, states, strict=True):
        assert_close(got, loops[r][1][offset - 1], SHARE[state.dtype])


@given(problems())
def test_a_few_tokens_equal_the_loop_with_the_state_after_each(problem):
    lengths, inputs, state = problem
    before = [part.clone() for part in (*inputs, state)]
    y, states = selective_scan_update(state, *inputs)
    assert all(torch.equal(part, old) for part, old in zip((*inputs, state), before, strict=True))
    assert y.dtype == states.dtype == state.dtype
    for r, length in enumerate(lengths):
        expected, expected_states = plain_row(r, length, inputs, state)
        assert_close(y[r, :length], expected, SHARE[state.dtype])
        assert_close(states[r, :length], torch.stack(expected_states), SHARE[state.dtype])


@given(problems(), st.integers(1, 12))
def test_the_size_of_chunks_changes_no_bit_of_a_state(problem, chunk_size):
    lengths, inputs, state = problem
    row, offsets = torch.arange(len(lengths)), torch.tensor(lengths)
    expected = selective_scan_update(state, *inputs)[1][row, offsets - 1]
    assert torch.equal(selective_scan(*inputs, state, row, offsets, chunk_size)[1], expected)


def test_a_token_with_dt_zero_leaves_the_state_alone_bit_for_bit():
    g = torch.Generator().manual_seed(0)
    state, x, B = (torch.randn(*shape, generator=g) for shape in ((2, 4, 3), (2, 6, 4), (2, 6, 3)))
    dt, A, D, row = torch.zeros(2, 6, 4), -torch.ones(4, 3), torch.ones(4), torch.arange(2)
    assert torch.equal(selective_scan(x, dt, A, B, B, D, state, row, torch.tensor([6, 5]), 4)[1], state)


def test_transformers_computes_the_same():
    jamba = pytest.importorskip("transformers.models.jamba.modeling_jamba")
    g = torch.Generator().manual_seed(0)
    x, B, C = (torch.randn(2, 30, n, generator=g) for n in (6, 4, 4))
    dt, D = torch.rand(2, 30, 6, generator=g), torch.randn(6, generator=g)
    A, state, row = -4 * torch.rand(6, 4, generator=g), torch.zeros(2, 6, 4), torch.arange(2)
    y, states = selective_scan(x, dt, A, B, C, D, state, row, torch.full((2,), 30), 8)
    expected, expected_state = jamba.mamba_selective_scan(x.mT, dt.mT, A, B.mT, C.mT, D, return_last_state=True)
    assert_close(y, expected.mT, SHARE[torch.float32])
    assert_close(states, expected_state, SHARE[torch.float32])

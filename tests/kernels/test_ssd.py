"""The recurrence and its chunked form against a loop over tokens and heads in float64.

Tolerances are shares of max|ref| (relative error of single elements is unbounded under cancellation). In float32:
recurrent 1e-5, chunked 2e-5; a chunk of 256 tokens erred by 4.8e-6 over 3000 tokens, and a chunk sums in another order.
"""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from hybrid_kv.kernels.ssd import chunk_scan, selective_state_update

RECURRENT, CHUNKED = 1e-5, 2e-5


def plain(state, x, dt, A, B, C, D):
    """One row: x [len, heads, head_dim], dt [len, heads], B and C [len, groups, state]."""
    state, x, dt, A, B, C, D = (t.double() for t in (state, x, dt, A, B, C, D))
    state = state.clone()
    per_group = len(A) // B.shape[1]
    y = torch.zeros_like(x)
    for t in range(len(x)):
        for h in range(len(A)):
            b, c = B[t, h // per_group], C[t, h // per_group]
            state[h] = torch.exp(dt[t, h] * A[h]) * state[h] + dt[t, h] * torch.outer(x[t, h], b)
            y[t, h] = state[h] @ c + D[h] * x[t, h]
    return y, state


def assert_close(got, expected, share):
    expected = expected.double()
    assert float((got.double() - expected).abs().max()) <= share * max(float(expected.abs().max()), 1e-3)


@st.composite
def problems(draw):
    lengths = draw(st.lists(st.integers(1, 11), min_size=1, max_size=3))
    groups, per_group = draw(st.integers(1, 3)), draw(st.integers(1, 3))
    head_dim, size = draw(st.integers(1, 5)), draw(st.integers(1, 5))
    heads = groups * per_group
    g = torch.Generator().manual_seed(draw(st.integers(0, 2**31)))
    shape = (len(lengths), max(lengths))
    x = torch.randn(*shape, heads, head_dim, generator=g)
    dt = torch.rand(*shape, heads, generator=g) * 2
    A, D = -0.01 - torch.rand(heads, generator=g) * 4, torch.randn(heads, generator=g)
    B, C = (torch.randn(*shape, groups, size, generator=g) for _ in "BC")
    # As `cache.layout` hands them out: a view with gaps between the pages.
    pages = torch.full((len(lengths), heads * head_dim * size + 5), torch.nan)
    state = pages.as_strided((len(lengths), heads, head_dim, size), (pages.stride(0), head_dim * size, size, 1), 2)
    state.copy_(torch.randn(state.shape, generator=g))
    return lengths, (x, dt, A, B, C, D), state


@given(problems(), st.integers(1, 13))
def test_chunks_of_any_size_equal_the_loop_and_padding_is_neutral(problem, chunk_size):
    lengths, (x, dt, A, B, C, D), state = problem
    padding = torch.arange(x.shape[1]) >= torch.tensor(lengths)[:, None]
    dt[padding] = 0
    for garbage in (x, B, C):
        garbage[padding] = 1e6  # finite is all that `Ragged.padded` promises
    y, after = chunk_scan(x, dt, A, B, C, D, state, chunk_size)
    for row, length in enumerate(lengths):
        parts = (t[row, :length] for t in (x, dt))
        expected, expected_state = plain(state[row], *parts, A, B[row, :length], C[row, :length], D)
        assert_close(y[row, :length], expected, CHUNKED)
        assert_close(after[row], expected_state, CHUNKED)


@given(problems())
def test_one_token_equals_the_loop(problem):
    _, (x, dt, A, B, C, D), state = problem
    y, after = selective_state_update(state, x[:, 0], dt[:, 0], A, B[:, 0], C[:, 0], D)
    for row in range(len(x)):
        expected, expected_state = plain(state[row], x[row, :1], dt[row, :1], A, B[row, :1], C[row, :1], D)
        assert_close(y[row], expected[0], RECURRENT)
        assert_close(after[row], expected_state, RECURRENT)


@given(problems(), st.integers(1, 12), st.integers(1, 12))
def test_a_carried_state_equals_one_shot_exactly_in_float64(problem, cut, chunk_size):
    _, inputs, state = problem
    x, dt, A, B, C, D = (t.double() for t in inputs)
    state = state.double()
    expected, expected_state = chunk_scan(x, dt, A, B, C, D, state, chunk_size)
    outputs = []
    for span in (slice(0, cut), slice(cut, None)):
        if x[:, span].shape[1]:
            y, state = chunk_scan(x[:, span], dt[:, span], A, B[:, span], C[:, span], D, state, chunk_size)
            outputs.append(y)
    torch.testing.assert_close(torch.cat(outputs, 1), expected, rtol=0, atol=1e-11 * float(expected.abs().max()))
    torch.testing.assert_close(state, expected_state, rtol=0, atol=1e-11 * max(1.0, float(expected_state.abs().max())))


def test_a_token_with_dt_zero_leaves_the_state_alone_bit_for_bit():
    g = torch.Generator().manual_seed(0)
    state = torch.randn(2, 4, 3, 5, generator=g)
    x, B = torch.randn(2, 6, 4, 3, generator=g), torch.randn(2, 6, 2, 5, generator=g)
    dt, A, D = torch.zeros(2, 6, 4), -torch.ones(4), torch.ones(4)
    assert torch.equal(chunk_scan(x, dt, A, B, B, D, state, 4)[1], state)
    assert torch.equal(selective_state_update(state, x[:, 0], dt[:, 0], A, B[:, 0], B[:, 0], D)[1], state)


@pytest.mark.parametrize("chunk_size", [4, 16])
def test_strong_decay_does_not_overflow(chunk_size):
    """exp(-cumsum) of the upper triangle is exp(+2000) here: infinity times a mask of zeros would be NaN."""
    g = torch.Generator().manual_seed(0)
    x, B, C = (torch.randn(1, 16, 2, 4, generator=g) for _ in range(3))
    dt, A, D = torch.full((1, 16, 2), 50.0), torch.tensor([-4.0, -0.001]), torch.zeros(2)
    state = torch.randn(1, 2, 4, 4, generator=g)
    y, after = chunk_scan(x, dt, A, B, C, D, state, chunk_size)
    expected, expected_state = plain(state[0], x[0], dt[0], A, B[0], C[0], D)
    assert_close(y[0], expected, CHUNKED)
    assert_close(after[0], expected_state, CHUNKED)

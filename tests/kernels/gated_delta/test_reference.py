"""The gated delta rule and its chunked form against a loop over tokens and heads in float64, and against transformers.

Tolerances are shares of max|ref| (relative error of single elements is unbounded under cancellation), of outputs of
what they add up: a state times a query, since a token with `beta` near 1 cancels what the state held for its key. In
float32: recurrent 1e-5, chunked 2e-5, as for the recurrence of Mamba-2: some hundred roundings of 6e-8 in another
order. In float64: 1e-12. Inputs in bfloat16 are exact in float32, so they change nothing.
"""

from functools import partial

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st

from hybrid_kv.guard import definitions
from hybrid_kv.kernels.gated_delta import gated_delta_chunk, gated_delta_update
from tests.kernels.defined import defined

RECURRENT, CHUNKED, DOUBLE = 1e-5, 2e-5, 1e-12
plain = partial(defined, definitions.gated_delta)


def assert_close(got, expected, share, terms=1e-3):
    assert float((got.double() - expected).abs().max()) <= share * max(float(expected.abs().max()), terms)


def terms(q, states):
    """The largest product of elements that outputs add up."""
    return float(q.abs().max()) * max(float(state.abs().max()) for state in states)


def random_inputs(shape, heads, sizes, per_channel, strength, dtype, g):
    """What layers hand over: unit keys, scaled unit queries, beta of 0 … 2, log decays of 0 … -strength."""
    key_size, value_size = sizes
    q, k = (F.normalize(torch.randn(*shape, heads, key_size, generator=g, dtype=dtype), dim=-1) for _ in "qk")
    v = torch.randn(*shape, heads, value_size, generator=g, dtype=dtype)
    decays = (*shape, heads, key_size) if per_channel else (*shape, heads)
    decay = -strength * torch.rand(decays, generator=g, dtype=dtype) ** 3
    return q * key_size**-0.5, k, v, decay, 2 * torch.rand(*shape, heads, generator=g, dtype=dtype)


@st.composite
def problems(draw):
    """Row lengths, inputs with tokens of any value behind them, and a state with gaps between its pages."""
    lengths = draw(st.lists(st.integers(1, 40), min_size=1, max_size=3))
    heads, sizes = draw(st.integers(1, 3)), (draw(st.integers(1, 6)), draw(st.integers(1, 6)))
    dtype, inputs_dtype = draw(
        st.sampled_from([(torch.float32,) * 2, (torch.float64,) * 2, (torch.float32, torch.bfloat16)])
    )
    g = torch.Generator().manual_seed(draw(st.integers(0, 2**31)))
    shape = (len(lengths), max(lengths))
    strength = draw(st.sampled_from([0.0, 0.1, 5.0, 100.0]))
    q, k, v, decay, beta = random_inputs(shape, heads, sizes, draw(st.booleans()), strength, dtype, g)
    v[torch.arange(shape[1]) >= torch.tensor(lengths)[:, None]] = 1e6
    pages = torch.full((len(lengths), heads * sizes[0] * sizes[1] + 5), torch.nan, dtype=dtype)
    strides = (pages.stride(0), sizes[0] * sizes[1], sizes[0], 1)
    state = pages.as_strided((len(lengths), heads, sizes[1], sizes[0]), strides, 2)
    state.copy_(torch.randn(state.shape, generator=g, dtype=dtype))
    return lengths, (*(part.to(inputs_dtype) for part in (q, k, v)), decay, beta), state


def plain_rows(lengths, inputs, state):
    return [plain(state[row], *(part[row, :length] for part in inputs)) for row, length in enumerate(lengths)]


@given(problems(), st.integers(1, 45), st.data())
def test_chunks_of_any_size_equal_the_loop_with_the_state_at_any_offset(problem, chunk_size, data):
    lengths, inputs, state = problem
    places = st.sampled_from([(r, n + 1) for r, end in enumerate(lengths) for n in range(end)])
    wanted = data.draw(st.lists(places, max_size=6))
    row, offsets = (
        torch.tensor(part, dtype=torch.int64) for part in (zip(*wanted, strict=True) if wanted else ((), ()))
    )
    before = [part.clone() for part in (*inputs, state)]
    out, states = gated_delta_chunk(*inputs, state, chunk_size, row, offsets)
    assert all(torch.equal(part, old) for part, old in zip((*inputs, state), before, strict=True))
    assert out.dtype == states.dtype == state.dtype
    share = CHUNKED if state.dtype == torch.float32 else DOUBLE
    loops = plain_rows(lengths, inputs, state)
    for r, length in enumerate(lengths):
        assert_close(out[r, :length], loops[r][0], share, terms(inputs[0], [state[r], *loops[r][1]]))
    assert states.shape == (len(wanted), *state.shape[1:])
    for (r, offset), got in zip(wanted, states, strict=True):
        assert_close(got, loops[r][1][offset - 1], share)


@given(problems(), st.integers(1, 6))
def test_a_few_tokens_equal_the_loop_with_the_state_after_each(problem, most):
    lengths, inputs, state = problem
    lengths = [min(length, most) for length in lengths]
    inputs = tuple(part[:, : max(lengths)] for part in inputs)
    before = [part.clone() for part in (*inputs, state)]
    out, states = gated_delta_update(state, *inputs)
    assert all(torch.equal(part, old) for part, old in zip((*inputs, state), before, strict=True))
    assert out.dtype == states.dtype == state.dtype
    assert out.shape == inputs[2].shape and states.shape == (*out.shape[:2], *state.shape[1:])
    share = RECURRENT if state.dtype == torch.float32 else DOUBLE
    for r, (expected, expected_states) in enumerate(plain_rows(lengths, inputs, state)):
        assert_close(out[r, : lengths[r]], expected, share, terms(inputs[0], [state[r], *expected_states]))
        assert_close(states[r, : lengths[r]], torch.stack(expected_states), share)


@given(problems(), st.integers(1, 39), st.integers(1, 40))
def test_a_carried_state_equals_one_shot(problem, cut, chunk_size):
    _, inputs, state = problem
    inputs, state = [part.double().clamp(-9, 9) for part in inputs], state.double()
    length, row = inputs[0].shape[1], torch.arange(len(state))
    expected, expected_state = gated_delta_chunk(*inputs, state, chunk_size, row, torch.full_like(row, length))
    outputs = []
    for span in (slice(0, cut), slice(cut, None)):
        parts = [part[:, span] for part in inputs]
        if tokens := parts[0].shape[1]:
            out, state = gated_delta_chunk(*parts, state, chunk_size, row, torch.full_like(row, tokens))
            outputs.append(out)
    assert_close(torch.cat(outputs, 1), expected, DOUBLE)
    assert_close(state, expected_state, DOUBLE)


@pytest.mark.parametrize("per_channel", [False, True])
@pytest.mark.parametrize("chunk_size", [16, 64, 128])
def test_tokens_behind_a_strong_decay_keep_their_digits(per_channel, chunk_size):
    """A chunk's log decays sum to -400, all in its first half: exp() of the negated sum overflows.

    Differences in the other half are small ones of large sums: in float32 sums of 400 they err by 3e-5.
    """
    g = torch.Generator().manual_seed(0)
    q, k, v, decay, beta = random_inputs((1, 128), 2, (8, 8), per_channel, 0.02, torch.float32, g)
    strong = torch.arange(128) % chunk_size < chunk_size // 2
    decay[:, strong] -= 800 / chunk_size
    state = torch.randn(1, 2, 8, 8, generator=g)
    row, offsets = torch.zeros(3, dtype=torch.int64), torch.tensor([100, 128, 7])
    out, states = gated_delta_chunk(q, k, v, decay, beta, state, chunk_size, row, offsets)
    expected, expected_states = plain(state[0], q[0], k[0], v[0], decay[0], beta[0])
    assert_close(out[0], expected, 2e-6)
    assert_close(states, torch.stack([expected_states[n - 1] for n in offsets.tolist()]), 2e-6)


def test_a_token_with_neither_decay_nor_beta_leaves_the_state_alone_bit_for_bit():
    g = torch.Generator().manual_seed(0)
    q, k, v, decay, _ = random_inputs((2, 6), 3, (5, 4), False, 0.0, torch.float32, g)
    beta, state, row = torch.zeros(2, 6, 3), torch.randn(2, 3, 4, 5, generator=g), torch.arange(2)
    assert torch.equal(gated_delta_chunk(q, k, v, decay, beta, state, 4, row, torch.tensor([6, 5]))[1], state)
    states = gated_delta_update(state, q, k, v, decay, beta)[1]
    assert torch.equal(states, state.unsqueeze(1).expand_as(states))


@pytest.fixture(scope="module")
def like_theirs():
    """Inputs in float32, and what theirs want more: unscaled queries, states as [K, V]."""
    g = torch.Generator().manual_seed(1)
    state = torch.randn(2, 3, 8, 16, generator=g)

    def inputs(length, per_channel):
        return random_inputs((2, length), 3, (16, 8), per_channel, 3.0, torch.float32, g)

    return inputs, state


@pytest.mark.parametrize(("length", "per_channel"), [(1, False), (5, False), (150, False), (5, True), (150, True)])
def test_transformers_computes_the_same(like_theirs, length, per_channel):
    qwen = pytest.importorskip("transformers.models.qwen3_next.modeling_qwen3_next")
    kimi = pytest.importorskip("transformers.models.kimi_linear.modeling_kimi_linear")
    if per_channel:
        chunked, recurrent = kimi.chunk_kimi_delta_attention, kimi.recurrent_kimi_delta_attention
    else:
        chunked, recurrent = qwen.torch_chunk_gated_delta_rule, qwen.torch_recurrent_gated_delta_rule
    inputs, state = like_theirs
    q, k, v, decay, beta = inputs(length, per_channel)
    ours, states = gated_delta_update(state, q, k, v, decay, beta)
    row = torch.arange(2)
    in_chunks, last = gated_delta_chunk(q, k, v, decay, beta, state, 32, row, torch.full_like(row, length))
    for theirs in (chunked, recurrent):
        options = {"initial_state": state.mT.clone(), "output_final_state": True}
        expected, expected_state = theirs(q * 16**0.5, k, v, decay, beta, **options)
        for got, got_state in ((ours, states[:, -1]), (in_chunks, last)):
            assert_close(got, expected.double(), CHUNKED)
            assert_close(got_state, expected_state.mT.double(), CHUNKED)

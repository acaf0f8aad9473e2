"""The convolution against a loop over tokens in float64.

Tolerance: 1e-6 of max|pre-activation terms|; four float32 products and sums of order one err by a few 1e-7.
"""

import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st

from hybrid_kv.kernels.causal_conv1d import causal_conv1d_prefill, causal_conv1d_update

TOLERANCE = 1e-6


def plain(x, weight, bias, window):
    """One row, token by token: y [len, channels] and the window after it."""
    x, weight, window = x.double(), weight.double(), window.double()
    outputs = []
    for token in x:
        inputs = torch.cat([window, token[None]])
        y = sum(inputs[j] * weight[:, j] for j in range(weight.shape[1]))
        outputs.append(F.silu(y + (0 if bias is None else bias.double())))
        window = inputs[1:]
    return torch.stack(outputs), window


def assert_close(got, expected, scale):
    assert float((got.double() - expected).abs().max()) <= TOLERANCE * scale


@st.composite
def problems(draw):
    lengths = draw(st.lists(st.integers(1, 9), min_size=1, max_size=4))
    channels, kernel = draw(st.integers(1, 7)), draw(st.integers(2, 5))
    g = torch.Generator().manual_seed(draw(st.integers(0, 2**31)))
    x = torch.randn(len(lengths), max(lengths), channels, generator=g)
    weight = torch.randn(channels, kernel, generator=g)
    bias = torch.randn(channels, generator=g) if draw(st.booleans()) else None
    # As `cache.layout` hands them out: a view with gaps between the pages.
    pages = torch.full((len(lengths), kernel * channels + 3), torch.nan)
    window = pages.as_strided((len(lengths), kernel - 1, channels), (pages.stride(0), channels, 1))
    window.copy_(torch.randn(window.shape, generator=g))
    scale = 1.0 + float(x.abs().max() * weight.abs().sum(1).max()) + float(window.abs().max())
    return x, weight, bias, window, torch.tensor(lengths), scale


@given(problems())
def test_prefill_equals_the_loop_and_ignores_padding(problem):
    x, weight, bias, window, lengths, scale = problem
    padding = torch.arange(x.shape[1]) >= lengths[:, None]
    x[padding] = torch.nan
    y, after = causal_conv1d_prefill(x, weight, bias, window, lengths)
    for row, length in enumerate(lengths.tolist()):
        expected, expected_window = plain(x[row, :length], weight, bias, window[row])
        assert_close(y[row, :length], expected, scale)
        assert torch.equal(after[row].double(), expected_window)


@given(problems())
def test_update_equals_the_loop(problem):
    x, weight, bias, window, _, scale = problem
    y, after = causal_conv1d_update(x[:, 0], weight, bias, window)
    for row in range(len(x)):
        expected, expected_window = plain(x[row, :1], weight, bias, window[row])
        assert_close(y[row], expected[0], scale)
        assert torch.equal(after[row].double(), expected_window)


@given(problems(), st.integers(1, 4))
def test_chunks_carry_the_window(problem, chunk):
    """Also chunks shorter than the window, which keep a part of the old one."""
    x, weight, bias, window, _, scale = problem
    full = torch.full((len(x),), x.shape[1])
    expected, expected_window = causal_conv1d_prefill(x, weight, bias, window, full)
    parts, carried = [], window
    for part in x.split(chunk, dim=1):
        y, carried = causal_conv1d_prefill(part, weight, bias, carried, torch.full((len(x),), part.shape[1]))
        parts.append(y)
    assert_close(torch.cat(parts, 1), expected.double(), scale)
    assert torch.equal(carried, expected_window)

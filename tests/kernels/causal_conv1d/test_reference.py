"""The convolution against a loop over tokens in float64.

Tolerance: 1e-6 of max|pre-activation terms| in float32, where four products and sums of order one err by a few 1e-7;
1e-14 in float64.
"""

import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st

from hybrid_kv.kernels.causal_conv1d import causal_conv1d, windows_at

TOLERANCE = {torch.float32: 1e-6, torch.float64: 1e-14}


def plain(x, weight, bias, window):
    """One row, token by token: y [len, channels], and the window before the first token and after each."""
    x, weight, window = x.double(), weight.double(), window.double()
    outputs, windows = [], [window]
    for token in x:
        inputs = torch.cat([windows[-1], token[None]])
        y = sum(inputs[j] * weight[:, j] for j in range(weight.shape[1]))
        outputs.append(F.silu(y + (0 if bias is None else bias.double())))
        windows.append(inputs[1:])
    return torch.stack(outputs), windows


def assert_close(got, expected, scale):
    assert float((got.double() - expected).abs().max()) <= TOLERANCE[got.dtype] * scale


@st.composite
def problems(draw):
    lengths = draw(st.lists(st.integers(1, 9), min_size=1, max_size=4))
    channels, kernel = draw(st.integers(1, 7)), draw(st.integers(2, 5))
    dtype = draw(st.sampled_from(list(TOLERANCE)))
    g = torch.Generator().manual_seed(draw(st.integers(0, 2**31)))
    x = torch.randn(len(lengths), max(lengths), channels, generator=g, dtype=dtype)
    weight = torch.randn(channels, kernel, generator=g, dtype=dtype)
    bias = torch.randn(channels, generator=g, dtype=dtype) if draw(st.booleans()) else None
    # As `cache.layout` hands them out: a view with gaps between the pages.
    pages = torch.full((len(lengths), kernel * channels + 3), torch.nan, dtype=dtype)
    window = pages.as_strided((len(lengths), kernel - 1, channels), (pages.stride(0), channels, 1))
    window.copy_(torch.randn(window.shape, generator=g, dtype=dtype))
    scale = 1.0 + float(x.abs().max() * weight.abs().sum(1).max()) + float(window.abs().max())
    return x, weight, bias, window, lengths, scale


@given(problems(), st.data())
def test_equals_the_loop_with_the_window_at_any_offset(problem, data):
    x, weight, bias, window, lengths, scale = problem
    for row, length in enumerate(lengths):
        x[row, length:] = torch.nan
    y, inputs = causal_conv1d(x, weight, bias, window)
    wanted = [(row, offset) for row, length in enumerate(lengths) for offset in range(length + 1)]
    wanted = data.draw(st.permutations(wanted))
    rows, offsets = (torch.tensor(part) for part in zip(*wanted, strict=True))
    got = windows_at(inputs, rows, offsets, weight.shape[1] - 1)
    assert y.dtype == got.dtype == x.dtype
    loops = [plain(x[row, :length], weight, bias, window[row]) for row, length in enumerate(lengths)]
    for row, length in enumerate(lengths):
        assert_close(y[row, :length], loops[row][0], scale)
    for (row, offset), one in zip(wanted, got, strict=True):
        assert torch.equal(one.double(), loops[row][1][offset])


@given(problems(), st.data())
def test_drafts_that_were_rejected_leave_no_trace(problem, data):
    """Keep all inputs of a step; the next one starts from the window after the accepted tokens."""
    x, weight, bias, window, lengths, scale = problem
    accepted = torch.tensor([data.draw(st.integers(1, length)) for length in lengths])
    cache = torch.full((2 * len(x), weight.shape[1] + 9, x.shape[2]), torch.nan, dtype=x.dtype)
    blocks = torch.tensor(data.draw(st.permutations(range(2 * len(x))))[: len(x)])
    _, inputs = causal_conv1d(x, weight, bias, window)
    cache[blocks, : inputs.shape[1] - 1] = inputs[:, 1:]
    more = x.flip(1)
    y, _ = causal_conv1d(more, weight, bias, windows_at(cache, blocks, accepted - 1, weight.shape[1] - 1))
    for row, count in enumerate(accepted.tolist()):
        expected, _ = plain(torch.cat([x[row, :count], more[row]]), weight, bias, window[row])
        assert_close(y[row], expected[count:], scale)


@given(problems(), st.integers(1, 4))
def test_chunks_carry_the_window(problem, chunk):
    """Also chunks shorter than the window, which keep a part of the old one."""
    x, weight, bias, window, _, scale = problem
    kernel, rows = weight.shape[1], torch.arange(len(x))
    expected, inputs = causal_conv1d(x, weight, bias, window)
    parts, carried = [], window
    for part in x.split(chunk, dim=1):
        y, some = causal_conv1d(part, weight, bias, carried)
        carried = windows_at(some, rows, torch.full_like(rows, part.shape[1]), kernel - 1)
        parts.append(y)
    assert_close(torch.cat(parts, 1), expected.double(), scale)
    assert torch.equal(carried, inputs[:, 1 - kernel :])

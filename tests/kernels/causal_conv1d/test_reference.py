"""The convolution against a loop over tokens in float64.

Tolerance: 1e-6 of max|pre-activation terms| in float32, where four products and sums of order one
err by a few 1e-7; 1e-14 in float64.
"""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.strategies import DrawFn

from hybrid_kv.kernels.causal_conv1d import causal_conv1d, windows_at
from tests.kernels.causal_conv1d.layer import convolve

Problem = tuple[torch.Tensor, torch.Tensor, torch.Tensor | None, torch.Tensor, list[int], float]

TOLERANCE = {torch.float32: 1e-6, torch.float64: 1e-14}


def plain(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, window: torch.Tensor
) -> tuple[torch.Tensor, list[torch.Tensor]]:
    """One row: y [len, channels], and the window before the first token and after each."""
    y, inputs = convolve(x, weight, bias, window)
    return y, [*inputs.unfold(0, weight.shape[1] - 1, 1).mT]


def assert_close(got: torch.Tensor, expected: torch.Tensor, scale: float) -> None:
    assert float((got.double() - expected).abs().max()) <= TOLERANCE[got.dtype] * scale


@st.composite
def problems(draw: DrawFn) -> Problem:
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
def test_equals_the_loop_with_the_window_at_any_offset(
    problem: Problem, data: st.DataObject
) -> None:
    x, weight, bias, window, lengths, scale = problem
    for row, length in enumerate(lengths):
        x[row, length:] = torch.nan
    y, inputs = causal_conv1d(x, weight, bias, window)
    wanted = [(row, offset) for row, length in enumerate(lengths) for offset in range(length + 1)]
    wanted = data.draw(st.permutations(wanted))
    rows, offsets = (torch.tensor(part) for part in zip(*wanted, strict=True))
    got = windows_at(inputs, rows, offsets, weight.shape[1] - 1)
    assert y.dtype == got.dtype == x.dtype
    loops = [
        plain(x[row, :length], weight, bias, window[row]) for row, length in enumerate(lengths)
    ]
    for row, length in enumerate(lengths):
        assert_close(y[row, :length], loops[row][0], scale)
    for (row, offset), one in zip(wanted, got, strict=True):
        assert torch.equal(one.double(), loops[row][1][offset])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_tokens_in_16_bits_are_convolved_alike_one_by_one_and_together(dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(0)
    x, weight, bias = (
        torch.randn(*shape, generator=generator).to(dtype) for shape in ((2, 9, 16), (16, 4), (16,))
    )
    window = torch.zeros(2, 3, 16, dtype=dtype)
    together, inputs = causal_conv1d(x, weight, bias, window)
    exact, _ = causal_conv1d(*(part.double() for part in (x, weight, bias, window)))
    assert together.dtype == inputs.dtype == dtype
    for t in range(x.shape[1]):
        one, inputs = causal_conv1d(x[:, t : t + 1], weight, bias, window)
        window = inputs[:, 1:]
        torch.testing.assert_close(one[:, 0], together[:, t], rtol=torch.finfo(dtype).eps, atol=0)
        torch.testing.assert_close(
            one[:, 0].double(), exact[:, t], rtol=torch.finfo(dtype).eps, atol=1e-6
        )

"""Recurrences, the convolution and the gated norm, over padded rows: what a layer runs on a CPU."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import nullcontext
from unittest.mock import Mock, patch

import numpy as np
import torch
import torch.nn.functional as F

from hybrid_kv.guard import definitions
from hybrid_kv.guard.definitions import Floats
from hybrid_kv.guard.kernel_cases.draw import Compared, Draw, longs, wide
from hybrid_kv.kernels.causal_conv1d import causal_conv1d, windows_at
from hybrid_kv.kernels.common.wanted import WantedStates
from hybrid_kv.kernels.gated_delta import gated_delta_chunk, gated_delta_update
from hybrid_kv.kernels.gated_delta import reference as delta
from hybrid_kv.kernels.gated_norm import gated_rms_norm_reference
from hybrid_kv.kernels.selective_scan import selective_scan, selective_scan_update
from hybrid_kv.kernels.ssd import chunk_scan, selective_state_update
from hybrid_kv.kernels.ssd import reference as ssd
from hybrid_kv.kernels.ssd.host import in_chunks

Operands = tuple[torch.Tensor, ...]
Results = tuple[torch.Tensor, torch.Tensor]


def mamba2(draw: Draw) -> Iterator[Compared]:
    """A few tokens, and many: in the compiled loop, where this machine takes it, and in chunks."""
    dtype = draw.one_of(torch.float32, torch.float64)
    lengths, chunk_size = _lengths(draw, 11), draw.number(2, 4)
    groups, head_dim, size = draw.numbers(1, 3, 3)
    shape, heads = (len(lengths), max(lengths)), groups * draw.number(1, 2)
    x, dt = draw.floats(*shape, heads, head_dim, dtype=dtype), 2 * draw.shares(*shape, heads, dtype=dtype)
    A, D = -0.01 - 3 * draw.shares(heads, dtype=dtype), draw.floats(heads, dtype=dtype)
    B, C = draw.floats(*shape, groups, size, dtype=dtype), draw.floats(*shape, groups, size, dtype=dtype)
    state = draw.floats(len(lengths), heads, head_dim, size, dtype=dtype)
    _pad(lengths, x, B, C)
    operands = x, dt, A, B, C, D
    expected = _by_row(definitions.mamba2, lengths, state, operands)
    yield from _few("selective_state_update", selective_state_update(state, *operands), lengths, expected)
    rows, offsets = draw.wanted(lengths, chunk_size)
    for way in nullcontext(), in_chunks():
        with way, patch.object(ssd, "WantedStates", wraps=WantedStates) as cut:
            results = chunk_scan(*operands, state, chunk_size, rows, offsets)
        yield from _many("chunk_scan", results, lengths, expected, rows, offsets)
        if cut.called:
            yield _chunks("chunk_scan", cut, lengths, chunk_size)


def mamba1(draw: Draw) -> Iterator[Compared]:
    lengths, chunk_size = _lengths(draw, 7), draw.number(1, 4)
    channels, size = draw.numbers(1, 3, 2)
    shape = len(lengths), max(lengths)
    x, dt = draw.floats(*shape, channels), 2 * draw.shares(*shape, channels)
    A, D = -3 * draw.shares(channels, size), draw.floats(channels)
    B, C, state = draw.floats(*shape, size), draw.floats(*shape, size), draw.floats(len(lengths), channels, size)
    _pad(lengths, x, B, C)
    operands = x, dt, A, B, C, D
    expected = _by_row(definitions.mamba1, lengths, state, operands)
    yield from _few("selective_scan_update", selective_scan_update(state, *operands), lengths, expected)
    rows, offsets = draw.wanted(lengths, chunk_size)
    results = selective_scan(*operands, state, rows, offsets, chunk_size)
    yield from _many("selective_scan", results, lengths, expected, rows, offsets)


def gated_delta(draw: Draw) -> Iterator[Compared]:
    """A decay for each head, or for each column of its state; those come in chunks of 8 tokens at most."""
    lengths, chunk_size = _lengths(draw, 20), draw.one_of(3, 16)
    heads, k_size, v_size = draw.numbers(1, 3, 3)
    shape = len(lengths), max(lengths), heads
    q, k = (F.normalize(draw.floats(*shape, k_size), dim=-1) for _ in "qk")
    v, beta = draw.floats(*shape, v_size), 2 * draw.shares(*shape)
    g = -draw.one_of(0.1, 5.0) * (draw.shares(*shape, k_size) if draw.chance() else draw.shares(*shape))
    state = draw.floats(len(lengths), heads, v_size, k_size)
    _pad(lengths, v)
    operands = q, k, v, g, beta
    expected = _by_row(definitions.gated_delta, lengths, state, operands)
    few = min(3, max(lengths))
    results = gated_delta_update(state, *(part[:, :few] for part in operands))
    yield from _few("gated_delta_update", results, [min(length, few) for length in lengths], expected)
    rows, offsets = draw.wanted(lengths, min(chunk_size, 8))
    with patch.object(delta, "WantedStates", wraps=WantedStates) as cut:
        results = gated_delta_chunk(*operands, state, chunk_size, rows, offsets)
    yield from _many("gated_delta_chunk", results, lengths, expected, rows, offsets)
    yield _chunks("gated_delta_chunk", cut, lengths, min(chunk_size, 8) if g.dim() == 4 else chunk_size)


def convolution(draw: Draw) -> Iterator[Compared]:
    """Of one token a row, and of more; the window after any number of them."""
    length, kernel, rows = draw.one_of(1, draw.number(2, 6)), draw.one_of(2, 4), draw.number(1, 3)
    channels, silu = draw.number(1, 4), draw.chance()
    x, window = draw.floats(rows, length, channels), draw.floats(rows, kernel - 1, channels)
    weight, bias = draw.floats(channels, kernel), draw.floats(channels) if draw.chance() else None
    y, inputs = causal_conv1d(x, weight, bias, window, silu)
    wide_bias = None if bias is None else wide(bias)
    for row in range(rows):
        expected, expected_inputs = definitions.causal_conv1d(
            wide(window[row]), wide(x[row]), wide(weight), wide_bias, silu
        )
        yield "causal_conv1d", y[row], expected
        for first in range(length + 1):
            got = windows_at(inputs, longs([row]), longs([first]), kernel - 1)[0]
            yield "windows_at", got, expected_inputs[first : first + kernel - 1]
    everywhere = torch.arange(rows)
    yield "windows_at", windows_at(window, everywhere, torch.zeros_like(everywhere), kernel - 1), wide(window)


def gated_norm(draw: Draw) -> Iterator[Compared]:
    groups, eps, dtype = draw.number(1, 3), draw.one_of(1e-6, 0.5), draw.one_of(torch.float32, torch.bfloat16)
    channels = groups * draw.number(1, 5)
    x, gate = draw.floats(3, channels, dtype=torch.float32), draw.floats(3, channels, dtype=dtype)
    weight = draw.floats(channels, dtype=torch.float32)
    got = gated_rms_norm_reference(x, gate, weight, groups, eps)
    yield "gated_rms_norm", got, definitions.gated_rms_norm(wide(x), wide(gate), wide(weight), groups, eps)


def _chunks(name: str, cut: Mock, lengths: list[int], chunk_size: int) -> Compared:
    """Others change no value, only how long it takes."""
    taken, may_be = cut.call_args.args[2], definitions.chunks(max(lengths), chunk_size)
    return f"{name}, chunks of {taken}", torch.tensor(taken in may_be), np.array(True)


def _lengths(draw: Draw, most: int) -> list[int]:
    return [draw.number(1, most), *(draw.one_of(1, draw.number(1, most)) for _ in range(draw.number(0, 2)))]


def _pad(lengths: list[int], *parts: torch.Tensor) -> None:
    """Behind a row's last token may stand anything finite."""
    for part in parts:
        for row, length in enumerate(lengths):
            part[row, length:] = 1e6


def _by_row(
    definition: Callable[..., tuple[Floats, Floats]], lengths: list[int], state: torch.Tensor, operands: Operands
) -> list[tuple[Floats, Floats]]:
    """Of each row's own tokens. What has tokens has three dimensions or more; parameters have fewer."""
    return [
        definition(wide(state[row]), *(wide(part[row, :length] if part.dim() > 2 else part) for part in operands))
        for row, length in enumerate(lengths)
    ]


def _few(name: str, results: Results, lengths: list[int], expected: list[tuple[Floats, Floats]]) -> Iterator[Compared]:
    y, states = results
    for row, length in enumerate(lengths):
        yield name, y[row, :length], expected[row][0][:length]
        yield f"{name}, states", states[row, :length], expected[row][1][:length]


def _many(
    name: str,
    results: Results,
    lengths: list[int],
    expected: list[tuple[Floats, Floats]],
    rows: torch.Tensor,
    offsets: torch.Tensor,
) -> Iterator[Compared]:
    y, states = results
    for row, length in enumerate(lengths):
        yield name, y[row, :length], expected[row][0]
    wanted = [expected[row][1][n - 1] for row, n in zip(rows.tolist(), offsets.tolist(), strict=True)]
    yield f"{name}, wanted states", states, np.array(wanted).reshape(len(wanted), *expected[0][1].shape[1:])


CASES = (mamba2, mamba1, gated_delta, convolution, gated_norm)

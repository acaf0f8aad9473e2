"""References of kernels that read and write states and windows in blocks: a verify step, and a prefill.

The pool holds NaN wherever nobody may read: an operation that reads there, or writes elsewhere, is seen.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import torch

from hybrid_kv.guard import definitions
from hybrid_kv.guard.definitions import Floats
from hybrid_kv.guard.kernel_cases.draw import Compared, Draw, longs, own_tokens, starts, wide
from hybrid_kv.kernels.causal_conv1d import causal_conv1d_prefill_reference, causal_conv1d_update_reference
from hybrid_kv.kernels.ssd import chunk_scan_prefill_reference, selective_state_update_slots_reference

NOBODY = 2  # tokens behind those of all rows


@dataclass
class Mamba2:
    """Flat operands of a layer, of no row at their end, and its states in a pool; float32."""

    state: torch.Tensor
    x: torch.Tensor
    dt: torch.Tensor
    dt_bias: torch.Tensor
    A_log: torch.Tensor
    B: torch.Tensor
    C: torch.Tensor
    D: torch.Tensor

    @classmethod
    def drawn(cls, draw: Draw, tokens: int, num_blocks: int) -> Mamba2:
        groups, head_dim, size = draw.numbers(1, 2, 3)
        heads, single = groups * draw.number(1, 2), torch.float32
        x, dt = (draw.floats(tokens + NOBODY, *shape, dtype=single) for shape in ((heads, head_dim), (heads,)))
        B, C = (draw.floats(tokens + NOBODY, groups, size, dtype=single) for _ in "BC")
        for part in x, dt, B, C:
            part[tokens:] = torch.nan
        dt_bias, A_log, D = (draw.floats(heads, dtype=single) for _ in range(3))
        return cls(draw.pool(num_blocks, heads, head_dim, size, dtype=single), x, dt, dt_bias, A_log, B, C, D)

    def expected(self, state: Floats, own: slice) -> tuple[Floats, Floats]:
        """What the definition makes of a row's tokens."""
        dt = definitions.softplus(wide(self.dt[own]) + wide(self.dt_bias))
        x, B, C = (wide(part[own]) for part in (self.x, self.B, self.C))
        return definitions.mamba2(state, x, dt, -np.exp(wide(self.A_log)), B, C, wide(self.D))


@dataclass
class Convolution:
    """Flat inputs of a layer, of no row at their end, and its windows in a pool of either dtype."""

    conv_state: torch.Tensor
    x: torch.Tensor
    weight: torch.Tensor
    bias: torch.Tensor | None

    @classmethod
    def drawn(cls, draw: Draw, tokens: int, num_blocks: int, more_rows: int) -> Convolution:
        kernel, channels, single = draw.one_of(2, 4), draw.number(1, 3), torch.float32
        stored = draw.one_of(torch.float32, torch.bfloat16)
        x = draw.floats(tokens + NOBODY, channels, dtype=single)
        x[tokens:] = torch.nan
        return cls(
            draw.pool(num_blocks, kernel - 1 + more_rows, channels, dtype=stored),
            x,
            draw.floats(channels, kernel, dtype=single),
            draw.floats(channels, dtype=single) if draw.chance() else None,
        )

    @property
    def size(self) -> int:
        return self.weight.shape[1] - 1

    def expected(self, window: Floats, own: slice) -> tuple[Floats, Floats]:
        bias = None if self.bias is None else wide(self.bias)
        return definitions.causal_conv1d(window, wide(self.x[own]), wide(self.weight), bias)


def state_update_slots(draw: Draw) -> Iterator[Compared]:
    columns = draw.number(1, 4)
    lengths = draw.numbers(0, columns, draw.number(1, 4))
    blocks = draw.blocks((columns + 1) * len(lengths))
    layer = Mamba2.drawn(draw, sum(lengths), 1 + len(blocks))
    targets = [[draw.one_of(0, *[blocks.pop()] * 4) for _ in range(columns)] for _ in lengths]
    # Nobody's block, the one that the row writes first, or one of its own.
    sources = [draw.one_of(0, row[0], blocks.pop()) for row in targets]
    _fill(layer.state, sources, draw)
    outputs, pool = np.zeros(layer.x.shape), wide(layer.state)
    for source, row, own in zip(sources, targets, own_tokens(lengths), strict=True):
        outputs[own], states = layer.expected(_read(layer.state, source), own)
        for block, state in zip(row, states, strict=False):
            if block:
                pool[block] = state
    y = selective_state_update_slots_reference(
        **vars(layer),
        cu_seqlens=torch.tensor(starts(lengths)),
        source_indices=longs(sources),
        state_indices=longs(targets),
    )
    yield "selective_state_update_slots", y, outputs
    yield "selective_state_update_slots, blocks", layer.state, pool


def scan_prefill(draw: Draw) -> Iterator[Compared]:
    lengths = [draw.one_of(0, 1, draw.number(2, 40)) for _ in range(draw.number(1, 3))]
    blocks = draw.blocks(10 * len(lengths))
    layer = Mamba2.drawn(draw, sum(lengths), 1 + len(blocks))
    sources = [draw.one_of(-1, 0, *[blocks.pop()] * 4) for _ in lengths]
    spans, kept = draw.spans(lengths, blocks)
    has_state = [draw.number(0, 3) > 0 for _ in lengths]
    _fill(layer.state, sources, draw)
    outputs, pool = np.zeros(layer.x.shape), wide(layer.state)
    for row, own in enumerate(own_tokens(lengths)):
        outputs[own], states = layer.expected(_read(layer.state, sources[row] * has_state[row]), own)
        for offset, block in kept[row]:
            if block > 0:
                pool[block] = states[offset - 1]
    y = chunk_scan_prefill_reference(
        **vars(layer), spans=spans, source_indices=longs(sources), has_initial_state=torch.tensor(has_state)
    )
    yield "chunk_scan_prefill", y, outputs
    yield "chunk_scan_prefill, blocks", layer.state, pool


def convolution_update(draw: Draw) -> Iterator[Compared]:
    columns = draw.number(1, 4)
    lengths = draw.numbers(0, columns, draw.number(1, 4))
    blocks = draw.blocks((columns + 1) * len(lengths))
    layer = Convolution.drawn(draw, sum(lengths), 1 + len(blocks), columns - 1)
    # The window goes into the first one alone.
    targets = [[draw.one_of(0, *[blocks.pop()] * 4) for _ in range(columns)] for _ in lengths]
    sources = [draw.one_of(0, row[0], blocks.pop()) for row in targets]
    first = draw.numbers(0, columns - 1, len(lengths))
    _fill(layer.conv_state, sources, draw, first, layer.size)
    outputs, pool = np.zeros(layer.x.shape), wide(layer.conv_state)
    for row, own in enumerate(own_tokens(lengths)):
        window = _read(layer.conv_state[:, first[row] : first[row] + layer.size], sources[row])
        outputs[own], inputs = layer.expected(window, own)
        if targets[row][0] and lengths[row]:
            pool[targets[row][0], : len(inputs) - 1] = inputs[1:]
    y = causal_conv1d_update_reference(
        **vars(layer),
        cu_seqlens=torch.tensor(starts(lengths)),
        window_indices=longs(sources),
        window_rows=longs(first),
        state_indices=longs(targets),
    )
    yield "causal_conv1d_update", y, outputs
    yield "causal_conv1d_update, blocks", layer.conv_state, pool


def convolution_prefill(draw: Draw) -> Iterator[Compared]:
    lengths = [draw.one_of(0, 1, draw.number(2, 20)) for _ in range(draw.number(1, 3))]
    blocks = draw.blocks(10 * len(lengths))
    more_rows = draw.number(0, 2)
    layer = Convolution.drawn(draw, sum(lengths), 1 + len(blocks), more_rows)
    sources = [draw.one_of(-1, 0, *[blocks.pop()] * 4) for _ in lengths]
    spans, kept = draw.spans(lengths, blocks)
    has_state, first = [draw.number(0, 3) > 0 for _ in lengths], draw.numbers(0, more_rows, len(lengths))
    _fill(layer.conv_state, sources, draw, first, layer.size)
    outputs, pool = np.zeros(layer.x.shape), wide(layer.conv_state)
    for row, own in enumerate(own_tokens(lengths)):
        window = _read(layer.conv_state[:, first[row] : first[row] + layer.size], sources[row] * has_state[row])
        outputs[own], inputs = layer.expected(window, own)
        for offset, block in kept[row]:
            if block > 0:
                pool[block, : layer.size] = inputs[offset : offset + layer.size]
    y = causal_conv1d_prefill_reference(
        **vars(layer),
        spans=spans,
        window_indices=longs(sources),
        window_rows=longs(first),
        has_initial_state=torch.tensor(has_state),
    )
    yield "causal_conv1d_prefill", y, outputs
    yield "causal_conv1d_prefill, blocks", layer.conv_state, pool


def _fill(pool: torch.Tensor, sources: list[int], draw: Draw, first: list[int] | None = None, size: int = 0) -> None:
    """Give each row's source something to read: all of a block, or of each `size` rows from `first` on."""
    for row, source in enumerate(sources):
        if source > 0:
            part = pool[source] if first is None else pool[source, first[row] : first[row] + size]
            part.copy_(draw.floats(*part.shape))


def _read(pool: torch.Tensor, source: int) -> Floats:
    """What is in a block; zeros for the null block and negative ids."""
    return wide(pool[source]) if source > 0 else np.zeros(pool.shape[1:])


CASES = (state_update_slots, scan_prefill, convolution_update, convolution_prefill)

"""A Mamba-2 layer as registers: a head is written, or kept, as bits of the token say.

A head that is written forgets all it had (decay exp(-1024) = 0) and holds a word of bits of the
last tokens; one that is kept decays by exp(0) = 1.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from hybrid_kv.models.exact_weights.design import (
    CHANNELS,
    NUM_ADDRESSES,
    SATURATED,
    WIDTH,
    Choices,
    spread,
)

UNIT = 64.0  # of what passes a SiLU: the identity from here on
CONSTANT = 2.0**31  # squared by its gate, it decides the gated norm alone
PER_CONSTANT = 256  # channels of all heads: a power of 4, so that the root mean square is exact
# Of heads: each token writes one of them, as a bit says. If the next token writes the other one,
# what the last one wrote is still there.
NUM_PAIRS = 6
NUM_CONDITIONS = (2, 3, 5)  # of the heads after the pairs; each bit halves how often one is written


@dataclass(frozen=True)
class Mamba2Shape:
    """Sizes of a layer: `num_heads` of `head_dim` channels, their `state`, `taps` of the window."""

    num_heads: int
    head_dim: int
    state: int
    taps: int

    @property
    def inner(self) -> int:
        """Channels of all heads."""
        return self.num_heads * self.head_dim

    @property
    def num_constants(self) -> int:
        """Channels that decide the gated norm: their mean square is CONSTANT^4 / PER_CONSTANT."""
        return self.inner // PER_CONSTANT


class _Layer:
    """Tensors that are filled row by row, by their names below `mamba.`."""

    def __init__(self, shape: Mamba2Shape) -> None:
        self.shape = shape
        inner = shape.inner
        state = shape.state
        heads = shape.num_heads
        self.z = 0
        self.x = inner
        self.b = 2 * inner
        self.c = 2 * inner + state
        self.dt = 2 * inner + 2 * state
        self.projection = torch.zeros(self.dt + heads, WIDTH)
        self.window = torch.zeros(inner + 2 * state, 1, shape.taps)
        self.window[:, 0, -1] = 1.0
        self.norm = torch.full((inner,), 2.0**24)
        self.a_log = torch.zeros(heads)
        self.d = torch.zeros(heads)


def mamba2(shape: Mamba2Shape, is_first: bool, draw: Choices) -> dict[str, torch.Tensor]:
    """Return the tensors of a layer, by their names below `mamba.`.

    Args:
        is_first: of the model: it marks the first token.
    """
    layer = _Layer(shape)
    layer.projection[: shape.inner, CHANNELS.one] = UNIT
    _addresses(layer)
    _constant(layer)
    conditions = _conditions(draw)
    for head in range(1, shape.num_heads):
        _register(layer, head, conditions[head - 1], draw)
    out = spread(shape.inner, draw)
    out[:, : shape.head_dim] = 0.0
    if is_first:
        out[CHANNELS.first, shape.num_constants] = 1.0
    return {
        "in_proj.weight": layer.projection,
        "conv1d.weight": layer.window,
        "conv1d.bias": torch.zeros(len(layer.window)),
        "norm.weight": layer.norm,
        "A_log": layer.a_log,
        "D": layer.d,
        "dt_bias": torch.zeros(shape.num_heads),
        "out_proj.weight": out,
    }


def _addresses(layer: _Layer) -> None:
    """Make B one-hot, by the token before; C reads all addresses but two, by the current token."""
    for n in range(layer.shape.state):
        address = CHANNELS.address + n % NUM_ADDRESSES
        layer.projection[layer.b + n, address] = UNIT
        layer.projection[layer.c + n, CHANNELS.address : CHANNELS.address + NUM_ADDRESSES] = UNIT
        for distance in (1, 5):
            unread = CHANNELS.address + (n + distance) % NUM_ADDRESSES
            layer.projection[layer.c + n, unread] = 0.0
    window = layer.window[layer.shape.inner : layer.shape.inner + layer.shape.state, 0]
    window[:] = 0.0
    window[:, -2] = 1.0


def _constant(layer: _Layer) -> None:
    """Make head 0: some channels decide the gated norm, the next is 1 at the first token.

    It has no state.
    """
    first = layer.shape.num_constants
    layer.d[0] = 1.0
    layer.projection[layer.dt, CHANNELS.one] = -SATURATED
    for channel in range(first):
        layer.projection[layer.x + channel, CHANNELS.one] = CONSTANT
        layer.projection[layer.z + channel, CHANNELS.one] = CONSTANT
        layer.norm[channel] = 0.0
    layer.projection[layer.x + first, CHANNELS.one] = UNIT
    layer.window[first, 0, -2:] = torch.tensor([-1.0, 1.0])
    layer.norm[first] = 2.0**46


def _conditions(draw: Choices) -> list[dict[int, float]]:
    """Return the bits that each head but the first is written at, by channel."""
    conditions = [{channel: sign} for channel in draw.sources(NUM_PAIRS) for sign in (1.0, -1.0)]
    for count in NUM_CONDITIONS:
        conditions.append({channel: draw.sign() for channel in draw.sources(count)})
    return conditions


def _register(layer: _Layer, head: int, condition: dict[int, float], draw: Choices) -> None:
    """Let a head be written where some bits are right, with a word of bits of the window."""
    shape = layer.shape
    row = layer.dt + head
    layer.projection[row, CHANNELS.one] = SATURATED * (1 - len(condition))
    for channel, sign in condition.items():
        layer.projection[row, channel] = SATURATED * sign
    for channel in range(head * shape.head_dim, (head + 1) * shape.head_dim):
        layer.projection[layer.x + channel, CHANNELS.one] = UNIT / 2
        layer.projection[layer.x + channel, draw.source()] = UNIT / 2 * draw.sign()
        layer.window[channel, 0] = 0.0
        layer.window[channel, 0, draw.below(shape.taps)] = 1.0

"""A gated delta net as a memory.

A one-hot key is a place, and the delta rule replaces what lies there.

beta is 0 or 1, as bits of the token say; the decay is 1, or 0 to clear a head. The L2 norm of a
one-hot key or query is exact, the triangular system of a chunk holds 0 and 1 alone.
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
CONSTANT = 2.0**31  # of a value: it decides the gated norm of its head alone
KEY = 2.0**20  # squared, it makes the eps of the L2 norm vanish
# Places that a key head writes to, in turn; a head of one is a register.
NUM_PLACES = (1, 1, 1, 4)
# Value heads of a group: each token writes one of them, as two bits say. Most next tokens write
# another one, so that what the last one wrote is still there.
NUM_GROUPED = 4


@dataclass(frozen=True)
class DeltaNetShape:
    """Sizes of a layer; `key_dim` is a power of 4, so that its root divides queries exactly."""

    num_key_heads: int
    num_value_heads: int
    key_dim: int
    value_dim: int
    taps: int


def delta_net(shape: DeltaNetShape, is_first: bool, draw: Choices) -> dict[str, torch.Tensor]:
    """Return the tensors of a layer, by their names below `linear_attn.`.

    Args:
        is_first: of the model: it marks the first token.
    """
    keys = shape.num_key_heads * shape.key_dim
    values = shape.num_value_heads * shape.value_dim
    projection = torch.zeros(2 * keys + values, WIDTH)
    window = torch.zeros(2 * keys + values, 1, shape.taps)
    for head in range(shape.num_key_heads):
        _key_head(shape, head, projection, window, draw)
    for row in range(2 * keys, 2 * keys + values):
        projection[row, CHANNELS.one] = UNIT / 2
        projection[row, draw.source()] = UNIT / 2 * draw.sign()
        window[row, 0, draw.below(shape.taps)] = 1.0
    beta = torch.zeros(shape.num_value_heads, WIDTH)
    decay = torch.zeros(shape.num_value_heads, WIDTH)
    out = spread(values, draw)
    for head, condition in enumerate(_conditions(shape.num_value_heads, draw)):
        _constant(2 * keys + head * shape.value_dim, projection, window)
        out[:, head * shape.value_dim] = 0.0
        _write(beta[head], {} if is_first and head == 0 else condition)
        decay[head, CHANNELS.one] = -SATURATED
        if head % 8 == 5:
            _clear(decay[head], draw)
    if is_first:
        _mark_first(2 * keys + 1, projection, window)
        out[:, 1] = 0.0
        out[CHANNELS.first, 1] = 1.0
    gate = torch.zeros(values, WIDTH)
    gate[:, CHANNELS.one] = UNIT
    return {
        "in_proj_qkv.weight": projection,
        "in_proj_z.weight": gate,
        "in_proj_b.weight": beta,
        "in_proj_a.weight": decay,
        "conv1d.weight": window,
        "A_log": torch.zeros(shape.num_value_heads),
        "dt_bias": torch.zeros(shape.num_value_heads),
        "norm.weight": _norm(shape),
        "out_proj.weight": out,
    }


def _key_head(
    shape: DeltaNetShape, head: int, projection: torch.Tensor, window: torch.Tensor, draw: Choices
) -> None:
    """Make queries and keys one-hot, by the address of a token of the window."""
    num_places = NUM_PLACES[head % len(NUM_PLACES)]
    for begin in (0, shape.num_key_heads * shape.key_dim):
        rows = range(begin + head * shape.key_dim, begin + (head + 1) * shape.key_dim)
        tap = -1 if num_places == 1 else -1 - draw.below(2)
        for row in rows:
            window[row, 0, tap] = 1.0
        for address, place in enumerate(draw.order(NUM_ADDRESSES)):
            projection[rows[place % num_places], CHANNELS.address + address] = KEY


def _constant(row: int, projection: torch.Tensor, window: torch.Tensor) -> None:
    """Make a channel of a value decide the gated norm of its head."""
    projection[row] = 0.0
    window[row] = 0.0
    projection[row, CHANNELS.one] = CONSTANT
    window[row, 0, -1] = 1.0


def _mark_first(row: int, projection: torch.Tensor, window: torch.Tensor) -> None:
    """Make a channel of a value 1 at the first token of a text: the window before it is zero."""
    projection[row] = 0.0
    window[row] = 0.0
    projection[row, CHANNELS.one] = UNIT
    window[row, 0, -2:] = torch.tensor([-1.0, 1.0])


def _conditions(num_heads: int, draw: Choices) -> list[dict[int, float]]:
    """Return the bits that each value head is written at, by channel."""
    conditions = list[dict[int, float]]()
    for _ in range(num_heads // NUM_GROUPED):
        first, second = draw.sources(2)
        conditions += [{first: a, second: b} for a in (1.0, -1.0) for b in (1.0, -1.0)]
    return conditions


def _write(row: torch.Tensor, condition: dict[int, float]) -> None:
    """Make the sigmoid 1 if a condition holds, else 0; always 1 if it is empty."""
    row[CHANNELS.one] = SATURATED * (1 - len(condition))
    for channel, sign in condition.items():
        row[channel] = SATURATED * sign


def _clear(row: torch.Tensor, draw: Choices) -> None:
    """Let a quarter of the tokens clear the head: the softplus is large for them, else 0."""
    row[CHANNELS.one] = -SATURATED
    for channel in draw.sources(2):
        row[channel] = SATURATED * draw.sign()


def _norm(shape: DeltaNetShape) -> torch.Tensor:
    """[value_dim] weight that makes 1 of a bit.

    The root mean square is CONSTANT / sqrt(key_dim * value_dim).
    """
    scale = CONSTANT / (UNIT * UNIT * shape.value_dim**0.5)
    weight = torch.full((shape.value_dim,), scale)
    weight[0] = 0.0
    return weight

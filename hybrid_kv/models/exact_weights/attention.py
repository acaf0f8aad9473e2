"""Hard attention: each head reads exactly one token.

Pairs of rotated channels form a peak of the score between two neighbouring tokens; a bit of each
key decides between them. Where the text is too short for a
distance, the first token is read. Scores are rounded, and may be: the best one is ahead by more
than softmax can represent, so that each weight is 0 or 1.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

from hybrid_kv.models.exact_weights.design import (
    CHANNELS,
    NUM_BITS,
    NUM_FACTS,
    SATURATED,
    WIDTH,
    Choices,
    spread,
)

NUM_PAIRS = 7  # of rotated channels that are used
PEAK = 0.3  # of the way from the nearer to the farther of two tokens
FADING = 0.8  # of a pair's weight, to the one before it
KEY_WEIGHT = 0.22  # of the key's bit in a score
# Of the score's peak: that of the first token, which is read where the text is too short. With both
# bits against it and the first token's for that one, the peak is above.
SINK = 0.86
QUERY_SCALE = 2.0**10
KEY_SCALE = 2.0**8
NUM_VALUES = 32  # channels of a value that are used
PAGE = 16  # tokens: a step that depends on the cache reads one token of each of the last pages
STEP = PAGE - 1  # tokens between two aims: their neighbours, too, are never more than a page apart
FAR_STEP = 40  # tokens between what is read now and then, up to 1,890 away in the third layer


@dataclass(frozen=True)
class AttentionShape:
    """Sizes of an attention layer.

    Attributes:
        num_heads, num_kv_heads, head_dim: as in a config.
        num_rotated: channels of a head that are rotated, in pairs (i, i + num_rotated / 2).
        base: of the angles: pair i turns by base^(-2i / num_rotated) a token.
        has_gate: the output is multiplied by a sigmoid; each head's gate is after its query.
        has_norms: queries and keys are normed.
    """

    num_heads: int
    num_kv_heads: int
    head_dim: int
    num_rotated: int
    base: float
    has_gate: bool = False
    has_norms: bool = False

    @property
    def free(self) -> int:
        """The first of two neighbouring channels of a head that (nearly) do not turn."""
        if self.num_rotated < self.head_dim:
            return self.num_rotated
        return self.num_rotated // 2 - 2


@dataclass(frozen=True)
class AttentionWeights:
    """Projections: [rows, WIDTH] of `q`, `k`, `v`, and [WIDTH, rows] of `o`."""

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    o: torch.Tensor


@dataclass(frozen=True)
class Aim:
    """The token that a head reads: at a distance, or its neighbour, as a bit of their keys says.

    Attributes:
        near: tokens before the current one.
        far: the same where the current token has a settled successor, so that nothing depends on
            what is read.
        is_plain: the token at the distance itself, whatever the keys say.
    """

    near: int
    far: int
    is_plain: bool = False


def aims(layer: int, num_heads: int) -> list[Aim]:
    """Return the aims of a layer's heads: the last two tokens, then each of the last pages."""
    last_two = [Aim(distance, distance, is_plain=True) for distance in (1, 2)]
    num_pages = num_heads - len(last_two)
    return last_two + [
        Aim(STEP * (1 + page) - 1, STEP * num_pages + FAR_STEP * (1 + layer * num_pages + page))
        for page in range(num_pages)
    ]


def attention(shape: AttentionShape, layer: int, draw: Choices) -> AttentionWeights:
    """Return the weights of attention layer `layer`, counted from 0."""
    queries = [_query(shape, aim, draw) for aim in aims(layer, shape.num_heads)]
    keys = [_key(shape, draw) for _ in range(shape.num_kv_heads)]
    values = [_value(shape, draw) for _ in range(shape.num_kv_heads)]
    query_scale = 1.0 if shape.has_norms else QUERY_SCALE
    key_scale = 1.0 if shape.has_norms else KEY_SCALE
    rows = []
    for query in queries:
        rows.append(query_scale * query)
        if shape.has_gate:
            rows.append(_open_gate(shape))
    return AttentionWeights(
        q=torch.cat(rows).bfloat16().float(),
        k=(key_scale * torch.cat(keys)).bfloat16().float(),
        v=torch.cat(values),
        o=spread(shape.num_heads * shape.head_dim, draw),
    )


def query_norm(shape: AttentionShape) -> torch.Tensor:
    """[head_dim] weight of the norm of queries."""
    return torch.full((shape.head_dim,), QUERY_SCALE)


def key_norm(shape: AttentionShape) -> torch.Tensor:
    """[head_dim] weight of the norm of keys."""
    return torch.full((shape.head_dim,), KEY_SCALE)


def _query(shape: AttentionShape, aim: Aim, draw: Choices) -> torch.Tensor:
    """[head_dim, WIDTH]."""
    query = torch.zeros(shape.head_dim, WIDTH)
    half = shape.num_rotated // 2
    near = aim.near + PEAK
    far = aim.far + PEAK
    for i in range(NUM_PAIRS):
        weight = FADING**i
        turn = -_frequency(shape, i)
        for row, wave in ((i, math.cos), (half + i, math.sin)):
            query[row, CHANNELS.one] = weight * wave(turn * near)
            query[row, CHANNELS.settled] = weight * (wave(turn * far) - wave(turn * near))
    peak = sum(FADING**i * math.cos(PEAK * _frequency(shape, i)) for i in range(NUM_PAIRS))
    query[shape.free, CHANNELS.one] = SINK * peak / math.sqrt(NUM_PAIRS)
    query[shape.free + 1, draw.source()] = 0.0 if aim.is_plain else KEY_WEIGHT
    return query


def _key(shape: AttentionShape, draw: Choices) -> torch.Tensor:
    """[head_dim, WIDTH]: the same of every token but for a bit.

    The first token's has no position.
    """
    key = torch.zeros(shape.head_dim, WIDTH)
    key[:NUM_PAIRS, CHANNELS.one] = 1.0
    key[:NUM_PAIRS, CHANNELS.first] = -1.0
    # As long as the other keys, which a norm divides by
    key[shape.free, CHANNELS.first] = math.sqrt(NUM_PAIRS)
    key[shape.free + 1, draw.source()] = 1.0
    return key


def _value(shape: AttentionShape, draw: Choices) -> torch.Tensor:
    """[head_dim, WIDTH]: the word and some facts."""
    value = torch.zeros(shape.head_dim, WIDTH)
    channels = [CHANNELS.bit + i for i in range(NUM_BITS)]
    channels += [CHANNELS.fact + i for i in draw.order(NUM_FACTS)]
    for row, channel in enumerate(channels[: min(shape.head_dim, NUM_VALUES)]):
        value[row, channel] = 1.0
    return value


def _open_gate(shape: AttentionShape) -> torch.Tensor:
    """[head_dim, WIDTH]: the sigmoid is 1."""
    gate = torch.zeros(shape.head_dim, WIDTH)
    gate[:, CHANNELS.one] = SATURATED
    return gate


def _frequency(shape: AttentionShape, pair: int) -> float:
    """Radians a token that a pair turns by."""
    return shape.base ** (-2 * pair / shape.num_rotated)

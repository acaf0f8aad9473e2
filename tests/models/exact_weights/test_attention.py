"""The best score leads by more than softmax in float64 can represent, at the aim of each head."""

from __future__ import annotations

import math

import pytest
import torch

from hybrid_kv.models.exact_weights.attention import AttentionShape, aims, attention
from hybrid_kv.models.exact_weights.design import CHANNELS, WIDTH, Choices
from hybrid_kv.models.exact_weights.families import BASE

LENGTH = 2048
SHAPES = [AttentionShape(16, 2, 32, 32, BASE**2), AttentionShape(16, 2, 64, 16, BASE)]


def rotated(heads: torch.Tensor, shape: AttentionShape, positions: torch.Tensor) -> torch.Tensor:
    """[n, tokens, head_dim], each token turned by its position."""
    half = shape.num_rotated // 2
    angles = positions[:, None] * shape.base ** (
        -2 * torch.arange(half).double() / shape.num_rotated
    )
    first, second = heads[..., :half], heads[..., half : 2 * half]
    cos, sin = angles.cos(), angles.sin()
    return torch.cat(
        [first * cos - second * sin, second * cos + first * sin, heads[..., 2 * half :]], -1
    )


def drawn_text(draw: Choices) -> torch.Tensor:
    """[tokens, WIDTH] hidden states of a text, as a layer of attention reads them."""
    hidden = draw.signs(LENGTH, WIDTH).double()
    hidden[:, CHANNELS.one], hidden[:, CHANNELS.first] = 1.0, 0.0
    hidden[:, CHANNELS.settled] = (1.0 + draw.signs(LENGTH).double()) / 2
    hidden[0, CHANNELS.first] = 1.0
    return hidden


def scores_of(
    shape: AttentionShape, layer: int, draw: Choices, hidden: torch.Tensor
) -> torch.Tensor:
    """[heads, tokens, tokens] scores of all queries and of the keys up to their own."""
    made = attention(shape, layer, draw)
    positions = torch.arange(LENGTH).double()
    keys = (hidden @ made.k.double().T).view(LENGTH, -1, shape.head_dim).transpose(0, 1)
    queries = (hidden @ made.q.double().T).view(LENGTH, -1, shape.head_dim).transpose(0, 1)
    keys, queries = rotated(keys, shape, positions), rotated(queries, shape, positions)
    keys = keys.repeat_interleave(shape.num_heads // shape.num_kv_heads, 0)
    causal = torch.full((LENGTH, LENGTH), -math.inf).double().triu(1)
    return queries @ keys.mT / math.sqrt(shape.head_dim) + causal


@pytest.mark.parametrize("layer", [0, 1, 2])
@pytest.mark.parametrize("shape", SHAPES)
def test_the_best_score_is_ahead(shape: AttentionShape, layer: int) -> None:
    draw = Choices(layer)
    for scores in scores_of(shape, layer, draw, drawn_text(draw)):
        best = scores[1:].topk(2).values
        assert float((best[:, 0] - best[:, 1]).min()) > 746


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("shape", SHAPES)
def test_a_head_reads_a_token_at_its_aim(shape: AttentionShape, seed: int) -> None:
    # With the first token's bit for it and both neighbours' against them, too.
    draw = Choices(seed)
    hidden = drawn_text(draw)
    hidden[:, CHANNELS.settled] = 0.0
    scores = scores_of(shape, 1, draw, hidden)
    for aim, head in zip(aims(1, shape.num_heads), scores, strict=True):
        positions = torch.arange(aim.near + 2, LENGTH)
        distances = positions - head[positions].argmax(-1)
        assert set(distances.tolist()) <= {aim.near, aim.near + (not aim.is_plain)}

"""The best score leads by more than softmax in float64 can represent, for every query."""

import math

import pytest
import torch

from hybrid_kv.models.exact_weights.attention import AttentionShape, attention
from hybrid_kv.models.exact_weights.design import CHANNELS, WIDTH, Choices
from hybrid_kv.models.exact_weights.families import BASE

LENGTH = 2048


def rotated(heads, shape, positions):
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


@pytest.mark.parametrize("layer", [0, 1, 2])
@pytest.mark.parametrize(
    "shape", [AttentionShape(16, 2, 32, 32, BASE**2), AttentionShape(16, 2, 64, 16, BASE)]
)
def test_the_best_score_is_ahead(shape, layer):
    draw = Choices(layer)
    made = attention(shape, layer, draw)
    hidden = draw.signs(LENGTH, WIDTH).double()
    hidden[:, CHANNELS.one], hidden[:, CHANNELS.first] = 1.0, 0.0
    hidden[:, CHANNELS.settled] = (1.0 + draw.signs(LENGTH).double()) / 2
    hidden[0, CHANNELS.first] = 1.0
    size, positions = shape.head_dim, torch.arange(LENGTH).double()
    keys = (hidden @ made.k.double().T).view(LENGTH, -1, size).transpose(0, 1)
    queries = (hidden @ made.q.double().T).view(LENGTH, -1, size).transpose(0, 1)
    keys, queries = rotated(keys, shape, positions), rotated(queries, shape, positions)
    causal = torch.full((LENGTH, LENGTH), -math.inf).double().triu(1)
    for n in range(shape.num_heads):
        scores = (
            queries[n] @ keys[n // (shape.num_heads // shape.num_kv_heads)].T / math.sqrt(size)
            + causal
        )
        best = scores[1:].topk(2).values
        assert float((best[:, 0] - best[:, 1]).min()) > 746

"""Routers, and the experts of each token: one by one, sorted by expert, in one grouped product."""

from __future__ import annotations

from collections.abc import Iterator
from unittest.mock import patch

import numpy as np
import torch
import torch.nn.functional as F

from hybrid_kv.guard import definitions
from hybrid_kv.guard.definitions import Floats
from hybrid_kv.guard.kernel_cases.draw import Compared, Draw, longs, wide
from hybrid_kv.kernels.moe import apply_experts, route_sigmoid, route_softmax, route_topk_softmax


def routers(draw: Draw) -> Iterator[Compared]:
    """Each gives every expert a weight; the order of the chosen ones is nobody's business."""
    num_groups, per_group = draw.numbers(1, 4, 2)
    top_k_groups, num_experts = draw.number(1, num_groups), num_groups * per_group
    top_k, renormalise = draw.number(1, top_k_groups * per_group), draw.chance()
    logits = draw.floats(2, num_experts)
    got = _by_expert(route_softmax(logits, top_k, renormalise), num_experts)
    yield "route_softmax", got, np.array([definitions.route_softmax(wide(row), top_k, renormalise) for row in logits])
    got = _by_expert(route_topk_softmax(logits, top_k), num_experts)
    yield "route_topk_softmax", got, np.array([definitions.route_softmax(wide(row), top_k, True) for row in logits])
    # With a bias below -1 every score for the choice is negative.
    bias = draw.one_of(None, draw.floats(num_experts), draw.floats(num_experts) - 3)
    wide_bias = None if bias is None else wide(bias)
    options = num_groups, top_k_groups, renormalise, draw.one_of(1.0, 2.5), draw.one_of(1e-20, 0.1)
    got = _by_expert(route_sigmoid(logits, bias, top_k, *options), num_experts)
    expected = [definitions.route_sigmoid(wide(row), wide_bias, top_k, *options) for row in logits]
    yield "route_sigmoid", got, np.array(expected)


def experts(draw: Draw) -> Iterator[Compared]:
    """Sizes that a grouped product takes, in float32 alone, and others."""
    for dtype in torch.float32, torch.float64:
        yield from _experts(draw, dtype)


def _experts(draw: Draw, dtype: torch.dtype) -> Iterator[Compared]:
    """Nobody reads an expert that no token chose."""
    tokens, num_experts = draw.one_of(1, 2, 5), draw.number(1, 6)
    top_k = draw.one_of(1, draw.number(1, num_experts))
    # Of a hidden size of 2 the first product could be grouped, and not the second: rows must be whole 16 bytes.
    size, hidden = draw.one_of(4, 8, 16, 4, 8, 16, 3, 7, 15, 17), draw.one_of(4, 2, 3, 8)
    x, weights = draw.floats(tokens, size, dtype=dtype), draw.floats(tokens, top_k, dtype=dtype)
    ids = longs([(np.array(draw.blocks(num_experts)) - 1)[:top_k].tolist() for _ in range(tokens)])
    up = draw.floats(num_experts, 2 * hidden, size, dtype=dtype)
    down = draw.floats(num_experts, size, hidden, dtype=dtype)
    for unread in {*range(num_experts)} - {*ids.flatten().tolist()}:
        up[unread] = down[unread] = torch.nan
    with patch.object(F, "grouped_mm", wraps=F.grouped_mm) as grouped:
        got = apply_experts(x, ids, weights, up, down, lambda part: F.silu(part[:, :hidden]) * part[:, hidden:])

    def gated(part: Floats) -> Floats:
        return definitions.silu(part[:hidden]) * part[hidden:]

    by_expert = wide(_by_expert((weights, ids), num_experts))
    expected = [
        definitions.experts(wide(token), own, wide(up), wide(down), gated)
        for token, own in zip(x, by_expert, strict=True)
    ]
    yield "apply_experts", got, np.array(expected)
    # One by one the values are the same, and many take longer.
    is_grouped = tokens > 1 and tokens * top_k >= num_experts and dtype == torch.float32
    products = 2 * (is_grouped and size % 4 == hidden % 4 == 0)
    yield "apply_experts, grouped products", longs([grouped.call_count]), np.array([products])


def _by_expert(routed: tuple[torch.Tensor, torch.Tensor], num_experts: int) -> torch.Tensor:
    """Weights [num_tokens, num_experts], 0 for an expert that was not chosen."""
    weights, ids = routed
    return weights.new_zeros(len(weights), num_experts).scatter_(1, ids, weights)


CASES = (routers, experts)

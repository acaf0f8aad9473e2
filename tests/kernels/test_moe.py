"""Routers and experts against their definitions and loops over tokens in float64.

Tolerances are shares of max|ref|: in float32 1e-5, a hundred roundings of 6e-8; in float64 1e-12;
in bfloat16 2e-2, a few roundings of 4e-3. Expert ids are equal: drawn logits are apart by more than
any rounding.
"""

from __future__ import annotations

from collections.abc import Callable
from unittest.mock import patch

import numpy as np
import numpy.typing as npt
import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.strategies import DrawFn

from hybrid_kv.kernels.moe import apply_experts, route_sigmoid, route_softmax, route_topk_softmax
from hybrid_kv.measure.device import pretend_gpu
from tests.kernels import definitions
from tests.kernels.harness import assert_close

Activation = Callable[[torch.Tensor], torch.Tensor]
Experts = tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, Activation]

SHARE = {torch.float32: 1e-5, torch.float64: 1e-12, torch.bfloat16: 2e-2}


def gated(hidden: torch.Tensor) -> torch.Tensor:
    gate, up = hidden.chunk(2, dim=-1)
    return F.silu(gate) * up


def squared(hidden: torch.Tensor) -> torch.Tensor:
    return F.relu(hidden).square()


def spread(
    shape: tuple[int, int], g: torch.Generator, dtype: torch.dtype = torch.float64
) -> torch.Tensor:
    """Return multiples of 1/8 that differ within a row: equal in every dtype, with no ties."""
    return (
        torch.stack([torch.randperm(shape[1], generator=g) for _ in range(shape[0])]) / 8 - 1
    ).to(dtype)


@st.composite
def logits_of_tokens(draw: DrawFn) -> tuple[torch.Tensor, int]:
    tokens, experts = draw(st.integers(1, 5)), draw(st.integers(1, 12))
    g = torch.Generator().manual_seed(draw(st.integers(0, 2**31)))
    dtype = draw(st.sampled_from([torch.float32, torch.float64, torch.bfloat16]))
    return spread((tokens, experts), g, dtype), draw(st.integers(1, experts))


def assert_wide(weights: torch.Tensor, logits: torch.Tensor) -> None:
    assert weights.dtype == (torch.float64 if logits.dtype == torch.float64 else torch.float32)


def by_expert(weights: torch.Tensor, ids: torch.Tensor, num_experts: int) -> torch.Tensor:
    """[num_tokens, num_experts] in float64, 0 for an expert that was not chosen."""
    return weights.new_zeros(len(weights), num_experts).scatter_(1, ids, weights).double()


def assert_weights(
    routed: tuple[torch.Tensor, torch.Tensor],
    logits: torch.Tensor,
    definition: Callable[..., npt.NDArray[np.float64]],
    *options: object,
    **named: object,
) -> None:
    weights, ids = routed
    assert_wide(weights, logits)
    expected = torch.from_numpy(
        np.array([definition(row, *options, **named) for row in logits.double().numpy()])
    )
    assert_close(by_expert(weights, ids, logits.shape[1]), expected, SHARE[weights.dtype])


@given(logits_of_tokens(), st.booleans())
def test_softmax_routers_choose_and_weigh_as_the_definition_says(
    problem: tuple[torch.Tensor, int], renormalise: bool
) -> None:
    logits, top_k = problem
    assert_weights(
        route_softmax(logits, top_k, renormalise),
        logits,
        definitions.route_softmax,
        top_k,
        renormalise,
    )
    assert_weights(
        route_topk_softmax(logits, top_k),
        logits,
        definitions.route_softmax,
        top_k,
        renormalise=True,
    )


@given(st.data())
def test_the_sigmoid_router_chooses_and_weighs_as_the_definition_says(data: st.DataObject) -> None:
    draw, tokens = data.draw, data.draw(st.integers(1, 4))
    num_groups, per_group = draw(st.integers(1, 4)), draw(st.integers(1, 4))
    top_k_groups = draw(st.integers(1, num_groups))
    top_k = draw(st.integers(1, top_k_groups * per_group))
    rest = (
        draw(st.booleans()),
        draw(st.sampled_from([1.0, 2.5])),
        draw(st.sampled_from([1e-20, 0.1])),
    )
    g = torch.Generator().manual_seed(draw(st.integers(0, 2**31)))
    logits = spread(
        (tokens, num_groups * per_group), g, draw(st.sampled_from([torch.float32, torch.float64]))
    )
    # Below -1 for all, so that every score for the choice is negative.
    bias = draw(st.sampled_from([None, 0.0, -3.0]))
    if bias is not None:
        bias = bias + torch.randn(num_groups * per_group, generator=g)
    before, wide = logits.clone(), None if bias is None else bias.double().numpy()
    routed = route_sigmoid(logits, bias, top_k, num_groups, top_k_groups, *rest)
    assert torch.equal(logits, before)
    assert_weights(
        routed, logits, definitions.route_sigmoid, wide, top_k, num_groups, top_k_groups, *rest
    )


@st.composite
def expert_problems(draw: DrawFn) -> Experts:
    tokens, experts = draw(st.integers(1, 20)), draw(st.integers(1, 9))
    top_k = draw(st.integers(1, experts))
    # Rows of whole 16 bytes, and others: only those go through a grouped product.
    size, inner = draw(st.tuples(*[st.integers(1, 9)] * 2) | st.sampled_from([(8, 8), (16, 8)]))
    dtype = draw(st.sampled_from([torch.float32, torch.float64, torch.bfloat16]))
    activation = draw(st.sampled_from([gated, squared]))
    g = torch.Generator().manual_seed(draw(st.integers(0, 2**31)))
    x = torch.randn(tokens, size, generator=g).to(dtype)
    up = torch.randn(experts, inner * (1 + (activation is gated)), size, generator=g).to(dtype)
    down = torch.randn(experts, size, inner, generator=g).to(dtype)
    ids = torch.rand(tokens, experts, generator=g).topk(top_k).indices
    return (
        x,
        ids,
        torch.rand(tokens, top_k, generator=g).to(torch.promote_types(dtype, torch.float32)),
        up,
        down,
        activation,
    )


@given(expert_problems())
def test_every_token_gets_the_weighted_sum_of_its_experts_and_no_other_is_read(
    problem: Experts,
) -> None:
    x, ids, weights, up, down, activation = problem
    expected, magnitude = (torch.zeros(x.shape, dtype=torch.float64) for _ in range(2))
    wide_up, wide_down = up.double(), down.double()
    for t in range(len(x)):
        for e, weight in zip(ids[t].tolist(), weights[t].tolist(), strict=True):
            expected[t] += weight * (wide_down[e] @ activation(wide_up[e] @ x[t].double()))
            magnitude[t] += weight * (
                wide_down[e].abs() @ activation(wide_up[e].abs() @ x[t].double().abs())
            )
    unread = torch.ones(len(up), dtype=torch.bool).scatter_(0, ids.flatten(), 0)
    up[unread], down[unread] = torch.nan, torch.nan
    before = [part.clone() for part in (x, ids, weights)]
    with patch.object(F, "grouped_mm", wraps=F.grouped_mm) as grouped:
        got = apply_experts(x, ids, weights, up, down, activation)
    # One by one the values are the same, and many take longer.
    sizes = [size * x.itemsize % 16 for size in (*up.shape[1:], *down.shape[1:])]
    is_grouped = (
        len(x) > 1 and ids.numel() >= len(up) and x.dtype != torch.float64 and not any(sizes)
    )
    assert grouped.call_count == 2 * is_grouped
    assert all(torch.equal(part, old) for part, old in zip((x, ids, weights), before, strict=True))
    assert got.dtype == x.dtype
    # By token, and of what was added up: terms cancel, and bfloat16 rounds them before they do.
    assert bool(
        ((got.double() - expected).abs().amax(1) <= SHARE[x.dtype] * magnitude.amax(1)).all()
    )


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("tokens", "inner"), [(1, 16), (4, 16), (4, 12)])
def test_a_gpu_s_host_does_not_wait_to_know_how_many_tokens_an_expert_has(
    dtype: torch.dtype, tokens: int, inner: int
) -> None:
    g = torch.Generator().manual_seed(0)
    x, up = (
        torch.randn(tokens, 16, generator=g).to(dtype),
        torch.randn(8, 2 * inner, 16, generator=g).to(dtype),
    )
    down, ids = (
        torch.randn(8, 16, inner, generator=g).to(dtype),
        torch.rand(tokens, 8, generator=g).topk(2).indices,
    )
    operands = x, ids, torch.rand(tokens, 2, generator=g), up, down
    wanted = apply_experts(*operands, gated)
    with pretend_gpu() as gpu:
        operands = [operand.to("cuda:0") for operand in operands]
        apply_experts(*operands, gated)  # constants are there
        since = len(gpu.events)
        found = apply_experts(*operands, gated)
        counts = gpu.counts(since)
        assert (counts["wait"], counts["upload"], counts["download"]) == (0, 0, 0)
        assert_close(found.cpu(), wanted.double(), SHARE[dtype])

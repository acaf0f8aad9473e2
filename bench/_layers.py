"""Cases of any recurrent layer.

They are the verify step that stores a state after every token, and the scan of a prefill.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch

from bench._reference import Floats, near
from bench.harness.cells import Case
from hybrid_kv.kernels.common.spans import Spans

# Outputs and states of equally long rows, of the states that they start from, a layer's inputs and
# the number of rows.
Expected = Callable[[torch.Tensor, Sequence[torch.Tensor], int], tuple[Floats, Floats]]


@dataclass(frozen=True)
class Layer:
    """A recurrent layer that is timed: its sizes, its inputs, its kernel and the right results.

    Attributes:
        state_size: of a request.
        inputs: of all tokens, as the layer projects them.
        implementation: gets states, inputs, and where each request's states lie.
        expected_of: gives the outputs and states, of which each case takes those that it writes.
        tolerances: of outputs and states, shares of their largest value.
    """

    state_size: Sequence[int]
    inputs: Sequence[torch.Tensor]
    implementation: Any
    device: str
    expected_of: Expected
    tolerances: tuple[float, float]


def verify_step(layer: Layer, num_reqs: int, K: int, g: torch.Generator) -> Case:
    """Build a step that reads a state of each request and writes those after each of 1 + K tokens.

    Each state is written to its own block. The layer expects the states after every token.
    """
    columns = 1 + K
    state = torch.randn(1 + num_reqs * (1 + columns), *layer.state_size, generator=g)
    ids = 1 + torch.randperm(num_reqs * (1 + columns), generator=g).view(num_reqs, 1 + columns)
    # Blocks of their own for what is written, so that a call leaves its input as it was.
    sources, targets = ids[:, 0].contiguous(), ids[:, 1:].contiguous()
    arguments = (state, *layer.inputs, torch.arange(num_reqs + 1) * columns, sources, targets)
    on_device = [part.to(layer.device) for part in arguments]
    return stateful_case(
        lambda: layer.implementation(*on_device),
        lambda: layer.expected_of(state[sources], layer.inputs, num_reqs),
        on_device[0],
        targets.to(layer.device),
        layer.tolerances,
    )


def equal_spans(
    num_tokens: int, num_reqs: int, chunk_size: int, device: str
) -> tuple[Spans, torch.Tensor]:
    """Return prompts of one length, and the blocks that they start from.

    Their states go to the first blocks.
    """
    lengths = torch.full((num_reqs,), num_tokens // num_reqs)
    blocks = torch.arange(1, num_reqs + 1, device=device)
    return Spans(lengths, blocks, chunk_size=chunk_size), blocks + num_reqs


def prefill(layer: Layer, num_reqs: int, chunk_size: int, g: torch.Generator) -> Case:
    """Build a step of prompts back to back, each from a state; it writes the state after each.

    The layer expects the last states.
    """
    state = torch.randn(1 + 2 * num_reqs, *layer.state_size, generator=g)
    spans, sources = equal_spans(len(layer.inputs[0]), num_reqs, chunk_size, layer.device)
    on_device = [part.to(layer.device) for part in (state, *layer.inputs)]
    initial = torch.ones_like(sources, dtype=torch.bool)
    return stateful_case(
        lambda: layer.implementation(*on_device, spans, sources, initial),
        lambda: layer.expected_of(state[sources.cpu()], layer.inputs, num_reqs),
        on_device[0],
        sources - num_reqs,
        layer.tolerances,
    )


def stateful_case(
    run: Callable[[], torch.Tensor],
    expected_of: Callable[[], tuple[Floats, Floats]],
    state: torch.Tensor,
    targets: torch.Tensor,
    tolerances: tuple[float, float],
) -> Case:
    """Build a case that returns outputs and writes the blocks `targets` of `state`.

    Args:
        expected_of: both, computed once.
        tolerances: of both, shares of their largest value.
    """
    expected = cache(expected_of)

    def check() -> float:
        y, states = expected()
        state[targets] = torch.nan
        y_error = near("y", run().double().cpu().view(y.shape), y, tolerances[0])
        return max(y_error, near("states", state[targets].double().cpu(), states, tolerances[1]))

    return Case(run, check)

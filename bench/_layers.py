"""Cases of any recurrent layer: the verify step that stores a state after every token, and the scan of a prefill."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

import torch

from bench._reference import Floats, near
from bench.harness.cells import Case
from hybrid_kv.kernels.common.spans import Spans

# Outputs and states of equally long rows, of the states that they start from, a layer's inputs and
# the number of rows.
Expected = Callable[[torch.Tensor, Sequence[torch.Tensor], int], tuple[Floats, Floats]]


def verify_step(
    state_size: Sequence[int], inputs: Sequence[torch.Tensor], num_reqs: int, K: int, implementation: Any, device: str,
    g: torch.Generator, expected_of: Expected, tolerances: tuple[float, float],
) -> Case:  # fmt: skip
    """Read one state of each request, write the one after each of 1 + K tokens to a block of its own.

    Args:
        expected_of: gives the states after every token.
        tolerances: of outputs and states, shares of their largest value.
    """
    columns = 1 + K
    state = torch.randn(1 + num_reqs * (1 + columns), *state_size, generator=g)
    ids = 1 + torch.randperm(num_reqs * (1 + columns), generator=g).view(num_reqs, 1 + columns)
    # Blocks of their own for what is written, so that a call leaves its input as it was.
    sources, targets = ids[:, 0].contiguous(), ids[:, 1:].contiguous()
    arguments = (state, *inputs, torch.arange(num_reqs + 1) * columns, sources, targets)
    on_device = [part.to(device) for part in arguments]
    return stateful_case(
        lambda: implementation(*on_device),
        lambda: expected_of(state[sources], inputs, num_reqs),
        on_device[0], targets.to(device), tolerances,
    )  # fmt: skip


def equal_spans(
    num_tokens: int, num_reqs: int, chunk_size: int, device: str
) -> tuple[Spans, torch.Tensor]:
    """Prompts of one length, whose states go to the first blocks; and the blocks that they start from."""
    lengths = torch.full((num_reqs,), num_tokens // num_reqs)
    blocks = torch.arange(1, num_reqs + 1, device=device)
    return Spans(lengths, blocks, chunk_size=chunk_size), blocks + num_reqs


def prefill(
    state_size: Sequence[int], inputs: Sequence[torch.Tensor], num_reqs: int, chunk_size: int, implementation: Any,
    device: str, g: torch.Generator, expected_of: Expected, tolerance: float,
) -> Case:  # fmt: skip
    """Prompts back to back, each from a state, and the state behind each.

    Args:
        expected_of: gives the last states.
        tolerance: of outputs and states, a share of their largest value.
    """
    state = torch.randn(1 + 2 * num_reqs, *state_size, generator=g)
    spans, sources = equal_spans(len(inputs[0]), num_reqs, chunk_size, device)
    on_device = [part.to(device) for part in (state, *inputs)]
    initial = torch.ones_like(sources, dtype=torch.bool)
    return stateful_case(
        lambda: implementation(*on_device, spans, sources, initial),
        lambda: expected_of(state[sources.cpu()], inputs, num_reqs),
        on_device[0], sources - num_reqs, (tolerance, tolerance),
    )  # fmt: skip


def stateful_case(
    run: Callable[[], torch.Tensor], expected_of: Callable[[], tuple[Floats, Floats]], state: torch.Tensor,
    targets: torch.Tensor, tolerances: tuple[float, float],
) -> Case:  # fmt: skip
    """What returns outputs and writes the blocks `targets` of `state`.

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

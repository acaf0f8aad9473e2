"""Contests: one task on a GPU and its rivals, the first of which the others are compared with.

A benchmark file with `gpu_contests(quick, device)` has some; `bench.gpu` finds them and races them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch

from bench.harness.cells import Case, Scalar, nothing, seed

MODELS = ("nemotron-3-nano", "granite-4-h-small")
VLLM = "vllm.model_executor.layers.mamba.ops"


def models(quick: bool) -> tuple[str, ...]:
    """Return the models whose shapes are raced: in a quick run the first one."""
    return MODELS[:1] if quick else MODELS


@dataclass(frozen=True)
class Rival:
    """One way to do a task.

    Attributes:
        make: its case; raises ImportError where its package is missing.
        num_bytes: that a call must move at least; 0 if it is not bound by memory.
        graph: it can be captured: it launches, and never waits for the device.
    """

    make: Callable[[], Case]
    num_bytes: int
    graph: bool = True


@dataclass(frozen=True)
class Contest:
    """A task and its rivals by name.

    Attributes:
        means: rivals that take turns, by name the weight of each.
        end_to_end: the `reset` of a case is the host's part of the task, and is timed with its
            `run`, too.
    """

    benchmark: str
    params: Mapping[str, Scalar]
    rivals: Mapping[str, Rival]
    means: Mapping[str, Mapping[str, float]] = field(default_factory=dict)
    end_to_end: bool = False


def kernel_and_torch(
    benchmark: str,
    params: Mapping[str, Scalar],
    build: Callable[..., Case],
    kernel: Callable[..., Any],
    plain: Callable[..., Any],
    num_bytes: int,
    graph: bool = False,
) -> Contest:
    """Return the contest of our kernel and the same in plain torch.

    Args:
        build: makes a case of a seed, `params` and `implementation`.
        graph: of plain torch, see `Rival`.
    """

    def made(implementation: Callable[..., Any]) -> Case:
        return build(seed(benchmark, params), **params, implementation=implementation)

    ours, other = (
        Rival(lambda: made(kernel), num_bytes),
        Rival(lambda: made(plain), num_bytes, graph),
    )
    return Contest(benchmark, params, {"triton": ours, "torch": other})


# Of the arguments of ours: the launch of another project's function, and what reads its result.
Prepare = Callable[..., tuple[Callable[[], Any], Callable[[], torch.Tensor]]]


def peer_case(build: Callable[[Any], Case], prepare: Prepare) -> Case:
    """Return the case that `build` makes of an implementation.

    It is timed without what `prepare` does, which may copy.
    """
    launch: Callable[[], Any] = nothing

    def implementation(*arguments: Any) -> torch.Tensor:
        nonlocal launch
        launch, result = prepare(*arguments)
        launch()
        return result()

    return Case(lambda: launch(), build(implementation).check)


def bound_update(
    function: Callable[..., Any], operands: Sequence[torch.Tensor], **more: Any
) -> partial[Any]:
    """Return the `selective_state_update` of mamba_ssm or vLLM.

    Its values of a head are tensors without strides.

    Args:
        operands: state, x, dt, dt_bias, A_log, B, C and D, as our kernel takes them.
    """
    state, x, dt, dt_bias, A_log, B, C, D = operands
    head_dim, size = state.shape[2:]
    A = (-A_log.exp())[:, None, None].expand(-1, head_dim, size)
    D, dt_bias = (values[:, None].expand(-1, head_dim) for values in (D, dt_bias))
    dt = dt[..., None].expand(-1, -1, head_dim)
    return partial(function, state, x, dt, A, B, C, D, dt_bias=dt_bias, dt_softplus=True, **more)

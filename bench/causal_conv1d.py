"""The causal convolution of a Mamba-2 layer: a prefill chunk, and the verify step of 1 + K tokens.

Inputs are float32 and of order 1; a sum of 4 products and SiLU err by a few 1e-7 of the largest
value.
"""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from functools import cache, partial
from itertools import product
from typing import Any

import numpy as np
import torch

from bench._layers import equal_spans, stateful_case
from bench._reference import convolution, near
from bench._shapes import SHAPES
from bench.harness.cells import Case, Cell, grid, seed
from bench.harness.contest import (
    MODELS,
    VLLM,
    Contest,
    Prepare,
    Rival,
    kernel_and_torch,
    models,
    peer_case,
)
from hybrid_kv.kernels.causal_conv1d import (
    causal_conv1d,
    causal_conv1d_prefill,
    causal_conv1d_prefill_reference,
    causal_conv1d_update,
    causal_conv1d_update_reference,
)

TOLERANCE = 2e-6
ROUNDED = (
    2.0**-7
)  # of bfloat16: half a unit in the last place of y, and its inputs are exact in the reference


def prefill(seed: int, model: str, num_tokens: int) -> Case:
    """Build a chunk of one request, after a window of earlier tokens."""
    shape = SHAPES[model]
    g = torch.Generator().manual_seed(seed)
    x = torch.randn(1, num_tokens, shape.channels, generator=g)
    weight = torch.randn(shape.channels, shape.kernel, generator=g)
    bias = torch.randn(shape.channels, generator=g)
    window = torch.randn(1, shape.kernel - 1, shape.channels, generator=g)
    wide = [part.double().numpy() for part in (window, x, weight, bias)]
    expected = cache(lambda: convolution(*wide))

    def run() -> tuple[torch.Tensor, torch.Tensor]:
        return causal_conv1d(x, weight, bias, window)

    def check() -> float:
        y, inputs = run()
        return max(
            near("y", y, expected(), TOLERANCE),
            near("inputs", inputs, np.concatenate([window, x], axis=1), 0.0),
        )

    return Case(run, check)


def update(
    seed: int,
    model: str,
    num_reqs: int,
    K: int,
    implementation: Any,
    device: str,
    dtype: torch.dtype,
) -> Case:
    """1 + K tokens of each request, from a window that the step before left at one of its rows."""
    shape, columns, kernel = SHAPES[model], 1 + K, SHAPES[model].kernel
    g = torch.Generator().manual_seed(seed)

    def normal(*size: int) -> torch.Tensor:
        return torch.randn(*size, generator=g).to(dtype)

    state = normal(1 + 2 * num_reqs, kernel - 1 + K, shape.channels)
    x, bias = normal(num_reqs * columns, shape.channels), normal(shape.channels)
    weight = normal(kernel, shape.channels).T  # tap by tap, as a layer keeps it
    blocks = 1 + torch.randperm(2 * num_reqs, generator=g).view(2, num_reqs)
    sources, accepted = blocks[0], torch.randint(1, 1 + columns, (num_reqs,), generator=g)
    # A block of its own for what is written, so that a call leaves its input as it was.
    targets = torch.zeros(num_reqs, columns, dtype=torch.int64)
    targets[:, 0] = blocks[1]
    cu_seqlens = torch.arange(num_reqs + 1) * columns
    windows = torch.stack(
        [state[s, a - 1 : a + kernel - 2] for s, a in zip(sources, accepted, strict=True)]
    )
    wide = [
        part.double().numpy() for part in (windows, x.view(num_reqs, columns, -1), weight, bias)
    ]
    kept = np.concatenate(wide[:2], axis=1)[:, 1:]
    on_device = [
        part.to(device)
        for part in (state, x, weight, bias, cu_seqlens, sources, accepted - 1, targets)
    ]
    tolerances = (TOLERANCE if dtype == torch.float32 else ROUNDED), 0.0
    return stateful_case(
        lambda: implementation(*on_device),
        lambda: (convolution(*wide), kept),
        on_device[0],
        blocks[1].to(device),
        tolerances,
    )


def prompts(
    seed: int, model: str, num_tokens: int, num_reqs: int, implementation: Any, device: str
) -> Case:
    """Build prompts back to back, each after a window, whose last inputs are stored; bfloat16."""
    shape = SHAPES[model]
    g = torch.Generator().manual_seed(seed)

    def normal(*size: int) -> torch.Tensor:
        return torch.randn(*size, generator=g).to(torch.bfloat16)

    x, bias = normal(num_tokens, shape.channels), normal(shape.channels)
    weight = normal(shape.kernel, shape.channels).T
    state = normal(1 + 2 * num_reqs, shape.kernel - 1, shape.channels)
    spans, sources = equal_spans(num_tokens, num_reqs, 16, device)
    rows = x.view(num_reqs, -1, shape.channels)
    wide = [part.double().numpy() for part in (state[sources.cpu()], rows, weight, bias)]
    kept = wide[1][:, -(shape.kernel - 1) :]
    first, initial = torch.zeros_like(sources), torch.ones_like(sources, dtype=torch.bool)
    on_device = [part.to(device) for part in (state, x, weight, bias)]
    return stateful_case(
        lambda: implementation(*on_device, spans, sources, first, initial),
        lambda: (convolution(*wide), kept),
        on_device[0],
        sources - num_reqs,
        (ROUNDED, 0.0),
    )


def vllm_conv_update() -> Prepare:
    """Return `causal_conv1d_update`, in place: in the block that ours only writes.

    It overwrites its input with its output.
    """
    function = importlib.import_module(f"{VLLM}.causal_conv1d").causal_conv1d_update

    def prepare(state, x, weight, bias, cu_seqlens, sources, window_rows, targets):  # type: ignore[no-untyped-def]
        inputs = x.clone()
        state[targets[:, 0]] = state[sources]
        launch = partial(
            function,
            inputs,
            state.transpose(1, 2),
            weight.contiguous(),
            bias,
            activation="silu",
            conv_state_indices=targets[:, 0].int().contiguous(),
            num_accepted_tokens=window_rows.int() + 1,
            query_start_loc=cu_seqlens.int(),
            max_query_len=targets.shape[1],
            null_block_id=0,
        )
        return launch, lambda: inputs

    return prepare


def conv_updates(
    device: str, model: str, num_reqs: int, K: int, dtype: torch.dtype = torch.bfloat16
) -> Contest:
    """Return the contest of one layer's convolution of such a step."""
    shape, tokens = SHAPES[model], 1 + K
    params = {"model": model, "num_reqs": num_reqs, "K": K}
    number = seed("conv_update", params)
    # The window and the tokens in, the tokens and their inputs out.
    moved = (
        num_reqs * shape.channels * 2 * (shape.kernel - 1 + 2 * tokens + shape.kernel - 2 + tokens)
    )

    def build(implementation: Any) -> Case:
        return update(number, model, num_reqs, K, implementation, device, dtype)

    return Contest(
        "conv_update",
        params,
        {
            "triton": Rival(lambda: build(causal_conv1d_update), moved),
            "vllm": Rival(lambda: peer_case(build, vllm_conv_update()), moved),
            "torch": Rival(lambda: build(causal_conv1d_update_reference), moved, graph=False),
        },
    )


def conv_prefills(device: str, model: str, num_tokens: int, num_reqs: int) -> Contest:
    """Return the contest of one layer's convolution of a prefill."""
    params = {"model": model, "num_tokens": num_tokens, "num_reqs": num_reqs}
    moved = 2 * num_tokens * SHAPES[model].channels * 2
    build = partial(prompts, device=device)
    return kernel_and_torch(
        "conv_prefill", params, build, causal_conv1d_prefill, causal_conv1d_prefill_reference, moved
    )


def gpu_contests(quick: bool, device: str) -> Iterator[Contest]:
    """Yield contests of verify steps, as `bench.state_update` has them, and of prefills."""
    for model in models(quick):
        batches = (128,) if quick else (1, 16, 128) if model == MODELS[0] else (16,)
        for num_reqs, K in product(batches, (0, 3) if quick else (0, 1, 3, 5, 7)):
            yield conv_updates(device, model, num_reqs, K)
        for num_tokens in (2048,) if quick else (2048, 8192):
            yield conv_prefills(device, model, num_tokens, 4)


def cells() -> list[Cell]:
    """Return the cells of prefill and verify step, on a CPU and a GPU."""
    models = ("nemotron-3-nano-tp8", "granite-4-h-small-tp8")
    chunks = {"model": models, "num_tokens": (256, 1024)}
    steps = {"model": models, "num_reqs": (16,), "K": (0, 1, 3, 7)}
    launches = {
        "model": ("nemotron-3-nano", "granite-4-h-small"),
        "num_reqs": (16, 256),
        "K": (0, 1, 3, 7),
    }
    packed = {
        "model": ("nemotron-3-nano", "granite-4-h-small"),
        "num_tokens": (2048, 8192),
        "num_reqs": (4,),
    }
    quick = [("nemotron-3-nano-tp8", 16, 3)]
    on_gpu = partial(prompts, implementation=causal_conv1d_prefill, device="cuda")
    on_cpu = partial(
        update, implementation=causal_conv1d_update_reference, device="cpu", dtype=torch.float32
    )
    step_on_gpu = partial(
        update, implementation=causal_conv1d_update, device="cuda", dtype=torch.bfloat16
    )
    return [
        *grid("causal_conv1d", "prefill", "cpu", prefill, chunks, [("nemotron-3-nano-tp8", 256)]),
        *grid("causal_conv1d", "update", "cpu", on_cpu, steps, quick),
        *grid(
            "causal_conv1d", "prefill_kernel", "gpu", on_gpu, packed, [("nemotron-3-nano", 2048)]
        ),
        *grid(
            "causal_conv1d",
            "update_kernel",
            "gpu",
            step_on_gpu,
            launches,
            [("nemotron-3-nano", 256, 3)],
        ),
    ]

"""The causal convolution of a Mamba-2 layer: a prefill chunk, and the verify step of 1 + K tokens.

Inputs are float32 and of order 1; a sum of 4 products and SiLU err by a few 1e-7 of the largest value.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from bench._reference import Floats, convolution, near
from bench._shapes import SHAPES
from bench.ssd import equal_spans
from hybrid_kv.kernels.causal_conv1d import (
    causal_conv1d,
    causal_conv1d_prefill,
    causal_conv1d_update,
    causal_conv1d_update_reference,
)
from hybrid_kv.timing.cases import Case, Cell, grid

TOLERANCE = 2e-6
ROUNDED = 2.0**-7  # of bfloat16: half a unit in the last place of y, and its inputs are exact in the reference


def prefill(seed: int, model: str, num_tokens: int) -> Case:
    """One request's chunk, behind a window of earlier tokens."""
    shape = SHAPES[model]
    g = torch.Generator().manual_seed(seed)
    x = torch.randn(1, num_tokens, shape.channels, generator=g)
    weight = torch.randn(shape.channels, shape.kernel, generator=g)
    bias = torch.randn(shape.channels, generator=g)
    window = torch.randn(1, shape.kernel - 1, shape.channels, generator=g)
    expected: list[Floats] = []

    def run() -> tuple[torch.Tensor, torch.Tensor]:
        return causal_conv1d(x, weight, bias, window)

    def check() -> float:
        if not expected:
            expected.append(convolution(*(part.double().numpy() for part in (window, x, weight, bias))))
        y, inputs = run()
        return max(
            near("y", y, expected[0], TOLERANCE),
            near("inputs", inputs, np.concatenate([window, x], axis=1), 0.0),
        )

    return Case(run, check)


def update(seed: int, model: str, num_reqs: int, K: int, implementation: Any, device: str, dtype: torch.dtype) -> Case:
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
    windows = torch.stack([state[s, a - 1 : a + kernel - 2] for s, a in zip(sources, accepted, strict=True)])
    wide = [part.double().numpy() for part in (windows, x.view(num_reqs, columns, -1), weight, bias)]
    expected = convolution(*wide)
    kept = np.concatenate(wide[:2], axis=1)[:, 1:]
    on_device = [part.to(device) for part in (state, x, weight, bias, cu_seqlens, sources, accepted - 1, targets)]

    def run() -> torch.Tensor:
        return implementation(*on_device)

    def check() -> float:
        own = blocks[1].to(device)
        on_device[0][own] = torch.nan
        y = run().double().cpu().view(expected.shape)
        written = on_device[0][own, : kernel - 2 + columns].double().cpu()
        tolerance = TOLERANCE if dtype == torch.float32 else ROUNDED
        return max(near("y", y, expected, tolerance), near("window", written, kept, 0.0))

    return Case(run, check)


def update_cpu(seed: int, model: str, num_reqs: int, K: int) -> Case:
    """`update` in plain torch, float32."""
    return update(seed, model, num_reqs, K, causal_conv1d_update_reference, "cpu", torch.float32)


def update_gpu(seed: int, model: str, num_reqs: int, K: int) -> Case:
    """`update` as one launch, bfloat16."""
    return update(seed, model, num_reqs, K, causal_conv1d_update, "cuda", torch.bfloat16)


def prompts(seed: int, model: str, num_tokens: int, num_reqs: int, implementation: Any, device: str) -> Case:
    """Prompts back to back, each behind a window, whose last inputs are stored; bfloat16."""
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
    expected, kept = convolution(*wide), wide[1][:, -(shape.kernel - 1) :]
    first, initial = torch.ones_like(sources), torch.ones_like(sources, dtype=torch.bool)
    on_device = [part.to(device) for part in (state, x, weight, bias)]

    def run() -> torch.Tensor:
        return implementation(*on_device, spans, sources, first, initial)

    def check() -> float:
        on_device[0][1 : 1 + num_reqs] = torch.nan
        y = run().double().cpu().view(expected.shape)
        return max(
            near("y", y, expected, ROUNDED), near("window", on_device[0][1 : 1 + num_reqs].double().cpu(), kept, 0.0)
        )

    return Case(run, check)


def prompts_gpu(seed: int, model: str, num_tokens: int, num_reqs: int) -> Case:
    """`prompts` as one launch."""
    return prompts(seed, model, num_tokens, num_reqs, causal_conv1d_prefill, "cuda")


def cells() -> list[Cell]:
    """Prefill and verify step, on a CPU and a GPU."""
    models = ("nemotron-3-nano-tp8", "granite-4-h-small-tp8")
    chunks = {"model": models, "num_tokens": (256, 1024)}
    steps = {"model": models, "num_reqs": (16,), "K": (0, 1, 3, 7)}
    launches = {"model": ("nemotron-3-nano", "granite-4-h-small"), "num_reqs": (16, 256), "K": (0, 1, 3, 7)}
    packed = {"model": ("nemotron-3-nano", "granite-4-h-small"), "num_tokens": (2048, 8192), "num_reqs": (4,)}
    quick = [("nemotron-3-nano-tp8", 16, 3)]
    return [
        *grid("causal_conv1d", "prefill", "cpu", prefill, chunks, [("nemotron-3-nano-tp8", 256)]),
        *grid("causal_conv1d", "update", "cpu", update_cpu, steps, quick),
        *grid("causal_conv1d", "prefill_kernel", "gpu", prompts_gpu, packed, [("nemotron-3-nano", 2048)]),
        *grid("causal_conv1d", "update_kernel", "gpu", update_gpu, launches, [("nemotron-3-nano", 256, 3)]),
    ]

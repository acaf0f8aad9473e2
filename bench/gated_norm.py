"""The output norm of a Mamba-2 layer: `weight * norm(x * silu(gate))`, by group of channels.

Its arithmetic is float32, which errs by a few 1e-7 of the largest value; bfloat16 rounds the
result.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from itertools import product
from typing import Any

import numpy as np
import torch

from bench._reference import near, silu
from bench._shapes import SHAPES
from bench.harness.cells import Case, Cell, grid
from bench.harness.contest import Contest, kernel_and_torch, models
from hybrid_kv.kernels.gated_norm import gated_rms_norm, gated_rms_norm_reference
from hybrid_kv.models.layers import GatedRMSNorm

TOLERANCE = 2e-6
ROUNDED = 2.0**-7  # of bfloat16, as a share of the largest value
EPS = 1e-5


def norm(
    seed: int, model: str, num_tokens: int, implementation: Any, device: str, dtype: torch.dtype
) -> Case:
    """Build the norm of every token."""
    shape = SHAPES[model]
    g = torch.Generator().manual_seed(seed)
    channels = shape.heads * shape.head_dim
    x, gate, weight = (
        torch.randn(*size, generator=g).to(dtype)
        for size in ((num_tokens, channels), (num_tokens, channels), (channels,))
    )
    wide = [part.double().numpy() for part in (x, gate, weight)]
    gated = (wide[0] * silu(wide[1])).reshape(num_tokens, shape.groups, -1)
    normed = gated / np.sqrt((gated**2).mean(-1, keepdims=True) + EPS)
    expected = normed.reshape(num_tokens, -1) * wide[2]
    on_device = [part.to(device) for part in (x, gate, weight)]

    tolerance = ROUNDED if dtype == torch.bfloat16 else TOLERANCE

    def run() -> torch.Tensor:
        return implementation(*on_device, shape.groups, EPS)

    return Case(run, lambda: near("y", run().double().cpu(), expected, tolerance))


def norm_cpu(seed: int, model: str, num_tokens: int) -> Case:
    """Build `norm` by the engine's layer, float32."""
    shape = SHAPES[model]
    layer = GatedRMSNorm(shape.heads * shape.head_dim, shape.groups, EPS)

    def forward(
        x: torch.Tensor, gate: torch.Tensor, weight: torch.Tensor, *_: object
    ) -> torch.Tensor:
        layer.weight.data = weight
        return layer(x, gate)

    return norm(seed, model, num_tokens, forward, "cpu", torch.float32)


def norms(device: str, model: str, num_tokens: int) -> Contest:
    """Return the contest of a layer's output norm, `weight * norm(x * silu(gate))`."""
    params = {"model": model, "num_tokens": num_tokens}
    shape, build = SHAPES[model], partial(norm, device=device, dtype=torch.bfloat16)
    moved = 3 * num_tokens * shape.heads * shape.head_dim * 2
    return kernel_and_torch(
        "gated_norm", params, build, gated_rms_norm, gated_rms_norm_reference, moved, graph=True
    )


def gpu_contests(quick: bool, device: str) -> Iterator[Contest]:
    """Yield the contest of a prefill's tokens."""
    for model, num_tokens in product(models(quick), (2048,) if quick else (2048, 8192)):
        yield norms(device, model, num_tokens)


def cells() -> list[Cell]:
    """Return the cells of decodes and of a prefill."""
    steps = {"model": ("nemotron-3-nano-tp8", "granite-4-h-small-tp8"), "num_tokens": (16, 256)}
    launches = {"model": ("nemotron-3-nano", "granite-4-h-small"), "num_tokens": (128, 2048)}
    on_gpu = partial(norm, implementation=gated_rms_norm, device="cuda", dtype=torch.bfloat16)
    return [
        *grid("gated_norm", "norm", "cpu", norm_cpu, steps, [("nemotron-3-nano-tp8", 256)]),
        *grid("gated_norm", "norm_kernel", "gpu", on_gpu, launches, [("nemotron-3-nano", 2048)]),
    ]

"""The chunked scan of a Mamba-2 prefill: all tokens of a chunk, and states at block boundaries.

Quadratic and recurrent arithmetic differ by 2e-5 of the largest value in float32
(tests/kernels/ssd/test_reference.py).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import cache, partial
from itertools import product
from typing import Any

import numpy as np
import torch

from bench._layers import Layer, prefill
from bench._reference import Floats, near, recurrence, softplus
from bench._shapes import SHAPES, LayerShape
from bench.harness.cells import Case, Cell, grid
from bench.harness.contest import Contest, kernel_and_torch, models
from hybrid_kv.kernels.ssd import chunk_scan, chunk_scan_prefill, chunk_scan_prefill_reference

TOLERANCE = 2e-5
ROUNDED = 2.0**-7  # of bfloat16, as a share of the largest value


def scan(seed: int, model: str, num_tokens: int) -> Case:
    """Build the scan of one request, in the model's chunks, from a state.

    It writes the states after half of its tokens and after all.
    """
    shape = SHAPES[model]
    g = torch.Generator().manual_seed(seed)

    def normal(*size: int) -> torch.Tensor:
        return torch.randn(*size, generator=g)

    x, dt = (
        normal(1, num_tokens, shape.heads, shape.head_dim),
        torch.rand(1, num_tokens, shape.heads, generator=g) / 8,
    )
    B, C = (normal(1, num_tokens, shape.groups, shape.state_size) for _ in range(2))
    A, D = -torch.rand(shape.heads, generator=g) - 0.5, normal(shape.heads)
    initial = normal(1, shape.heads, shape.head_dim, shape.state_size)
    rows, offsets = (
        torch.zeros(2, dtype=torch.int64),
        torch.tensor([num_tokens // 2 + 1, num_tokens]),
    )

    @cache
    def expected() -> tuple[Floats, Floats]:
        y, states = recurrence(
            *(np.asarray(part.double()) for part in (initial, x, dt, A, B, C, D))
        )
        return y, states[0, offsets - 1]

    def run() -> tuple[torch.Tensor, torch.Tensor]:
        return chunk_scan(x, dt, A, B, C, D, initial, shape.chunk_size, rows, offsets)

    def check() -> float:
        found = zip(("y", "states"), run(), expected(), strict=True)
        return max(near(*one, TOLERANCE) for one in found)

    return Case(run, check)


def layer(
    shape: LayerShape, num_tokens: int, dtype: torch.dtype, g: torch.Generator
) -> tuple[torch.Tensor, ...]:
    """Return x, dt, dt_bias, A_log, B, C, D as the layer projects them."""
    sizes = ((shape.heads, shape.head_dim), (shape.heads,), *[(shape.groups, shape.state_size)] * 2)
    x, dt, B, C = (torch.randn(num_tokens, *size, generator=g) for size in sizes)
    dt_bias, A_log, D = torch.randn(3, shape.heads, generator=g)
    x, dt, B, C = (part.to(dtype) for part in (x, dt - 3, B, C))
    return x, dt, dt_bias, A_log, B, C, D


def expected_of(
    initial: torch.Tensor, inputs: Sequence[torch.Tensor], num_rows: int, last: bool = False
) -> tuple[Floats, Floats]:
    """Return the outputs of equally long rows and their states, in float64.

    The states are those after every token, or the last, [num_rows, len, …].
    """
    x, dt, dt_bias, A_log, B, C, D = (np.asarray(part.double()) for part in inputs)
    x, dt, B, C = (part.reshape(num_rows, -1, *part.shape[1:]) for part in (x, dt, B, C))
    return recurrence(
        np.asarray(initial.double()), x, softplus(dt + dt_bias), -np.exp(A_log), B, C, D, last
    )


def prompts(
    seed: int, model: str, num_tokens: int, num_reqs: int, implementation: Any, device: str
) -> Case:
    """Build a prefill with bfloat16 activations."""
    shape, g = SHAPES[model], torch.Generator().manual_seed(seed)
    inputs = layer(shape, num_tokens, torch.bfloat16, g)
    size, last_of = min(shape.chunk_size, 128), partial(expected_of, last=True)
    # Products of operands rounded to bfloat16, the states of chunks among them.
    tolerances = 2 * ROUNDED, 2 * ROUNDED
    timed = Layer(shape.state[:3], inputs, implementation, device, last_of, tolerances)
    return prefill(timed, num_reqs, size, g)


def chunk_scans(device: str, model: str, num_tokens: int, num_reqs: int) -> Contest:
    """Return the contest of one layer's scan of a prefill."""
    params = {"model": model, "num_tokens": num_tokens, "num_reqs": num_reqs}
    shape, build = SHAPES[model], partial(prompts, device=device)
    inner, state = shape.heads * shape.head_dim, shape.heads * shape.head_dim * shape.state_size
    moved = (
        num_tokens * 2 * (2 * inner + 2 * shape.groups * shape.state_size + shape.heads)
        + num_reqs * 2 * 4 * state
    )
    return kernel_and_torch(
        "chunk_scan", params, build, chunk_scan_prefill, chunk_scan_prefill_reference, moved
    )


def gpu_contests(quick: bool, device: str) -> Iterator[Contest]:
    """Yield prefills of four requests."""
    for model, num_tokens in product(models(quick), (2048,) if quick else (2048, 8192)):
        yield chunk_scans(device, model, num_tokens, 4)


def cells() -> list[Cell]:
    """Return cells of a prompt's chunks on a CPU, and of four prompts on a GPU."""
    values = {"model": ("nemotron-3-nano-tp8", "granite-4-h-small-tp8"), "num_tokens": (128, 256)}
    packed = {
        "model": ("nemotron-3-nano", "granite-4-h-small"),
        "num_tokens": (2048, 8192),
        "num_reqs": (4,),
    }
    on_gpu = partial(prompts, implementation=chunk_scan_prefill, device="cuda")
    return [
        *grid("ssd", "chunk_scan", "cpu", scan, values, [("nemotron-3-nano-tp8", 128)]),
        *grid("ssd", "chunk_scan_kernel", "gpu", on_gpu, packed, [("nemotron-3-nano", 2048)]),
    ]

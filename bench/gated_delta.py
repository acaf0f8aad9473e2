"""The gated delta rule of a delta net or a KDA layer: a verify step and a prefill.

The verify step has 1 + K tokens of each request.

Tolerances: float32 arithmetic errs by 1e-5 of the largest value
(tests/kernels/gated_delta/test_slots.py derives it); bfloat16 outputs are rounded by 2^-8 at most,
and in a prefill so is what they are computed from, four times over
(tests/kernels/gated_delta/test_prefill.py).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial
from itertools import product
from typing import Any

import numpy as np
import torch

from bench._layers import Layer, prefill, verify_step
from bench._reference import Floats, delta_rule, softplus
from bench._shapes import DELTA_SHAPES, DeltaShape
from bench.harness.cells import Case, Cell, grid
from bench.harness.contest import Contest, kernel_and_torch
from hybrid_kv.kernels.gated_delta import (
    gated_delta_prefill,
    gated_delta_prefill_reference,
    gated_delta_update_slots,
    gated_delta_update_slots_reference,
)

EXACT, ROUNDED, PRODUCTS = 1e-5, 2.0**-7, 2.0**-5
MODELS = ("qwen3-next", "kimi-linear")


def layer(
    shape: DeltaShape, num_tokens: int, dtype: torch.dtype, g: torch.Generator
) -> tuple[torch.Tensor, ...]:
    """Return q, k, v, dt, dt_bias, A_log, beta as the layer projects them."""
    keys, gates = (
        (shape.key_heads, shape.key_dim),
        (shape.heads, *[shape.key_dim] * shape.per_channel),
    )
    sizes = (keys, keys, (shape.heads, shape.value_dim), gates, (shape.heads,))
    q, k, v, dt, beta = (torch.randn(num_tokens, *size, generator=g) for size in sizes)
    dt_bias, A_log = torch.randn(gates, generator=g), torch.randn(shape.heads, generator=g)
    q, k, v, dt, beta = (part.to(dtype) for part in (q, k, v, dt - 3, beta))
    return q, k, v, dt, dt_bias, A_log, beta


def expected_of(
    initial: torch.Tensor, inputs: Sequence[torch.Tensor], num_rows: int, last: bool = False
) -> tuple[Floats, Floats]:
    """Return the outputs of equally long rows and their states, in float64.

    The states are those after every token, or the last, [num_rows, len, …].
    """
    q, k, v, dt, dt_bias, A_log, beta = (np.asarray(part.double()) for part in inputs)
    q, k, v, dt, beta = (
        part.reshape(num_rows, -1, *part.shape[1:]) for part in (q, k, v, dt, beta)
    )
    q, k = (
        np.repeat(
            part / np.sqrt((part**2).sum(-1, keepdims=True) + 1e-6), v.shape[2] // part.shape[2], 2
        )
        for part in (q, k)
    )
    rates = -np.exp(A_log).reshape(-1, *[1] * (dt.ndim - 3))
    decays = np.exp(rates * softplus(dt + dt_bias)).reshape(*v.shape[:3], -1)
    beta = 1 / (1 + np.exp(-beta))
    return delta_rule(
        np.asarray(initial.double()), q * k.shape[-1] ** -0.5, k, v, decays, beta, last
    )


def update(
    seed: int,
    model: str,
    num_reqs: int,
    K: int,
    implementation: Any,
    device: str,
    dtype: torch.dtype,
) -> Case:
    """See `verify_step`."""
    shape, g = DELTA_SHAPES[model], torch.Generator().manual_seed(seed)
    size = (shape.heads, shape.value_dim, shape.key_dim)
    inputs = layer(shape, num_reqs * (1 + K), dtype, g)
    tolerances = (EXACT if dtype == torch.float32 else ROUNDED), EXACT
    timed = Layer(size, inputs, implementation, device, expected_of, tolerances)
    return verify_step(timed, num_reqs, K, g)


def prompts(
    seed: int,
    model: str,
    num_tokens: int,
    num_reqs: int,
    implementation: Any,
    device: str,
    dtype: torch.dtype,
) -> Case:
    """See `prefill`."""
    shape, g = DELTA_SHAPES[model], torch.Generator().manual_seed(seed)
    size = (shape.heads, shape.value_dim, shape.key_dim)
    inputs = layer(shape, num_tokens, dtype, g)
    tolerance = 2 * EXACT if dtype == torch.float32 else PRODUCTS
    last_of = partial(expected_of, last=True)
    timed = Layer(size, inputs, implementation, device, last_of, (tolerance, tolerance))
    return prefill(timed, num_reqs, 64, g)


def token_bytes(shape: DeltaShape) -> int:
    """Return the bytes of a token's inputs and outputs in bfloat16."""
    values, gates = (
        2 * shape.heads * shape.value_dim,
        shape.heads * (shape.key_dim if shape.per_channel else 1),
    )
    return 2 * (2 * shape.key_heads * shape.key_dim + values + gates + shape.heads)


def updates(device: str, model: str, num_reqs: int, K: int) -> Contest:
    """Return the contest of one layer's step of 1 + K tokens a request."""
    params, shape = {"model": model, "num_reqs": num_reqs, "K": K}, DELTA_SHAPES[model]
    state = 4 * shape.heads * shape.value_dim * shape.key_dim
    moved = num_reqs * ((2 + K) * state + (1 + K) * token_bytes(shape))
    build = partial(update, device=device, dtype=torch.bfloat16)
    kernels = gated_delta_update_slots, gated_delta_update_slots_reference
    return kernel_and_torch("delta_update", params, build, *kernels, moved)


def prefills(device: str, model: str, num_tokens: int, num_reqs: int) -> Contest:
    """Return the contest of one layer's scan of a prefill."""
    params = {"model": model, "num_tokens": num_tokens, "num_reqs": num_reqs}
    shape, build = DELTA_SHAPES[model], partial(prompts, device=device, dtype=torch.bfloat16)
    moved = (
        num_tokens * token_bytes(shape)
        + num_reqs * 2 * 4 * shape.heads * shape.value_dim * shape.key_dim
    )
    return kernel_and_torch(
        "delta_prefill", params, build, gated_delta_prefill, gated_delta_prefill_reference, moved
    )


def gpu_contests(quick: bool, device: str) -> Iterator[Contest]:
    """Yield batches by drafts, and prefills of four requests."""
    for model in MODELS[:1] if quick else MODELS:
        for num_reqs, K in product((16,) if quick else (1, 16, 64), (0, 3)):
            yield updates(device, model, num_reqs, K)
        for num_tokens in (2048,) if quick else (2048, 8192):
            yield prefills(device, model, num_tokens, 4)


def cells() -> list[Cell]:
    """Return the cells of both, on a CPU and on a GPU."""
    steps = {"model": ("qwen3-next-tp8", "kimi-linear-tp8"), "num_reqs": (2,), "K": (0, 3)}
    launches = {"model": MODELS, "num_reqs": (16, 64), "K": (0, 3)}
    prompt, packed = (
        {"model": steps["model"], "num_tokens": (128, 256)},
        {"model": MODELS, "num_tokens": (2048, 8192)},
    )
    on_cpu: dict[str, Any] = {"device": "cpu", "dtype": torch.float32}
    on_gpu: dict[str, Any] = {"device": "cuda", "dtype": torch.bfloat16}
    step_cpu = partial(update, implementation=gated_delta_update_slots_reference, **on_cpu)
    prefill_cpu = partial(
        prompts, implementation=gated_delta_prefill_reference, num_reqs=1, **on_cpu
    )
    step = partial(update, implementation=gated_delta_update_slots, **on_gpu)
    prefill_gpu = partial(prompts, implementation=gated_delta_prefill, num_reqs=4, **on_gpu)
    return [
        *grid(
            "gated_delta",
            "update",
            "cpu",
            step_cpu,
            steps,
            [("qwen3-next-tp8", 2, 3), ("kimi-linear-tp8", 2, 0)],
        ),
        *grid("gated_delta", "update_kernel", "gpu", step, launches, [("qwen3-next", 64, 3)]),
        *grid(
            "gated_delta",
            "prefill",
            "cpu",
            prefill_cpu,
            prompt,
            [("qwen3-next-tp8", 128), ("kimi-linear-tp8", 128)],
        ),
        *grid("gated_delta", "prefill_kernel", "gpu", prefill_gpu, packed, [("qwen3-next", 2048)]),
    ]

"""The gated delta rule of a delta net or a KDA layer: a verify step of 1 + K tokens of each request, and a prefill.

Tolerances: float32 arithmetic errs by 1e-5 of the largest value (tests/kernels/gated_delta/test_slots.py derives it);
bfloat16 outputs are rounded by 2^-8 at most, and in a prefill so is what they are computed from, four times over
(tests/kernels/gated_delta/test_prefill.py).
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from itertools import product
from typing import Any

import numpy as np
import torch

from bench._reference import Floats, delta_rule, near, softplus
from bench._shapes import DELTA_SHAPES, DeltaShape
from bench.harness.cells import Case, Cell, grid
from bench.harness.contest import Contest, kernel_and_torch
from bench.ssd import equal_spans
from hybrid_kv.kernels.gated_delta import (
    gated_delta_prefill,
    gated_delta_prefill_reference,
    gated_delta_update_slots,
    gated_delta_update_slots_reference,
)

EXACT, ROUNDED, PRODUCTS = 1e-5, 2.0**-7, 2.0**-5
MODELS = ("qwen3-next", "kimi-linear")


def layer(shape: DeltaShape, num_tokens: int, dtype: torch.dtype, g: torch.Generator) -> tuple[torch.Tensor, ...]:
    """q, k, v, dt, dt_bias, A_log, beta as the layer projects them."""
    keys, gates = (shape.key_heads, shape.key_dim), (shape.heads, *[shape.key_dim] * shape.per_channel)
    sizes = (keys, keys, (shape.heads, shape.value_dim), gates, (shape.heads,))
    q, k, v, dt, beta = (torch.randn(num_tokens, *size, generator=g) for size in sizes)
    dt_bias, A_log = torch.randn(gates, generator=g), torch.randn(shape.heads, generator=g)
    q, k, v, dt, beta = (part.to(dtype) for part in (q, k, v, dt - 3, beta))
    return q, k, v, dt, dt_bias, A_log, beta


def expected_of(initial: torch.Tensor, inputs: tuple[torch.Tensor, ...], num_rows: int) -> tuple[Floats, Floats]:
    """Outputs and states of equally long rows, [num_rows, len, …], in float64."""
    q, k, v, dt, dt_bias, A_log, beta = (np.asarray(part.double()) for part in inputs)
    q, k, v, dt, beta = (part.reshape(num_rows, -1, *part.shape[1:]) for part in (q, k, v, dt, beta))
    q, k = (
        np.repeat(part / np.sqrt((part**2).sum(-1, keepdims=True) + 1e-6), v.shape[2] // part.shape[2], 2)
        for part in (q, k)
    )
    rates = -np.exp(A_log).reshape(-1, *[1] * (dt.ndim - 3))
    decays = np.exp(rates * softplus(dt + dt_bias)).reshape(*v.shape[:3], -1)
    return delta_rule(np.asarray(initial.double()), q * k.shape[-1] ** -0.5, k, v, decays, 1 / (1 + np.exp(-beta)))


def update(seed: int, model: str, num_reqs: int, K: int, implementation: Any, device: str, dtype: torch.dtype) -> Case:
    """Read one state of each request, write the one after every token to a block of its own."""
    shape, columns = DELTA_SHAPES[model], 1 + K
    g = torch.Generator().manual_seed(seed)
    inputs = layer(shape, num_reqs * columns, dtype, g)
    state = torch.randn(1 + num_reqs * (1 + columns), shape.heads, shape.value_dim, shape.key_dim, generator=g)
    ids = 1 + torch.randperm(num_reqs * (1 + columns), generator=g).view(num_reqs, 1 + columns)
    # Blocks of their own for what is written, so that a call leaves its input as it was.
    sources, targets = ids[:, 0].contiguous(), ids[:, 1:].contiguous()
    arguments = (state, *inputs, torch.arange(num_reqs + 1) * columns, sources, targets)
    on_device = [part.to(device) for part in arguments]
    expected: list[Floats] = []

    def check() -> float:
        if not expected:
            expected.extend(expected_of(state[sources], inputs, num_reqs))
        on_device[0][targets.to(device)] = torch.nan
        y = implementation(*on_device).double().cpu().view(expected[0].shape)
        written = on_device[0][targets.to(device)].double().cpu()
        return max(
            near("y", y, expected[0], EXACT if dtype == torch.float32 else ROUNDED),
            near("states", written, expected[1], EXACT),
        )

    return Case(lambda: implementation(*on_device), check)


def update_cpu(seed: int, model: str, num_reqs: int, K: int) -> Case:
    """`update` in plain torch, float32."""
    return update(seed, model, num_reqs, K, gated_delta_update_slots_reference, "cpu", torch.float32)


def prompts(
    seed: int, model: str, num_tokens: int, num_reqs: int, implementation: Any, device: str, dtype: torch.dtype
) -> Case:
    """Prompts back to back, each from a state, and the state behind each."""
    shape = DELTA_SHAPES[model]
    g = torch.Generator().manual_seed(seed)
    inputs = layer(shape, num_tokens, dtype, g)
    state = torch.randn(1 + 2 * num_reqs, shape.heads, shape.value_dim, shape.key_dim, generator=g)
    spans, sources = equal_spans(num_tokens, num_reqs, 64, device)
    on_device = [part.to(device) for part in (state, *inputs)]
    initial = torch.ones_like(sources, dtype=torch.bool)
    expected: list[Floats] = []

    def run() -> torch.Tensor:
        return implementation(*on_device, spans, sources, initial)

    def check() -> float:
        if not expected:
            outputs, states = expected_of(state[sources.cpu()], inputs, num_reqs)
            expected.extend((outputs, states[:, -1]))
        on_device[0][1 : 1 + num_reqs] = torch.nan
        y = run().double().cpu().view(expected[0].shape)
        written = on_device[0][1 : 1 + num_reqs].double().cpu()
        tolerance = 2 * EXACT if dtype == torch.float32 else PRODUCTS
        return max(near("y", y, expected[0], tolerance), near("states", written, expected[1], tolerance))

    return Case(run, check)


def prompts_cpu(seed: int, model: str, num_tokens: int) -> Case:
    """`prompts` of one request in plain torch, float32."""
    return prompts(seed, model, num_tokens, 1, gated_delta_prefill_reference, "cpu", torch.float32)


def token_bytes(shape: DeltaShape) -> int:
    """Inputs and outputs of a token in bfloat16."""
    values, gates = 2 * shape.heads * shape.value_dim, shape.heads * (shape.key_dim if shape.per_channel else 1)
    return 2 * (2 * shape.key_heads * shape.key_dim + values + gates + shape.heads)


def updates(device: str, model: str, num_reqs: int, K: int) -> Contest:
    """One layer's step of 1 + K tokens a request."""
    params, shape = {"model": model, "num_reqs": num_reqs, "K": K}, DELTA_SHAPES[model]
    state = 4 * shape.heads * shape.value_dim * shape.key_dim
    moved = num_reqs * ((2 + K) * state + (1 + K) * token_bytes(shape))
    build = partial(update, device=device, dtype=torch.bfloat16)
    kernels = gated_delta_update_slots, gated_delta_update_slots_reference
    return kernel_and_torch("delta_update", params, build, *kernels, moved)


def prefills(device: str, model: str, num_tokens: int, num_reqs: int) -> Contest:
    """One layer's scan of a prefill."""
    params = {"model": model, "num_tokens": num_tokens, "num_reqs": num_reqs}
    shape, build = DELTA_SHAPES[model], partial(prompts, device=device, dtype=torch.bfloat16)
    moved = num_tokens * token_bytes(shape) + num_reqs * 2 * 4 * shape.heads * shape.value_dim * shape.key_dim
    return kernel_and_torch("delta_prefill", params, build, gated_delta_prefill, gated_delta_prefill_reference, moved)


def gpu_contests(quick: bool, device: str) -> Iterator[Contest]:
    """Batches by drafts, and prefills of four requests."""
    for model in MODELS[:1] if quick else MODELS:
        for num_reqs, K in product((16,) if quick else (1, 16, 64), (0, 3)):
            yield updates(device, model, num_reqs, K)
        for num_tokens in (2048,) if quick else (2048, 8192):
            yield prefills(device, model, num_tokens, 4)


def cells() -> list[Cell]:
    """Both, on a CPU and on a GPU."""
    steps = {"model": ("qwen3-next-tp8", "kimi-linear-tp8"), "num_reqs": (2,), "K": (0, 3)}
    launches = {"model": MODELS, "num_reqs": (16, 64), "K": (0, 3)}
    prompt, packed = {"model": steps["model"], "num_tokens": (128, 256)}, {"model": MODELS, "num_tokens": (2048, 8192)}
    on_gpu: dict[str, Any] = {"device": "cuda", "dtype": torch.bfloat16}
    step = partial(update, implementation=gated_delta_update_slots, **on_gpu)
    prefill = partial(prompts, implementation=gated_delta_prefill, num_reqs=4, **on_gpu)
    return [
        *grid("gated_delta", "update", "cpu", update_cpu, steps, [("qwen3-next-tp8", 2, 3), ("kimi-linear-tp8", 2, 0)]),
        *grid("gated_delta", "update_kernel", "gpu", step, launches, [("qwen3-next", 64, 3)]),
        *grid(
            "gated_delta", "prefill", "cpu", prompts_cpu, prompt, [("qwen3-next-tp8", 128), ("kimi-linear-tp8", 128)]
        ),
        *grid("gated_delta", "prefill_kernel", "gpu", prefill, packed, [("qwen3-next", 2048)]),
    ]

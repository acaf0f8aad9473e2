"""The chunked scan of a Mamba-2 prefill: all tokens of a chunk, and the states at its block boundaries.

Quadratic and recurrent arithmetic differ by 2e-5 of the largest value in float32 (tests/kernels/ssd/test_reference.py).
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from itertools import product
from typing import Any

import numpy as np
import torch

from bench._reference import Floats, near, recurrence, softplus
from bench._shapes import SHAPES
from bench.harness.cells import Case, Cell, grid
from bench.harness.contest import Contest, kernel_and_torch, models
from hybrid_kv.kernels.common.spans import Spans
from hybrid_kv.kernels.ssd import chunk_scan, chunk_scan_prefill, chunk_scan_prefill_reference

TOLERANCE = 2e-5
ROUNDED = 2.0**-7  # of bfloat16, as a share of the largest value


def scan(seed: int, model: str, num_tokens: int) -> Case:
    """One request, in the model's chunks, from a state; the states after half of its tokens and after all."""
    shape = SHAPES[model]
    g = torch.Generator().manual_seed(seed)

    def normal(*size: int) -> torch.Tensor:
        return torch.randn(*size, generator=g)

    x, dt = normal(1, num_tokens, shape.heads, shape.head_dim), torch.rand(1, num_tokens, shape.heads, generator=g) / 8
    B, C = (normal(1, num_tokens, shape.groups, shape.state_size) for _ in range(2))
    A, D = -torch.rand(shape.heads, generator=g) - 0.5, normal(shape.heads)
    initial = normal(1, shape.heads, shape.head_dim, shape.state_size)
    rows, offsets = torch.zeros(2, dtype=torch.int64), torch.tensor([num_tokens // 2 + 1, num_tokens])
    expected: list[Floats] = []

    def run() -> tuple[torch.Tensor, torch.Tensor]:
        return chunk_scan(x, dt, A, B, C, D, initial, shape.chunk_size, rows, offsets)

    def check() -> float:
        if not expected:
            y, states = recurrence(*(np.asarray(part.double()) for part in (initial, x, dt, A, B, C, D)))
            expected.extend((y, states[0, offsets - 1]))
        return max(
            near(what, part, wanted, TOLERANCE)
            for what, part, wanted in zip(("y", "states"), run(), expected, strict=True)
        )

    return Case(run, check)


def equal_spans(num_tokens: int, num_reqs: int, chunk_size: int, device: str) -> tuple[Spans, torch.Tensor]:
    """Prompts of one length, whose states go to the first blocks; and the blocks that they start from."""
    lengths = torch.full((num_reqs,), num_tokens // num_reqs)
    blocks = torch.arange(1, num_reqs + 1, device=device)
    return Spans(lengths, blocks, chunk_size=chunk_size), blocks + num_reqs


def prompts(seed: int, model: str, num_tokens: int, num_reqs: int, implementation: Any, device: str) -> Case:
    """Prompts back to back, each from a state, and the state behind each; bfloat16 activations."""
    shape = SHAPES[model]
    g = torch.Generator().manual_seed(seed)
    bf16, heads, size = torch.bfloat16, shape.heads, shape.state_size

    def normal(*sizes: int) -> torch.Tensor:
        return torch.randn(*sizes, generator=g)

    x = normal(num_tokens, heads, shape.head_dim).to(bf16)
    dt = (normal(num_tokens, heads) - 3).to(bf16)
    B, C = (normal(num_tokens, shape.groups, size).to(bf16) for _ in range(2))
    dt_bias, A_log, D = (normal(heads) for _ in range(3))
    state = normal(1 + 2 * num_reqs, heads, shape.head_dim, size)
    spans, sources = equal_spans(num_tokens, num_reqs, min(shape.chunk_size, 128), device)
    expected: list[Floats] = []
    on_device = [part.to(device) for part in (state, x, dt, dt_bias, A_log, B, C, D)]
    initial = torch.ones_like(sources, dtype=torch.bool)

    def run() -> torch.Tensor:
        return implementation(*on_device, spans, sources, initial)

    def check() -> float:
        if not expected:
            rows = [np.asarray(part.double()).reshape(num_reqs, -1, *part.shape[1:]) for part in (x, dt, B, C)]
            step = softplus(rows[1] + dt_bias.double().numpy())
            outputs, ends = [], []
            for start in range(num_reqs):  # One request's states at a time are a lot already.
                one = slice(start, start + 1)
                y, states = recurrence(
                    state[sources.cpu()[one]].double().numpy(),
                    rows[0][one],
                    step[one],
                    -np.exp(A_log.double().numpy()),
                    rows[2][one],
                    rows[3][one],
                    D.double().numpy(),
                )
                outputs.append(y)
                ends.append(states[:, -1])
            expected.extend((np.concatenate(outputs), np.concatenate(ends)))
        on_device[0][1 : 1 + num_reqs] = torch.nan
        y = run().double().cpu().view(expected[0].shape)
        written = on_device[0][1 : 1 + num_reqs].double().cpu()
        # Products of operands rounded to bfloat16, the states of chunks among them.
        return max(near("y", y, expected[0], 2 * ROUNDED), near("states", written, expected[1], 2 * ROUNDED))

    return Case(run, check)


def chunk_scans(device: str, model: str, num_tokens: int, num_reqs: int) -> Contest:
    """One layer's scan of a prefill."""
    params = {"model": model, "num_tokens": num_tokens, "num_reqs": num_reqs}
    shape, build = SHAPES[model], partial(prompts, device=device)
    inner, state = shape.heads * shape.head_dim, shape.heads * shape.head_dim * shape.state_size
    moved = num_tokens * 2 * (2 * inner + 2 * shape.groups * shape.state_size + shape.heads) + num_reqs * 2 * 4 * state
    return kernel_and_torch("chunk_scan", params, build, chunk_scan_prefill, chunk_scan_prefill_reference, moved)


def gpu_contests(quick: bool, device: str) -> Iterator[Contest]:
    """Prefills of four requests."""
    for model, num_tokens in product(models(quick), (2048,) if quick else (2048, 8192)):
        yield chunk_scans(device, model, num_tokens, 4)


def cells() -> list[Cell]:
    """Chunks of a prompt on a CPU, four prompts on a GPU."""
    values = {"model": ("nemotron-3-nano-tp8", "granite-4-h-small-tp8"), "num_tokens": (128, 256)}
    packed = {"model": ("nemotron-3-nano", "granite-4-h-small"), "num_tokens": (2048, 8192), "num_reqs": (4,)}
    on_gpu = partial(prompts, implementation=chunk_scan_prefill, device="cuda")
    return [
        *grid("ssd", "chunk_scan", "cpu", scan, values, [("nemotron-3-nano-tp8", 128)]),
        *grid("ssd", "chunk_scan_kernel", "gpu", on_gpu, packed, [("nemotron-3-nano", 2048)]),
    ]

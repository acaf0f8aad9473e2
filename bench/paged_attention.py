"""Attention over kernel blocks, and the writing of K and V before it.

A float32 softmax over n keys errs by about 1e-6 of its largest output; 1e-5 leaves room for n =
4096.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache, partial
from itertools import product
from typing import Any

import numpy as np
import torch

from bench._reference import Floats, attention, near
from bench._shapes import SHAPES
from bench.harness.cells import Case, Cell, grid
from bench.harness.contest import Contest, kernel_and_torch, models
from hybrid_kv.kernels.common.strided import gather_tokens
from hybrid_kv.kernels.paged_attention import (
    attend_tokens,
    attention_mask,
    paged_attention_varlen,
    token_index,
    write_kv,
)

TOLERANCE = 1e-5
ROUNDED = 2.0**-7  # of bfloat16, as a share of the largest value
BLOCK_SIZE = 64  # of a kernel block
PAGE = 16  # the same on a GPU


def write(seed: int, model: str, num_tokens: int) -> Case:
    """Build the writing of K and V of a step's tokens into the slots of their blocks.

    Two of the tokens are padding.
    """
    from hybrid_kv.kernels.paged_attention import slot_cells  # which older versions lack

    shape = SHAPES[model]
    g = torch.Generator().manual_seed(seed)
    new = [torch.randn(num_tokens, shape.kv_heads, shape.head_size, generator=g) for _ in range(2)]
    blocks = 2 * num_tokens // BLOCK_SIZE + 1
    caches = [torch.zeros(blocks, BLOCK_SIZE, shape.kv_heads, shape.head_size) for _ in range(2)]
    slots = torch.randperm(blocks * BLOCK_SIZE, generator=g)[:num_tokens]
    slots[-2:] = -1

    def run() -> None:
        write_kv(*new, *caches, slot_cells(slots, BLOCK_SIZE))

    def check() -> float:
        for part in caches:
            part.zero_()
        run()
        for tokens, part in zip(new, caches, strict=True):
            wanted = np.zeros((blocks * BLOCK_SIZE, shape.kv_heads, shape.head_size))
            wanted[slots[:-2]] = tokens[:-2]
            near("cache", part.view(wanted.shape), wanted, 0.0)
        return 0.0

    return Case(run, check)


def pages(
    seed: int,
    model: str,
    num_reqs: int,
    length: int,
    context: int,
    implementation: Any,
    device: str,
    dtype: torch.dtype = torch.bfloat16,
    block_size: int = PAGE,
) -> Case:
    """Build the attention of `length` queries of each request over `context` tokens.

    The context includes the queries' own tokens; its pages lie all over the cache.
    """
    shape = SHAPES[model]
    g = torch.Generator().manual_seed(seed)
    count = context // block_size
    key, value = (
        torch.randn(num_reqs, context, shape.kv_heads, shape.head_size, generator=g).to(dtype)
        for _ in "kv"
    )
    query = torch.randn(num_reqs, length, shape.query_heads, shape.head_size, generator=g).to(dtype)
    table = 1 + torch.randperm(num_reqs * count, generator=g).view(num_reqs, count)
    caches = []
    for tokens in (key, value):
        blocks = torch.full(
            (1 + num_reqs * count, block_size, *tokens.shape[2:]), torch.nan, dtype=dtype
        )
        blocks[table.view(-1)] = tokens.reshape(-1, *blocks.shape[1:])
        caches.append(blocks.to(device))
    positions = torch.arange(context - length, context).repeat(num_reqs, 1)
    starts = (torch.arange(num_reqs + 1) * length).int()
    totals = torch.full((num_reqs,), context, dtype=torch.int32)
    on_device = [part.to(device) for part in (query, table.int(), positions, starts, totals)]
    scale = shape.head_size**-0.5

    @cache
    def expected() -> Floats:
        rows = (np.asarray(part.double()) for part in (query, key, value))
        return np.stack([attention(*row, scale) for row in zip(*rows, strict=True)])

    def run() -> torch.Tensor:
        return implementation(*on_device, *caches, scale)

    def check() -> float:
        tolerance = TOLERANCE if dtype == torch.float32 else ROUNDED
        return near("output", run().double().cpu().view(expected().shape), expected(), tolerance)

    return Case(run, check)


def by_kernel(query, block_table, positions, starts, totals, key_cache, value_cache, scale):  # type: ignore[no-untyped-def]
    """Compute `pages` in one launch."""
    length = query.shape[1]
    return paged_attention_varlen(
        query.flatten(0, 1), key_cache, value_cache, block_table, starts, totals, length, scale
    )


def by_torch(query, block_table, positions, starts, totals, key_cache, value_cache, scale):  # type: ignore[no-untyped-def]
    """Compute `pages` by torch's own operations."""
    num_keys = int(positions.max()) + 1
    index = token_index(key_cache, block_table, positions[:, -1], num_keys)
    key, value = (
        gather_tokens(cache, index).unflatten(0, (-1, num_keys))
        for cache in (key_cache, value_cache)
    )
    mask = attention_mask(positions, num_keys, query.shape[2] // key.shape[2], query.dtype)
    return attend_tokens(query, key, value, mask, scale)


def attentions(device: str, model: str, num_reqs: int, length: int, context: int) -> Contest:
    """Return the contest of a decode or of a chunk after a context."""
    params = {"model": model, "num_reqs": num_reqs, "length": length, "context": context}
    shape = SHAPES[model]
    per_token = shape.head_size * 2
    moved = num_reqs * per_token * 2 * (context * shape.kv_heads + length * shape.query_heads)
    return kernel_and_torch(
        "paged_attention", params, partial(pages, device=device), by_kernel, by_torch, moved
    )


def gpu_contests(quick: bool, device: str) -> Iterator[Contest]:
    """Yield contests of decodes, and of a chunk after a context."""
    decodes = ((128, 1, 2048), (128, 4, 2048), (1, 2048, 4096))
    for model, (num_reqs, length, context) in product(
        models(quick), decodes[:1] if quick else decodes
    ):
        yield attentions(device, model, num_reqs, length, context)


def cells() -> list[Cell]:
    """Return the cells of decodes and of a chunk after a context, on a CPU and a GPU.

    The writing is on a CPU.

    Only the chunk is in quick runs: in the others, which touch scattered pages, pairs of equal code
    differ by 5 %.
    """
    models = ("nemotron-3-nano-tp8",)
    decodes = {"model": models, "num_reqs": (8,), "length": (1, 4), "context": (512, 2048)}
    chunks = {"model": models, "num_reqs": (1,), "length": (256,), "context": (512, 2048)}
    full = ("nemotron-3-nano", "granite-4-h-small")
    steps = {"model": full, "num_reqs": (128,), "length": (1, 4), "context": (2048,)}
    prompts = {"model": full, "num_reqs": (1,), "length": (2048,), "context": (4096,)}
    on_cpu = partial(
        pages, implementation=by_torch, device="cpu", dtype=torch.float32, block_size=BLOCK_SIZE
    )
    on_gpu = partial(pages, implementation=by_kernel, device="cuda")
    return [
        *grid("paged_attention", "decode", "cpu", on_cpu, decodes),
        *grid(
            "paged_attention",
            "chunk",
            "cpu",
            on_cpu,
            chunks,
            [("nemotron-3-nano-tp8", 1, 256, 512)],
        ),
        *grid(
            "paged_attention", "write_kv", "cpu", write, {"model": models, "num_tokens": (64, 2048)}
        ),
        *grid("paged_attention", "decode_kernel", "gpu", on_gpu, steps, [(full[0], 128, 1)]),
        *grid("paged_attention", "chunk_kernel", "gpu", on_gpu, prompts),
    ]

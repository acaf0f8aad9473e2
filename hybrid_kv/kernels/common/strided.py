"""Blocks at any stride, read and written at the speed of a copy on a CPU.

A layer's view of the cache is [num_blocks, tokens, …] with the gaps that other layers' pages leave.
Indexing it by block and token moves one element at a time; `index_select` on one dimension moves
whole tokens.
"""

from __future__ import annotations

import math
from contextlib import suppress

import torch


def spacing(cache: torch.Tensor) -> tuple[int, int, int]:
    """Return the unit of the list that `gather_tokens` reads, and its steps per block and token.

    The unit is in elements; a block and a token are as many units apart as the other two say.
    """
    block_stride, token_stride = cache.stride()[:2]
    unit = math.gcd(block_stride, token_stride)
    return unit, block_stride // unit, token_stride // unit


def token_places(cache: torch.Tensor, blocks: torch.Tensor, offsets: torch.Tensor) -> torch.Tensor:
    """Return the places at which `gather_tokens` finds the tokens at `offsets` of `blocks`.

    Args:
        blocks, offsets: int64 of any one shape.
    """
    _, per_block, per_token = spacing(cache)
    return blocks * per_block + offsets * per_token


def gather_tokens(cache: torch.Tensor, places: torch.Tensor) -> torch.Tensor:
    """Return the tokens of a cache [num_blocks, tokens, …] at `places` [n]: [n, …].

    The cache is read as one list with a place wherever a token may begin; its elements overlap
    where blocks lie at no multiple of a token.
    """
    if cache.dtype.is_floating_point and cache.dtype.itemsize == 1:  # torch selects no float8
        return gather_tokens(cache.view(torch.int8), places).view(cache.dtype)
    unit, per_block, per_token = spacing(cache)
    length = (len(cache) - 1) * per_block + (cache.shape[1] - 1) * per_token + 1
    return cache.as_strided((length, *cache.shape[2:]), (unit, *cache.stride()[2:])).index_select(
        0, places
    )


def put_tokens(
    cache: torch.Tensor, cells: tuple[torch.Tensor, torch.Tensor], values: torch.Tensor
) -> None:
    """Assign `cache[cells] = values`, in the cache's dtype.

    Of a float of 8 bits the largest number stands for all beyond it: a cast alone makes infinities
    of them in float8_e5m2.
    """
    if cache.dtype.is_floating_point and cache.dtype.itemsize == 1:  # torch indexes no float8
        limit = torch.finfo(cache.dtype).max
        values = values.clamp(-limit, limit).to(cache.dtype).view(torch.int8)
        cache = cache.view(torch.int8)
    cache.index_put_(cells, values)


def copy_blocks(pool: torch.Tensor, blocks: torch.Tensor, values: torch.Tensor) -> None:
    """Assign `pool[blocks] = values`, of one dtype.

    Of a block that occurs twice either value may stay.
    """
    if pool.dtype.itemsize == 1:  # torch copies no blocks of float8
        pool = pool.view(torch.int8)
        values = values.view(torch.int8)
    with suppress(RuntimeError):  # a size or stride is no multiple of 16 bytes
        # torch copies element by element here: those of 16 bytes take a third of the time of
        # float32.
        wide_pool = pool.view(torch.complex128)
        values = values.view(torch.complex128)
        pool = wide_pool
    pool.index_copy_(0, blocks, values)

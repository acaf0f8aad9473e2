"""Storing K and V in slots, and attention over the blocks of rows back to back: one launch each."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import torch

from hybrid_kv.kernels.common.integers import cdiv, next_power_of_2
from hybrid_kv.kernels.common.interpreter import is_interpreter
from hybrid_kv.kernels.common.launch import FLOATS, INTS, check, check_dims, jit, warp_size

if TYPE_CHECKING:
    import triton.language as tl

MAX_ROWS = 64  # (query, head) pairs of a program
BLOCK_N = 32  # keys that it looks at together; with 64 of them sm_80 and gfx942 spill


def _store_kv(
    key: tl.tensor,
    value: tl.tensor,
    key_cache: tl.tensor,
    value_cache: tl.tensor,
    slots: tl.tensor,
    key_stride: tl.tensor,
    value_stride: tl.tensor,
    key_block_stride: tl.tensor,
    value_block_stride: tl.tensor,
    key_token_stride: tl.tensor,
    value_token_stride: tl.tensor,
    BLOCK_SIZE: tl.constexpr,
    WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    # One program a token: its K and V are WIDTH contiguous elements on both sides.
    token = tl.program_id(0).to(tl.int64)
    slot = tl.load(slots + token).to(tl.int64)
    if slot >= 0:
        block = slot // BLOCK_SIZE
        offset = slot % BLOCK_SIZE
        i = tl.arange(0, BLOCK)
        inside = (i < WIDTH) | (WIDTH == BLOCK)
        k = tl.load(key + token * key_stride + i, mask=inside)
        v = tl.load(value + token * value_stride + i, mask=inside)
        key_cache += block * key_block_stride + offset * key_token_stride
        value_cache += block * value_block_stride + offset * value_token_stride
        tl.store(key_cache + i, k, mask=inside)
        tl.store(value_cache + i, v, mask=inside)


def cache_strides(key_cache: torch.Tensor, value_cache: torch.Tensor) -> tuple[int, int, int, int]:
    """Return the elements from block to block of both caches, and then from token to token."""
    return key_cache.stride(0), value_cache.stride(0), key_cache.stride(1), value_cache.stride(1)


def store_kv(
    key: torch.Tensor,
    value: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    slots: torch.Tensor,
) -> None:
    """Run `write_kv` in one launch, without waiting for the device.

    Args:
        key, value: [num_tokens, num_kv_heads, head_size] float32, bfloat16 or float16, tokens at
            any stride.
        key_cache, value_cache: [num_kernel_blocks, kernel_block_size, num_kv_heads, head_size] of
            the same dtype, blocks and tokens at any stride.
        slots: [num_tokens] int32 or int64; a negative one stores nothing. No slot may occur twice.

    Raises:
        ValueError: a shape, dtype, device or stride is none of these.
    """
    check_dims(key=(key, 3), key_cache=(key_cache, 4))
    tokens, heads, size = key.shape
    check("key", key, key.shape, FLOATS, key.device, free=1)
    check("value", value, (tokens, heads, size), (key.dtype,), key.device, free=1)
    for name, tensor in (("key_cache", key_cache), ("value_cache", value_cache)):
        check(name, tensor, (*key_cache.shape[:2], heads, size), (key.dtype,), key.device, free=2)
    check("slots", slots, (tokens,), INTS, key.device)
    if not tokens:
        return
    jit(_store_kv)[(tokens,)](
        *(key, value, key_cache, value_cache, slots),
        *(key.stride(0), value.stride(0), *cache_strides(key_cache, value_cache)),
        BLOCK_SIZE=key_cache.shape[1],
        WIDTH=heads * size,
        BLOCK=next_power_of_2(heads * size),
        num_warps=1 if heads * size <= 512 else 4,
    )


def _attention(
    query: tl.tensor,
    key_cache: tl.tensor,
    value_cache: tl.tensor,
    out: tl.tensor,
    block_table: tl.tensor,
    query_start_loc: tl.tensor,
    seq_lens: tl.tensor,
    sinks: tl.tensor,
    scale: tl.tensor,
    query_stride: tl.tensor,
    table_stride: tl.tensor,
    key_block_stride: tl.tensor,
    value_block_stride: tl.tensor,
    key_token_stride: tl.tensor,
    value_token_stride: tl.tensor,
    HEADS: tl.constexpr,
    PER_KV: tl.constexpr,
    HEAD_SIZE: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    GRID: tl.constexpr,
    WINDOW: tl.constexpr,
    HAS_SINKS: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr,
    UPCAST: tl.constexpr,
) -> None:
    # A program has BLOCK_M (query, head) pairs of one row that share a head of K and V, so that K
    # and V are loaded once for all of them: in a decode that is what the time goes into, and PER_KV
    # heads fill the tensor core's 16 rows.
    kv_head = tl.program_id(1)
    row = tl.program_id(2)
    start = tl.load(query_start_loc + row).to(tl.int64)
    length = (tl.load(query_start_loc + row + 1) - start).to(tl.int32)
    # The last tile has the longest way to go and is started first.
    tile = tl.num_programs(0) - 1 - tl.program_id(0)
    table = block_table + row.to(tl.int64) * table_stride
    # Padding stands on the null block, whose content is undefined. So do blocks before a window:
    # only the last one tells.
    newest = 0
    if WINDOW:
        newest = (tl.load(seq_lens + row).to(tl.int32) - 1) // BLOCK_SIZE
    if (tile * BLOCK_M < length * PER_KV) & (tl.load(table + newest) != 0):
        pair = tile * BLOCK_M + tl.arange(0, BLOCK_M)
        token = pair // PER_KV
        head = kv_head * PER_KV + pair % PER_KV
        total = tl.load(seq_lens + row).to(tl.int32)
        position = total - length + token
        d = tl.arange(0, BLOCK_D)
        in_d = (d < HEAD_SIZE) | (HEAD_SIZE == BLOCK_D)
        real = (token < length)[:, None] & in_d[None, :]
        inside = head[:, None] * HEAD_SIZE + d[None, :]
        q = tl.load(query + (start + token)[:, None] * query_stride + inside, mask=real, other=0.0)
        if UPCAST:
            q = q.to(tl.float32)
        key_cache += kv_head * HEAD_SIZE
        value_cache += kv_head * HEAD_SIZE

        best = tl.full([BLOCK_M], float("-inf"), tl.float32)
        weight = tl.zeros([BLOCK_M], tl.float32)
        acc = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
        if HAS_SINKS:
            # Before any key, and once: a score without a value. The base of exponentials is 2.
            best = tl.load(sinks + head).to(tl.float32) * 1.4426950408889634
            weight += 1.0
        # No query of the tile sees further than its last one.
        stop = tl.minimum(total, total - length + (tile * BLOCK_M + BLOCK_M - 1) // PER_KV + 1)
        # And none sees tokens before the window of its first one.
        lowest = 0
        if WINDOW:
            lowest = tl.maximum(total - length + tile * BLOCK_M // PER_KV - WINDOW + 1, 0)
        for first in range(lowest, stop, BLOCK_N):
            n = first + tl.arange(0, BLOCK_N)
            known = n < stop
            if GRID:
                known &= n % GRID != 0
            # Block ids are widened before they are multiplied: a pool passes 2^31 elements. What is
            # not known is not loaded either: it may hold NaN, which a weight of 0 does not stop.
            block = tl.load(table + n // BLOCK_SIZE, mask=known, other=0).to(tl.int64)
            offset = n % BLOCK_SIZE
            at_key = block * key_block_stride + offset * key_token_stride
            in_key = in_d[:, None] & known[None, :]
            k = tl.load(key_cache + at_key[None, :] + d[:, None], mask=in_key, other=0.0)
            at_value = block * value_block_stride + offset * value_token_stride
            in_value = known[:, None] & in_d[None, :]
            v = tl.load(value_cache + at_value[:, None] + d[None, :], mask=in_value, other=0.0)
            if UPCAST:
                k = k.to(tl.float32)
                v = v.to(tl.float32)
            # "ieee", or float32 would be cut to tf32.
            scores = tl.dot(q, k, input_precision="ieee")
            seen = known[None, :] & (n[None, :] <= position[:, None])
            if WINDOW:
                seen &= n[None, :] > position[:, None] - WINDOW
            # `scale` includes log2(e), the base of the exponentials being 2.
            scores = tl.where(seen, scores * scale, float("-inf"))
            new = tl.maximum(best, tl.max(scores, 1))
            # A query that has seen no key yet has -inf - -inf.
            base = tl.where(new == float("-inf"), 0.0, new)
            p = tl.exp2(scores - base[:, None])
            fade = tl.exp2(best - base)
            weight = weight * fade + tl.sum(p, 1)
            acc = acc * fade[:, None]
            acc = tl.dot(p.to(v.dtype), v, acc, input_precision="ieee")
            best = new
        acc = acc / tl.where(weight == 0.0, 1.0, weight)[:, None]
        to = out + (start + token)[:, None] * (HEADS * HEAD_SIZE) + inside
        tl.store(to, acc.to(out.dtype.element_ty), mask=real)


def paged_attention_varlen(
    query: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    block_table: torch.Tensor,
    query_start_loc: torch.Tensor,
    seq_lens: torch.Tensor,
    max_query_len: int,
    scale: float,
    grid: int = 0,
    window: int = 0,
    sinks: torch.Tensor | None = None,
) -> torch.Tensor:
    """Attend causally from each row's queries to the row's blocks.

    There is one launch, for decodes as for prefills.

    The tokens of row r are `query_start_loc[r] … query_start_loc[r + 1] - 1`, the last ones of its
    `seq_lens[r]`, whose K and V are all in the cache. Rows whose first block is the null block 0
    are padding; with a window, whose last one is.

    Args:
        query: [num_tokens, num_heads, head_size] float32, bfloat16 or float16, tokens at any
            stride.
        key_cache, value_cache: [num_kernel_blocks, kernel_block_size, num_kv_heads, head_size] of
            the same dtype, blocks and tokens at any stride.
        block_table: [num_rows, num_blocks] int32 or int64, rows at any stride; covers each row's
            `seq_lens` tokens.
        query_start_loc: [num_rows + 1] int32 or int64 from 0, never falling.
        seq_lens: [num_rows] int32 or int64, tokens after this step.
        max_query_len: of all rows; a larger number costs programs without work.
        grid: keys at its multiples are hidden (`models.mtp`); a query that sees no key gets zeros.
            0: there is no grid.
        window: tokens that a query sees, its own included; blocks wholly before the window of a
            row's first query are not read. 0: all.
        sinks: [num_heads] float32, bfloat16 or float16, a score of each head that is in the
            softmax of every query and has no value (gpt-oss, arXiv 2508.10925). None: there are
            none.

    Returns:
        [num_tokens, num_heads, head_size], contiguous. Rows of padding and tokens of no row are not
        written.

    Raises:
        ValueError: a shape, dtype, device, stride or number is none of these.
    """
    device = query.device
    check_dims(query=(query, 3), key_cache=(key_cache, 4), block_table=(block_table, 2))
    tokens, heads, size = query.shape
    blocks, block_size, kv_heads = key_cache.shape[:3]
    if kv_heads < 1 or heads % kv_heads:
        raise ValueError(f"{kv_heads} heads of K do not divide {heads} heads of the query")
    if max_query_len < 1 or grid < 0 or window < 0:
        raise ValueError(
            f"max_query_len={max_query_len} must be >= 1, grid={grid} and window={window} >= 0"
        )
    check("query", query, (tokens, heads, size), FLOATS, device, free=1)
    for name, cache in (("key_cache", key_cache), ("value_cache", value_cache)):
        check(name, cache, (blocks, block_size, kv_heads, size), (query.dtype,), device, free=2)
    rows, width = block_table.shape
    check("block_table", block_table, (rows, width), INTS, device, free=1)
    check("query_start_loc", query_start_loc, (rows + 1,), INTS, device)
    check("seq_lens", seq_lens, (rows,), INTS, device)
    if sinks is not None:
        check("sinks", sinks, (heads,), FLOATS, device)
    out = torch.empty_like(query, memory_format=torch.contiguous_format)
    # The interpreter would multiply raw bits.
    upcast = query.dtype == torch.bfloat16 and is_interpreter()
    per_kv = heads // kv_heads
    # As many pairs as there are; the tensor core takes 16.
    block_m = min(MAX_ROWS, max(16, next_power_of_2(per_kv * max_query_len)))
    jit(_attention)[(cdiv(max_query_len * per_kv, block_m), kv_heads, rows)](
        *(query, key_cache, value_cache, out, block_table, query_start_loc, seq_lens),
        query if sinks is None else sinks,
        scale * math.log2(math.e),
        *(query.stride(0), block_table.stride(0), *cache_strides(key_cache, value_cache)),
        HEADS=heads,
        PER_KV=per_kv,
        HEAD_SIZE=size,
        BLOCK_SIZE=block_size,
        GRID=grid,
        WINDOW=window,
        HAS_SINKS=sinks is not None,
        BLOCK_M=block_m,
        BLOCK_N=BLOCK_N,
        BLOCK_D=max(16, next_power_of_2(size)),
        UPCAST=upcast,
        num_warps=4,
        # With two of them sm_80 spills, with three gfx942.
        num_stages=3 if warp_size() == 32 else 2,
    )
    return out

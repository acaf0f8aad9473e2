"""K and V of tokens in blocks: storing them in slots, and causal attention over the blocks of a row.

In plain torch: `write_kv` and `paged_attention` over rows padded to one length, what a CPU runs; and
`paged_attention_varlen_reference`. As Triton kernels, one launch each: `store_kv`, and `paged_attention_varlen` over
rows whose tokens lie back to back. Caches are [num_kernel_blocks, kernel_block_size, num_kv_heads, head_size] views
whose blocks and tokens lie at any stride, so that every layout of `cache.layout` is read where it is.
"""

from __future__ import annotations

import math
from functools import lru_cache
from typing import TYPE_CHECKING, NamedTuple

import torch
import torch.nn.functional as F

from hybrid_kv.kernels.common.integers import cdiv, next_power_of_2
from hybrid_kv.kernels.common.launch import FLOATS, INTS, AotCase, check, jit
from hybrid_kv.kernels.common.strided import gather_tokens, spacing

if TYPE_CHECKING:
    import triton.language as tl

MAX_ROWS = 64  # (query, head) pairs of a program
BLOCK_N = 32  # keys that it looks at together; with 64 of them sm_80 and gfx942 spill
FOLDED_QUERIES = 16  # of a row, up to which heads that share K and V count as queries of one
NUM_STAGES = 3  # with two of them sm_80 spills


# ---- plain torch ----


class SlotCells(NamedTuple):
    """Where a step's tokens go in caches of one kernel block size."""

    kept: torch.Tensor | None  # [num_tokens] bool, tokens that have a slot; None if all have
    cells: tuple[torch.Tensor, torch.Tensor]  # kernel block and offset of those, int64


def slot_cells(slots: torch.Tensor, block_size: int) -> SlotCells:
    """What `write_kv` wants of slots [num_tokens] int64; a negative one is padding, or another rank's token."""
    valid = slots >= 0
    kept = None if bool(valid.all()) else valid
    slots = slots if kept is None else slots[kept]
    return SlotCells(kept, (slots // block_size, slots % block_size))


def write_kv(
    key: torch.Tensor, value: torch.Tensor, key_cache: torch.Tensor, value_cache: torch.Tensor, to: SlotCells
) -> None:
    """Store one K and V per token that has a slot.

    Args:
        key, value: [num_tokens, num_kv_heads, head_size].
        key_cache, value_cache: [num_kernel_blocks, kernel_block_size, num_kv_heads, head_size], strided views.
        to: of the tokens, for this kernel block size.
    """
    if to.kept is not None:
        key, value = key[to.kept], value[to.kept]
    key_cache.index_put_(to.cells, key)
    value_cache.index_put_(to.cells, value)


def token_index(
    cache: torch.Tensor, block_table: torch.Tensor, last: torch.Tensor, num_keys: int, grid: int | None = None
) -> torch.Tensor:
    """Places of the first `num_keys` tokens of each row for `strided.gather_tokens`, [num_rows * num_keys] int64.

    Behind a row's last token stands that token again. So nothing is read that no query of the row may see: a mask does
    not stop NaN (0 * NaN), and unused slots hold whatever another layer's state left in the page.

    Args:
        cache: any with the strides of those to gather from.
        block_table: [num_rows, num_blocks] int32 or int64.
        last: [num_rows] int64, position of each row's last token.
        grid: tokens at multiples of it are not read either: the last one stands there, too.
    """
    _, per_block, per_token = spacing(cache)
    block_size = cache.shape[1]
    # By blocks: a division per key would cost as much as the gather.
    starts = block_table[:, : cdiv(num_keys, block_size)].long() * per_block
    places = starts.unsqueeze(-1) + _multiples(block_size, per_token, last.device)
    read = torch.minimum(_keys(next_power_of_2(num_keys), grid, last.device)[:num_keys], last.unsqueeze(1))
    return places.flatten(1).gather(1, read).flatten()


def attention_mask(
    positions: torch.Tensor, num_keys: int, per_kv_head: int, dtype: torch.dtype, grid: int | None = None
) -> torch.Tensor:
    """What `attend_tokens` adds to the scores: 0 for the keys up to a query's own beside the grid, -inf for the others.

    Args:
        positions: [num_rows, len] int64, of the queries.
        per_kv_head: query heads that share a K and V.
        dtype: of the queries.

    Returns:
        [num_rows, 1, len, num_keys], or for few queries [num_rows, 1, len * per_kv_head, num_keys].
    """
    size, device = next_power_of_2(num_keys), positions.device
    row = size - 1 - positions
    if 1 < positions.shape[1] <= FOLDED_QUERIES:
        row = row.unsqueeze(-1).expand(-1, -1, per_kv_head)
    mask = _causal_rows(size, dtype, device)[:, :num_keys].index_select(0, row.flatten())
    if grid is not None:
        mask += _off_grid(size, grid, dtype, device)[:num_keys]
    return mask.view(len(positions), 1, -1, num_keys)


# What every step reads, for a few sizes. Each small operation on a CPU takes as long as the copy of 30 KB.


@lru_cache(64)
def _multiples(count: int, unit: int, device: torch.device) -> torch.Tensor:
    return torch.arange(0, count * unit, unit, device=device)


@lru_cache(64)
def _keys(size: int, grid: int | None, device: torch.device) -> torch.Tensor:
    """[size] int64, positions of keys; on the grid one beyond all."""
    place = torch.arange(size, device=device)
    return place if grid is None else place.masked_fill_(place % grid == 0, torch.iinfo(torch.int64).max)


@lru_cache(64)
def _off_grid(size: int, grid: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """[size], -inf at multiples of `grid`, else 0."""
    place = torch.arange(size, device=device)
    return torch.zeros(size, dtype=dtype, device=device).masked_fill_(place % grid == 0, -torch.inf)


@lru_cache(64)
def _causal_rows(size: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """[size, size], row r for a query at position `size - 1 - r`; all of them lie in one line of 2 * size."""
    line = torch.zeros(2 * size, dtype=dtype, device=device)
    line[size:] = -torch.inf
    return line.as_strided((size, size), (1, 1))


def attend_tokens(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, mask: torch.Tensor | None, scale: float
) -> torch.Tensor:
    """Attention of each row's queries over its own keys, grouped-query heads included.

    Args:
        query: [num_rows, len, num_heads, head_size].
        key, value: [num_rows, num_keys, num_kv_heads, head_size], finite.
        mask: `attention_mask` of keys of which each query sees at least one; None if every query sees every key.

    Returns:
        [num_rows, len, num_heads, head_size].
    """
    rows, length, heads, size = query.shape
    kv_heads = key.shape[2]
    key, value = key.transpose(1, 2), value.transpose(1, 2)
    if length > FOLDED_QUERIES:
        grouped = heads != kv_heads
        out = F.scaled_dot_product_attention(query.transpose(1, 2), key, value, mask, scale=scale, enable_gqa=grouped)
        return out.transpose(1, 2)
    # The heads that share K and V are queries of one head: nothing is copied, and K and V are read once for all.
    folded = query.view(rows, length, kv_heads, -1, size).transpose(1, 2).reshape(rows, kv_heads, -1, size)
    out = F.scaled_dot_product_attention(folded, key, value, mask, scale=scale)
    return out.view(rows, kv_heads, length, -1, size).transpose(1, 2).reshape(query.shape)


def paged_attention(
    query: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    block_table: torch.Tensor,
    positions: torch.Tensor,
    scale: float,
    grid: int | None = None,
) -> torch.Tensor:
    """Causal attention of each row's queries over its own blocks, grouped-query heads included.

    Args:
        query: [num_rows, len, num_heads, head_size].
        block_table: [num_rows, num_blocks] int32, kernel blocks; must cover every position.
        positions: [num_rows, len] int64; a query sees the tokens at positions up to its own. Padding may have any
            position >= 0: it then sees at least one key, so that no row of the softmax is empty.
        grid: nobody sees the tokens at multiples of it, see `models.nemotron_h_mtp`.

    Returns:
        [num_rows, len, num_heads, head_size]; zeros for a query that sees no token.
    """
    last = positions.amax(1)
    num_keys = int(last.max()) + 1
    index = token_index(key_cache, block_table, last, num_keys, grid)
    key, value = (gather_tokens(cache, index).unflatten(0, (-1, num_keys)) for cache in (key_cache, value_cache))
    mask = attention_mask(positions, num_keys, query.shape[2] // key.shape[2], query.dtype, grid)
    out = attend_tokens(query, key, value, mask, scale)
    return out if grid is None else out.masked_fill(sees_nothing(positions, grid)[..., None, None], 0)


def sees_nothing(positions: torch.Tensor, grid: int) -> torch.Tensor:
    """Which queries have no key beside the grid, of the shape of `positions`: a softmax over nothing is NaN."""
    # Position 0 is on every grid, position 1 on that of 1 alone.
    return positions == 0 if grid > 1 else torch.ones_like(positions, dtype=torch.bool)


# ---- store ----


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
        block, offset = slot // BLOCK_SIZE, slot % BLOCK_SIZE
        i = tl.arange(0, BLOCK)
        inside = (i < WIDTH) | (WIDTH == BLOCK)
        k = tl.load(key + token * key_stride + i, mask=inside)
        v = tl.load(value + token * value_stride + i, mask=inside)
        key_cache += block * key_block_stride + offset * key_token_stride
        value_cache += block * value_block_stride + offset * value_token_stride
        tl.store(key_cache + i, k, mask=inside)
        tl.store(value_cache + i, v, mask=inside)


def store_kv(
    key: torch.Tensor, value: torch.Tensor, key_cache: torch.Tensor, value_cache: torch.Tensor, slots: torch.Tensor
) -> None:
    """`write_kv` in one launch, without waiting for the device.

    Args:
        key, value: [num_tokens, num_kv_heads, head_size] float32, bfloat16 or float16, tokens at any stride.
        key_cache, value_cache: [num_kernel_blocks, kernel_block_size, num_kv_heads, head_size] of the same dtype,
            blocks and tokens at any stride.
        slots: [num_tokens] int32 or int64; a negative one stores nothing. No slot may occur twice.

    Raises:
        ValueError: a shape, dtype, device or stride is none of these.
    """
    if key.dim() != 3 or key_cache.dim() != 4:
        shapes = tuple(key.shape), tuple(key_cache.shape)
        raise ValueError(f"key and key_cache have shapes {shapes}; they must have 3 and 4 dimensions")
    tokens, heads, size = key.shape
    cache_shape = (*key_cache.shape[:2], heads, size)
    check("key", key, (tokens, heads, size), FLOATS, key.device, free=1)
    check("value", value, (tokens, heads, size), (key.dtype,), key.device, free=1)
    for name, tensor in (("key_cache", key_cache), ("value_cache", value_cache)):
        check(name, tensor, cache_shape, (key.dtype,), key.device, free=2)
    check("slots", slots, (tokens,), INTS, key.device)
    if not tokens:
        return
    jit(_store_kv)[(tokens,)](
        key,
        value,
        key_cache,
        value_cache,
        slots,
        key.stride(0),
        value.stride(0),
        key_cache.stride(0),
        value_cache.stride(0),
        key_cache.stride(1),
        value_cache.stride(1),
        BLOCK_SIZE=key_cache.shape[1],
        WIDTH=heads * size,
        BLOCK=next_power_of_2(heads * size),
        num_warps=1 if heads * size <= 512 else 4,
    )


# ---- attention ----


def paged_attention_varlen_reference(
    query: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    block_table: torch.Tensor,
    query_start_loc: torch.Tensor,
    seq_lens: torch.Tensor,
    max_query_len: int,
    scale: float,
    grid: int = 0,
) -> torch.Tensor:
    """`paged_attention_varlen` in plain torch, row by row in float32; tokens of no row come out as zeros."""
    out = torch.zeros_like(query, memory_format=torch.contiguous_format)
    block_size, per_kv = key_cache.shape[1], query.shape[1] // key_cache.shape[2]
    starts, lens = query_start_loc.tolist(), seq_lens.tolist()
    for row, (start, stop, total) in enumerate(zip(starts, starts[1:], lens, strict=False)):
        if stop == start or int(block_table[row, 0]) == 0:
            continue
        place = torch.arange(total, device=query.device)
        blocks = block_table[row].long()[place // block_size]
        seen = place <= torch.arange(total - (stop - start), total, device=query.device)[:, None]
        if grid:
            seen &= place % grid != 0
        key, value = (
            cache[blocks, place % block_size].float().repeat_interleave(per_kv, 1) for cache in (key_cache, value_cache)
        )
        # What nobody sees may hold NaN, which a weight of 0 does not stop.
        unseen = ~seen.any(0)[:, None, None]
        key, value = key.masked_fill(unseen, 0), value.masked_fill(unseen, 0)
        scores = torch.einsum("thd,shd->hts", query[start:stop].float(), key) * scale
        weights = scores.masked_fill(~seen, -torch.inf).softmax(-1).masked_fill(~seen, 0)
        out[start:stop] = torch.einsum("hts,shd->thd", weights, value).to(out.dtype)
    return out


def _attention(
    query: tl.tensor,
    key_cache: tl.tensor,
    value_cache: tl.tensor,
    out: tl.tensor,
    block_table: tl.tensor,
    query_start_loc: tl.tensor,
    seq_lens: tl.tensor,
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
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr,
    UPCAST: tl.constexpr,
) -> None:
    # A program has BLOCK_M (query, head) pairs of one row that share a head of K and V, so that K and V are loaded once
    # for all of them: in a decode that is what the time goes into, and PER_KV heads fill the tensor core's 16 rows.
    kv_head = tl.program_id(1)
    row = tl.program_id(2)
    start = tl.load(query_start_loc + row).to(tl.int64)
    length = (tl.load(query_start_loc + row + 1) - start).to(tl.int32)
    # The last tile has the longest way to go and is started first.
    tile = tl.num_programs(0) - 1 - tl.program_id(0)
    table = block_table + row.to(tl.int64) * table_stride
    # Padding stands on the null block, whose content is nobody's.
    if (tile * BLOCK_M < length * PER_KV) & (tl.load(table) != 0):
        pair = tile * BLOCK_M + tl.arange(0, BLOCK_M)
        token, head = pair // PER_KV, kv_head * PER_KV + pair % PER_KV
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
        # Nobody in the tile sees further than its last query.
        stop = tl.minimum(total, total - length + (tile * BLOCK_M + BLOCK_M - 1) // PER_KV + 1)
        for first in range(0, stop, BLOCK_N):
            n = first + tl.arange(0, BLOCK_N)
            known = n < stop
            if GRID:
                known &= n % GRID != 0
            # Block ids are widened before they are multiplied: a pool passes 2^31 elements. What is not known is not
            # loaded either: it may hold NaN, which a weight of 0 does not stop.
            block = tl.load(table + n // BLOCK_SIZE, mask=known, other=0).to(tl.int64)
            offset = n % BLOCK_SIZE
            at_key = block * key_block_stride + offset * key_token_stride
            k = tl.load(key_cache + at_key[None, :] + d[:, None], mask=in_d[:, None] & known[None, :], other=0.0)
            at_value = block * value_block_stride + offset * value_token_stride
            v = tl.load(value_cache + at_value[:, None] + d[None, :], mask=known[:, None] & in_d[None, :], other=0.0)
            if UPCAST:
                k, v = k.to(tl.float32), v.to(tl.float32)
            # "ieee", or float32 would be cut to tf32.
            scores = tl.dot(q, k, input_precision="ieee")
            seen = known[None, :] & (n[None, :] <= position[:, None])
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


def _constexprs(
    heads: int, kv_heads: int, head_size: int, block_size: int, max_query_len: int, grid: int, upcast: bool
) -> dict[str, int]:
    per_kv = heads // kv_heads
    # As many pairs as there are; the tensor core takes 16.
    block_m = min(MAX_ROWS, max(16, next_power_of_2(per_kv * max_query_len)))
    return {
        "HEADS": heads,
        "PER_KV": per_kv,
        "HEAD_SIZE": head_size,
        "BLOCK_SIZE": block_size,
        "GRID": grid,
        "BLOCK_M": block_m,
        "BLOCK_N": BLOCK_N,
        "BLOCK_D": max(16, next_power_of_2(head_size)),
        "UPCAST": upcast,
    }


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
) -> torch.Tensor:
    """Causal attention of each row's queries over its own blocks; one launch, for decodes as for prefills.

    The tokens of row r are `query_start_loc[r] … query_start_loc[r + 1] - 1`, the last ones of its `seq_lens[r]`, whose
    K and V are all in the cache. Rows whose first block is the null block 0 are padding.

    Args:
        query: [num_tokens, num_heads, head_size] float32, bfloat16 or float16, tokens at any stride.
        key_cache, value_cache: [num_kernel_blocks, kernel_block_size, num_kv_heads, head_size] of the same dtype,
            blocks and tokens at any stride.
        block_table: [num_rows, num_blocks] int32 or int64, rows at any stride; covers each row's `seq_lens` tokens.
        query_start_loc: [num_rows + 1] int32 or int64 from 0, never falling.
        seq_lens: [num_rows] int32 or int64, tokens after this step.
        max_query_len: of all rows; a larger number costs programs without work.
        grid: keys at its multiples are seen by nobody (`models.nemotron_h_mtp`); a query that sees no key gets zeros.
            0: there is no grid.

    Returns:
        [num_tokens, num_heads, head_size], contiguous. Rows of padding and tokens of no row are not written.

    Raises:
        ValueError: a shape, dtype, device, stride or number is none of these.
    """
    device = query.device
    if query.dim() != 3 or key_cache.dim() != 4 or block_table.dim() != 2:
        shapes = [tuple(tensor.shape) for tensor in (query, key_cache, block_table)]
        raise ValueError(f"query, key_cache and block_table have shapes {shapes}; they must have 3, 4 and 2 dimensions")
    tokens, heads, size = query.shape
    blocks, block_size, kv_heads = key_cache.shape[:3]
    if kv_heads < 1 or heads % kv_heads:
        raise ValueError(f"{kv_heads} heads of K do not divide {heads} heads of the query")
    if max_query_len < 1 or grid < 0:
        raise ValueError(f"max_query_len={max_query_len} must be >= 1 and grid={grid} >= 0")
    check("query", query, (tokens, heads, size), FLOATS, device, free=1)
    for name, cache in (("key_cache", key_cache), ("value_cache", value_cache)):
        check(name, cache, (blocks, block_size, kv_heads, size), (query.dtype,), device, free=2)
    rows, width = block_table.shape
    check("block_table", block_table, (rows, width), INTS, device, free=1)
    check("query_start_loc", query_start_loc, (rows + 1,), INTS, device)
    check("seq_lens", seq_lens, (rows,), INTS, device)
    out = torch.empty_like(query, memory_format=torch.contiguous_format)
    # The interpreter would multiply raw bits.
    upcast = query.dtype == torch.bfloat16 and device.type == "cpu"
    constexprs = _constexprs(heads, kv_heads, size, block_size, max_query_len, grid, upcast)
    tiles = cdiv(max_query_len * constexprs["PER_KV"], constexprs["BLOCK_M"])
    jit(_attention)[(tiles, kv_heads, rows)](
        query,
        key_cache,
        value_cache,
        out,
        block_table,
        query_start_loc,
        seq_lens,
        scale * math.log2(math.e),
        query.stride(0),
        block_table.stride(0),
        key_cache.stride(0),
        value_cache.stride(0),
        key_cache.stride(1),
        value_cache.stride(1),
        **constexprs,
        num_warps=4,
        num_stages=NUM_STAGES,
    )
    return out


def aot_cases() -> list[AotCase]:
    """What a launch compiles for bfloat16 models with 16-token kernel blocks."""
    shapes = {"Nemotron-3-Nano": (32, 2, 128), "Granite-4-H-small": (32, 8, 128)}
    strides = ("key_block_stride", "value_block_stride", "key_token_stride", "value_token_stride")
    # 16 heads of Nano share one of K and V: 4 tokens fill the largest tile, and a prefill compiles the same.
    step = {"Nemotron-3-Nano": ((1, "K=0"), (4, "K=3")), "Granite-4-H-small": ((4, "K=3"), (2048, "prefill"))}
    found = []
    for name, queries in step.items():
        heads, kv_heads, size = shapes[name]
        for length, kind in queries:
            found.append(
                AotCase(
                    kernel="paged_attention.paged_attention_varlen",
                    shape=f"{name}, {kind}",
                    dtype="bfloat16",
                    fn=jit(_attention),
                    signature={
                        **dict.fromkeys(("query", "key_cache", "value_cache", "out"), "*bf16"),
                        **dict.fromkeys(("block_table", "query_start_loc", "seq_lens"), "*i32"),
                        "scale": "fp32",
                        **dict.fromkeys(("query_stride", "table_stride", *strides), "i32"),
                    },
                    constexprs=_constexprs(heads, kv_heads, size, 16, length, 0, False),
                    num_warps=4,
                    num_stages=NUM_STAGES,
                    divisible=("query_stride", "table_stride", *strides),
                )
            )
    heads, kv_heads, size = shapes["Nemotron-3-Nano"]
    width = kv_heads * size
    found.append(
        AotCase(
            kernel="paged_attention.store_kv",
            shape="Nemotron-3-Nano",
            dtype="bfloat16",
            fn=jit(_store_kv),
            signature={
                **dict.fromkeys(("key", "value", "key_cache", "value_cache"), "*bf16"),
                "slots": "*i64",
                **dict.fromkeys(("key_stride", "value_stride", *strides), "i32"),
            },
            constexprs={"BLOCK_SIZE": 16, "WIDTH": width, "BLOCK": width},
            num_warps=1,
            num_stages=NUM_STAGES,
            bytes_per_program=4 * width * 2,
            divisible=("key_stride", "value_stride", *strides),
        )
    )
    return found

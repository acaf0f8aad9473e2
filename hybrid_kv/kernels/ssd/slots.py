"""The verify step of a Mamba-2 layer in scheme `slots`: read one state, write one per token.

A row runs the last accepted token of a request and up to K drafts after it. Each state that it
passes is kept in a block of its own, so that the next step may start from any of them: (2 + K)
states of traffic, one launch per layer.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch

from hybrid_kv.kernels.common.functions import softplus
from hybrid_kv.kernels.common.integers import cdiv, next_power_of_2
from hybrid_kv.kernels.common.launch import (
    FLOATS,
    INTS,
    check,
    check_dims,
    jit,
    per_warp,
    strides,
    warp_size,
)

if TYPE_CHECKING:
    import triton.language as tl

TILE_BYTES = 4096


def _state_update(
    state: tl.tensor,
    x: tl.tensor,
    dt: tl.tensor,
    dt_bias: tl.tensor,
    A_log: tl.tensor,
    B: tl.tensor,
    C: tl.tensor,
    D: tl.tensor,
    y: tl.tensor,
    cu_seqlens: tl.tensor,
    source_indices: tl.tensor,
    state_indices: tl.tensor,
    state_stride: tl.tensor,
    x_stride: tl.tensor,
    dt_stride: tl.tensor,
    B_stride: tl.tensor,
    C_stride: tl.tensor,
    indices_stride: tl.tensor,
    HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    STATE: tl.constexpr,
    GROUPS: tl.constexpr,
    BLOCK_P: tl.constexpr,
    BLOCK_N: tl.constexpr,
    TOGETHER: tl.constexpr,
) -> None:
    # A program owns BLOCK_P rows of one head's state, 4 KB, and one warp runs it: no barrier ties
    # the loads of one warp to the stores of another, and the 12 to 32 warps that an SM holds have
    # 48 KB and more in flight, what its share of the bus takes. Half the tile would load B and C
    # twice as often, twice the tile take twice the registers. The programs of a batch row are
    # neighbours, so that they share its B and C in the caches.
    tiles: tl.constexpr = (HEAD_DIM + BLOCK_P - 1) // BLOCK_P
    row = tl.program_id(1)
    head = tl.program_id(0) // tiles
    start = (tl.program_id(0) % tiles) * BLOCK_P
    channel = head * HEAD_DIM + start
    group = head // (HEADS // GROUPS)
    first = tl.load(cu_seqlens + row).to(tl.int64)
    length = (tl.load(cu_seqlens + row + 1) - first).to(tl.int32)
    # Block ids are widened before they are multiplied: a pool passes 2^31 elements.
    source = tl.load(source_indices + row).to(tl.int64)

    # The state's rows as [BLOCK_P // TOGETHER, TOGETHER], TOGETHER being those that a warp covers
    # in one access of 16 bytes a lane. B and C, repeated for as many, then have the state's own
    # layout: without that the compiler keeps the state twice, in two layouts, and moves one into
    # the other for every token.
    p = tl.arange(0, TOGETHER)[None, :, None]
    n = tl.broadcast_to(tl.arange(0, BLOCK_N)[None, None, :], [1, TOGETHER, BLOCK_N])
    p += tl.arange(0, BLOCK_P // TOGETHER)[:, None, None] * TOGETHER
    # True where the sizes divide, so that no mask is left.
    in_p = (p < HEAD_DIM - start) | (HEAD_DIM % BLOCK_P == 0)
    in_n = (n < STATE) | (STATE == BLOCK_N)
    inside = in_p & in_n
    # Offsets in a tile are small and static, all that is not goes into the scalar base: they become
    # immediates.
    tile = p * STATE + n
    state += channel * STATE

    s = tl.load(state + source * state_stride + tile, mask=inside & (source != 0), other=0.0).to(
        tl.float32
    )
    a = -tl.exp(tl.load(A_log + head).to(tl.float32))
    bias = tl.load(dt_bias + head).to(tl.float32)
    d = tl.load(D + head).to(tl.float32)
    for j in range(length):
        token = first + j
        v = tl.load(dt + token * dt_stride + head).to(tl.float32) + bias
        step = softplus(v)
        xt = tl.load(x + token * x_stride + channel + p, mask=in_p, other=0.0).to(tl.float32)
        b = tl.load(B + token * B_stride + group * STATE + n, mask=in_n, other=0.0).to(tl.float32)
        c = tl.load(C + token * C_stride + group * STATE + n, mask=in_n, other=0.0).to(tl.float32)
        s = s * tl.exp(step * a) + (xt * step) * b
        out = tl.sum(s * c, axis=2, keep_dims=True) + d * xt
        tl.store(
            y + token * (HEADS * HEAD_DIM) + channel + p, out.to(y.dtype.element_ty), mask=in_p
        )
        target = tl.load(state_indices + row * indices_stride + j).to(tl.int64)
        # A program has read its tile before it writes one, and no other program touches that tile
        # of these blocks.
        if target != 0:
            tl.store(
                state + target * state_stride + tile, s.to(state.dtype.element_ty), mask=inside
            )


def _constexprs(
    heads: int, head_dim: int, size: int, groups: int, itemsize: int, lanes: int
) -> dict[str, int]:
    block_n = next_power_of_2(size)
    block_p = min(max(1, TILE_BYTES // (block_n * itemsize)), next_power_of_2(head_dim))
    return {
        "HEADS": heads,
        "HEAD_DIM": head_dim,
        "STATE": size,
        "GROUPS": groups,
        "BLOCK_P": block_p,
        "BLOCK_N": block_n,
        "TOGETHER": max(1, min(per_warp(block_n * itemsize, lanes), block_p)),
    }


def check_inputs(
    x: torch.Tensor,
    dt: torch.Tensor,
    dt_bias: torch.Tensor,
    A_log: torch.Tensor,
    B: torch.Tensor,
    C: torch.Tensor,
    D: torch.Tensor,
    shared: Sequence[torch.dtype] = FLOATS,
) -> tuple[int, int, int, int]:
    """Check that a layer's operands fit together; return heads, head_dim, state size and groups.

    Args:
        shared: dtypes that B and C may have.

    Raises:
        ValueError: they do not.
    """
    check_dims(x=(x, 3), B=(B, 3))
    device = x.device
    tokens, heads, head_dim = x.shape
    groups, size = B.shape[1:]
    if groups < 1 or heads % groups:
        raise ValueError(f"{groups} groups of B do not divide {heads} heads")
    check("x", x, x.shape, FLOATS, device, free=1)
    check("dt", dt, (tokens, heads), FLOATS, device, free=1)
    for name, per_group in (("B", B), ("C", C)):
        check(name, per_group, (tokens, groups, size), shared, device, free=1)
    for name, per_head in (("dt_bias", dt_bias), ("A_log", A_log), ("D", D)):
        check(name, per_head, (heads,), FLOATS, device)
    return heads, head_dim, size, groups


def selective_state_update_slots(
    state: torch.Tensor,
    x: torch.Tensor,
    dt: torch.Tensor,
    dt_bias: torch.Tensor,
    A_log: torch.Tensor,
    B: torch.Tensor,
    C: torch.Tensor,
    D: torch.Tensor,
    cu_seqlens: torch.Tensor,
    source_indices: torch.Tensor,
    state_indices: torch.Tensor,
) -> torch.Tensor:
    """Run every row's tokens from the row's state, and store the state after each; one launch.

    Row r has the tokens `cu_seqlens[r] … cu_seqlens[r + 1] - 1`, at most as many as `state_indices`
    has columns. The null block 0 reads as a state of zeros and is never written, so padding rows
    and rows without tokens do no harm. A row may write the block that it starts from. No block may
    be written twice, nor by one row and read by another.

    Args:
        state: [num_blocks, heads, head_dim, state] float32, bfloat16 or float16, blocks at any
            stride; written.
        x: [num_tokens, heads, head_dim]; B, C: [num_tokens, groups, state]; tokens at any stride.
        dt: [num_tokens, heads] before bias and softplus, tokens at any stride.
        dt_bias, A_log, D: [heads].
        cu_seqlens: [num_rows + 1] int32 or int64 from 0, never falling.
        source_indices: [num_rows] int32 or int64, the block that a row starts from.
        state_indices: [num_rows, 1 + K] int32 or int64, the block for the state after token j;
            entries from the row's length on are not read.

    Returns:
        y like x, contiguous; tokens of no row are not written.

    Raises:
        ValueError: a shape, dtype, device or stride is none of these.
    """
    device = x.device
    heads, head_dim, size, groups = check_inputs(x, dt, dt_bias, A_log, B, C, D)
    check_dims(state_indices=(state_indices, 2))
    num_rows, columns = state_indices.shape
    check("state", state, (*state.shape[:1], heads, head_dim, size), FLOATS, device, free=1)
    check("cu_seqlens", cu_seqlens, (num_rows + 1,), INTS, device)
    check("source_indices", source_indices, (num_rows,), INTS, device)
    check("state_indices", state_indices, (num_rows, columns), INTS, device, free=1)
    constexprs = _constexprs(heads, head_dim, size, groups, state.element_size(), warp_size())
    y = torch.empty_like(x, memory_format=torch.contiguous_format)
    jit(_state_update)[(heads * cdiv(head_dim, constexprs["BLOCK_P"]), num_rows)](
        *(state, x, dt, dt_bias, A_log, B, C, D, y, cu_seqlens, source_indices, state_indices),
        *strides(state, x, dt, B, C, state_indices),
        **constexprs,
        num_warps=1,
        num_stages=1,
    )
    return y

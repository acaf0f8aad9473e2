"""The verify step of a gated delta rule in scheme `slots`: read one state, write one per token.

A gated delta net (Yang et al., 2024, arXiv 2412.06464) has one decay per head, Kimi Delta Attention
(2025, arXiv 2510.26692) one per key channel; one program runs both. A row runs the last accepted
token of a request and up to K drafts after it. Each state that it passes is kept in a block of its
own, so that the next step may start from any of them: (2 + K) states of traffic, one launch per
layer.

Shapes considered. (a) The layer makes log decays, betas and unit queries and keys in torch, as
flash-linear-attention takes them: a dozen small launches before this one. (b) This kernel makes
them of what the layer projects: each program normalises the query and key that it has to read
anyway. This is (b).
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
from hybrid_kv.kernels.gated_delta.reference import EPS

if TYPE_CHECKING:
    import triton.language as tl

TILE = 1024  # elements of a state


def _delta_update(
    state: tl.tensor,
    q: tl.tensor,
    k: tl.tensor,
    v: tl.tensor,
    dt: tl.tensor,
    dt_bias: tl.tensor,
    A_log: tl.tensor,
    beta: tl.tensor,
    y: tl.tensor,
    cu_seqlens: tl.tensor,
    source_indices: tl.tensor,
    state_indices: tl.tensor,
    state_stride: tl.tensor,
    q_stride: tl.tensor,
    k_stride: tl.tensor,
    v_stride: tl.tensor,
    dt_stride: tl.tensor,
    beta_stride: tl.tensor,
    indices_stride: tl.tensor,
    HEADS: tl.constexpr,
    VALUE: tl.constexpr,
    KEY: tl.constexpr,
    KEY_HEADS: tl.constexpr,
    PER_CHANNEL: tl.constexpr,
    BETA_SCALE: tl.constexpr,
    EPS: tl.constexpr,
    BLOCK_V: tl.constexpr,
    BLOCK_K: tl.constexpr,
    TOGETHER: tl.constexpr,
) -> None:
    # A program owns BLOCK_V rows of one head's state, and one warp runs it, for the reasons given
    # in `ssd.slots`: 2 or 4 KB, of which an SM holds 20 to 32. Twice the elements, with query and
    # key next to them, do not fit into registers. A row of the state meets no other one, so neither
    # do programs.
    tiles: tl.constexpr = (VALUE + BLOCK_V - 1) // BLOCK_V
    row = tl.program_id(1)
    head = tl.program_id(0) // tiles
    start = (tl.program_id(0) % tiles) * BLOCK_V
    channel = head * VALUE + start
    key = head // (HEADS // KEY_HEADS) * KEY
    first = tl.load(cu_seqlens + row).to(tl.int64)
    length = (tl.load(cu_seqlens + row + 1) - first).to(tl.int32)
    # Block ids are widened before they are multiplied: a pool passes 2^31 elements.
    source = tl.load(source_indices + row).to(tl.int64)

    # The state's rows as [BLOCK_V // TOGETHER, TOGETHER], so that queries and keys have the state's
    # own layout: see `ssd.slots`.
    p = tl.arange(0, TOGETHER)[None, :, None]
    n = tl.broadcast_to(tl.arange(0, BLOCK_K)[None, None, :], [1, TOGETHER, BLOCK_K])
    p += tl.arange(0, BLOCK_V // TOGETHER)[:, None, None] * TOGETHER
    # True where the sizes divide, so that no mask is left.
    in_p = (p < VALUE - start) | (VALUE % BLOCK_V == 0)
    in_n = (n < KEY) | (KEY == BLOCK_K)
    inside = in_p & in_n
    tile = p * KEY + n
    state += channel * KEY
    gate = head * KEY + n if PER_CHANNEL else head
    in_gate = in_n if PER_CHANNEL else True

    s = tl.load(state + source * state_stride + tile, mask=inside & (source != 0), other=0.0).to(
        tl.float32
    )
    a = -tl.exp(tl.load(A_log + head).to(tl.float32))
    bias = tl.load(dt_bias + gate, mask=in_gate, other=0.0).to(tl.float32)
    for j in range(length):
        token = first + j
        w = tl.load(dt + token * dt_stride + gate, mask=in_gate, other=0.0).to(tl.float32) + bias
        step = softplus(w)
        learned = BETA_SCALE / (
            1.0 + tl.exp(-tl.load(beta + token * beta_stride + head).to(tl.float32))
        )
        qt = tl.load(q + token * q_stride + key + n, mask=in_n, other=0.0).to(tl.float32)
        kt = tl.load(k + token * k_stride + key + n, mask=in_n, other=0.0).to(tl.float32)
        vt = tl.load(v + token * v_stride + channel + p, mask=in_p, other=0.0).to(tl.float32)
        qt *= tl.rsqrt(tl.sum(qt * qt, axis=2, keep_dims=True) + EPS) * (KEY**-0.5)
        kt *= tl.rsqrt(tl.sum(kt * kt, axis=2, keep_dims=True) + EPS)
        s *= tl.exp(step * a)
        s += (vt - tl.sum(s * kt, axis=2, keep_dims=True)) * learned * kt
        out = tl.sum(s * qt, axis=2, keep_dims=True)
        tl.store(y + token * (HEADS * VALUE) + channel + p, out.to(y.dtype.element_ty), mask=in_p)
        target = tl.load(state_indices + row * indices_stride + j).to(tl.int64)
        # A program has read its tile before it writes one, and no other program touches that tile
        # of these blocks.
        if target != 0:
            tl.store(
                state + target * state_stride + tile, s.to(state.dtype.element_ty), mask=inside
            )


def _constexprs(
    key_heads: int, heads: int, key: int, value: int, itemsize: int, lanes: int
) -> dict[str, int]:
    block_k = next_power_of_2(key)
    block_v = min(max(1, TILE // block_k), next_power_of_2(value))
    return {
        "HEADS": heads,
        "VALUE": value,
        "KEY": key,
        "KEY_HEADS": key_heads,
        "BLOCK_V": block_v,
        "BLOCK_K": block_k,
        "TOGETHER": max(1, min(per_warp(block_k * itemsize, lanes), block_v)),
    }


def check_inputs(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    dt: torch.Tensor,
    dt_bias: torch.Tensor,
    A_log: torch.Tensor,
    beta: torch.Tensor,
    shared: Sequence[torch.dtype] = FLOATS,
) -> tuple[int, int, int, int]:
    """Check a layer's operands; return key heads, heads, and key and value channels.

    Args:
        shared: dtypes that q and k may have.

    Raises:
        ValueError: they do not.
    """
    check_dims(k=(k, 3), v=(v, 3))
    device = v.device
    tokens, heads, value = v.shape
    key_heads, key = k.shape[1:]
    if key_heads < 1 or heads % key_heads:
        raise ValueError(f"{key_heads} heads of k do not divide {heads} heads of v")
    if dt.dim() not in (2, 3):
        raise ValueError(
            f"dt has shape {tuple(dt.shape)}; it must have 2 dimensions, or 3 per channel"
        )
    gates = (heads,) if dt.dim() == 2 else (heads, key)
    check("v", v, v.shape, FLOATS, device, free=1)
    for name, per_key in (("q", q), ("k", k)):
        check(name, per_key, (tokens, key_heads, key), shared, device, free=1)
    check("dt", dt, (tokens, *gates), FLOATS, device, free=1)
    check("beta", beta, (tokens, heads), FLOATS, device, free=1)
    check("dt_bias", dt_bias, gates, FLOATS, device)
    check("A_log", A_log, (heads,), FLOATS, device)
    return key_heads, heads, key, value


def gated_delta_update_slots(
    state: torch.Tensor,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    dt: torch.Tensor,
    dt_bias: torch.Tensor,
    A_log: torch.Tensor,
    beta: torch.Tensor,
    cu_seqlens: torch.Tensor,
    source_indices: torch.Tensor,
    state_indices: torch.Tensor,
    beta_scale: float = 1.0,
) -> torch.Tensor:
    """Run every row's tokens from the row's state, and store the state after each; one launch.

    Row r has the tokens `cu_seqlens[r] … cu_seqlens[r + 1] - 1`, at most as many as `state_indices`
    has columns. The null block 0 reads as a state of zeros and is never written, so padding rows
    and rows without tokens do no harm. A row may write the block that it starts from. No block may
    be written twice, nor by one row and read by another.

    Args:
        state: [num_blocks, heads, V, K] float32, bfloat16 or float16, blocks at any stride;
            written.
        q, k: [num_tokens, key_heads, K] of any length: they are normalised here, and q is scaled by
            `K ** -0.5`. Neighbouring heads share those of a key head. v: [num_tokens, heads, V].
            Tokens at any stride.
        dt: [num_tokens, heads] or, per channel, [num_tokens, heads, K], before bias and softplus,
            tokens at any stride.
        dt_bias: [heads] or, per channel, [heads, K]; A_log: [heads].
        beta: [num_tokens, heads] before the sigmoid, tokens at any stride.
        cu_seqlens: [num_rows + 1] int32 or int64 from 0, never falling.
        source_indices: [num_rows] int32 or int64, the block that a row starts from.
        state_indices: [num_rows, 1 + K] int32 or int64, the block for the state after token j;
            entries from the row's length on are not read.
        beta_scale: of the sigmoid.

    Returns:
        y like v, contiguous; tokens of no row are not written.

    Raises:
        ValueError: a shape, dtype, device or stride is none of these.
    """
    device = v.device
    sizes = _, heads, key, value = check_inputs(q, k, v, dt, dt_bias, A_log, beta)
    check_dims(state_indices=(state_indices, 2))
    num_rows, columns = state_indices.shape
    check("state", state, (*state.shape[:1], heads, value, key), FLOATS, device, free=1)
    check("cu_seqlens", cu_seqlens, (num_rows + 1,), INTS, device)
    check("source_indices", source_indices, (num_rows,), INTS, device)
    check("state_indices", state_indices, (num_rows, columns), INTS, device, free=1)
    constexprs = _constexprs(*sizes, state.element_size(), warp_size())
    y = torch.empty_like(v, memory_format=torch.contiguous_format)
    jit(_delta_update)[(heads * cdiv(value, constexprs["BLOCK_V"]), num_rows)](
        *(state, q, k, v, dt, dt_bias, A_log, beta, y, cu_seqlens, source_indices, state_indices),
        *strides(state, q, k, v, dt, beta, state_indices),
        **constexprs,
        PER_CHANNEL=dt.dim() == 3,
        BETA_SCALE=beta_scale,
        EPS=EPS,
        num_warps=1,
        num_stages=1,
    )
    return y

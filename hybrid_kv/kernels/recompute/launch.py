"""Scheme `recompute` in Triton: one launch for a group's cursors, one for each of its layers."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch

from hybrid_kv.kernels.common.integers import cdiv, next_power_of_2, shortest_ring_len
from hybrid_kv.kernels.common.interpreter import is_interpreter
from hybrid_kv.kernels.common.launch import (
    FLOATS,
    INTS,
    check,
    check_dims,
    jit,
    register_limit,
    warp_size,
)
from hybrid_kv.kernels.recompute.kernels import commit_kernel, recompute_kernel
from hybrid_kv.kernels.recompute.ring import RecomputeCursors, RecomputeRing, RecomputeStep

HEADS_TOGETHER = 8  # in one program of a large batch …
SATURATED = 1024  # … which has this many programs even so
COMMIT_BLOCK = 32
# Change with the batch: no kernel of their own for multiples of 16.
COMMIT_RUNTIME = ("num_reqs", "table_stride")


def launch_constexprs(
    x_ring: Sequence[int],
    B_ring: Sequence[int],
    max_query_len: int,
    num_reqs: int,
    state_dtype: torch.dtype,
    dtype: torch.dtype,
    update: bool,
    lanes: int,
) -> dict[str, Any]:
    """Return the constants of a launch for rings [num_rows, *x_ring] and [num_rows, *B_ring]."""
    heads, ring_len, head_dim = x_ring
    groups, _, size = B_ring
    # A loop over heads makes the compiler for AMD spill.
    together = math.gcd(HEADS_TOGETHER, heads // groups) if lanes == 32 else 1
    if num_reqs * heads < together * SATURATED:
        together = 1
    block_n = max(16, next_power_of_2(size))
    return {
        "HEADS": heads,
        "HEAD_DIM": head_dim,
        "STATE": size,
        "GROUPS": groups,
        "RING": ring_len,
        "SPLIT": state_dtype == torch.int16,
        "TENSOR": dtype == torch.bfloat16,
        "INTERPRETED": is_interpreter(),
        "UPDATE": update,
        "HEADS_PER_PROGRAM": together,
        "BLOCK_P": max(16, next_power_of_2(head_dim)),
        "BLOCK_N": block_n,
        "HISTORY": max(16, next_power_of_2(ring_len - max_query_len)),
        "TOKENS": max(lanes // 4, next_power_of_2(max_query_len)),
        "KEYS": max(16, next_power_of_2(max_query_len)),
        "CHUNK": min(32, block_n),
    }


def _options(heads_per_program: int, lanes: int) -> dict[str, int]:
    # With several heads in a program three of them are to fit on an SM.
    return {
        "num_warps": 4,
        "num_stages": 1,
        **(register_limit(168, lanes) if heads_per_program > 1 else {}),
    }


def commit(
    cursors: RecomputeCursors,
    rows: torch.Tensor,
    num_gained_tokens: torch.Tensor,
    cu_seqlens: torch.Tensor,
    block_table: torch.Tensor,
    block_size: int | None,
) -> RecomputeStep:
    """Run `commit_reference` in one launch for all layers of a group.

    Raises:
        ValueError: a shape, dtype, device or stride is not as `commit_reference` has it, or a step
            could pass two boundaries.
    """
    if block_size is not None and block_size < cursors.max_query_len:
        raise ValueError(
            f"block_size={block_size} is shorter than a step of {cursors.max_query_len} tokens"
        )
    device = cursors.base_pos.device
    num_reqs = len(rows)
    for name in ("base_pos", "ring_start", "n_hist", "prev_t"):
        check(
            f"cursors.{name}",
            getattr(cursors, name),
            (len(cursors.base_pos),),
            (torch.int64,),
            device,
        )
    check("rows", rows, (num_reqs,), INTS, device)
    check("num_gained_tokens", num_gained_tokens, (num_reqs,), INTS, device)
    check("cu_seqlens", cu_seqlens, (num_reqs + 1,), INTS, device)
    check_dims(block_table=(block_table, 2))
    check("block_table", block_table, (num_reqs, block_table.shape[1]), INTS, device, free=1)
    if num_reqs not in cursors.steps:
        cursors.steps[num_reqs] = torch.empty(6, num_reqs, dtype=torch.int64, device=device)
    step = cursors.steps[num_reqs]
    jit(commit_kernel, COMMIT_RUNTIME)[(cdiv(num_reqs, COMMIT_BLOCK),)](
        *(cursors.base_pos, cursors.ring_start, cursors.n_hist, cursors.prev_t),
        *(rows, num_gained_tokens, cu_seqlens, block_table, step, num_reqs, block_table.stride(0)),
        RING=cursors.ring_len,
        MAX_QUERY=cursors.max_query_len,
        BLOCK_SIZE=block_size or 0,
        BLOCK=COMMIT_BLOCK,
        num_warps=1,
        num_stages=1,
    )
    row, src, dst, ring_start, n_hist, n_flush = step
    return RecomputeStep(row, src, dst, ring_start, n_hist, n_flush, cursors.max_query_len)


def check_history(
    ssm_state: torch.Tensor, ring: RecomputeRing, step: RecomputeStep, per_channel: bool = False
) -> tuple[int, int, int, int]:
    """Check that the tensors of a layer fit together; return heads, head_dim, groups and state.

    Args:
        per_channel: `ring.dt` has an entry for each channel of the state.

    Raises:
        ValueError: they do not.
    """
    device = ssm_state.device
    check_dims(**{"ring.x": (ring.x, 4), "ring.B": (ring.B, 4)})
    num_rows, heads, ring_len, head_dim = ring.x.shape
    groups = ring.B.shape[1]
    size = ring.B.shape[3]
    if groups < 1 or heads % groups:
        raise ValueError(f"{groups} groups of ring.B do not divide {heads} heads")
    planes = (2,) if ssm_state.dtype == torch.int16 else ()
    shape = (len(ssm_state), *planes, heads, head_dim, size)
    stored = (torch.int16, torch.bfloat16, torch.float16)
    check("ssm_state", ssm_state, shape, stored, device, free=1)
    check("ring.x", ring.x, ring.x.shape, FLOATS, device)
    check("ring.B", ring.B, (num_rows, groups, ring_len, size), (ring.x.dtype,), device)
    check(
        "ring.dt",
        ring.dt,
        (num_rows, heads, ring_len, *[size] * per_channel),
        (torch.float32,),
        device,
    )
    if ring_len < shortest_ring_len(step.max_query_len):
        raise ValueError(
            f"a ring of {ring_len} tokens is too short for steps of {step.max_query_len}"
        )
    for name, values in zip(step._fields[:6], step[:6], strict=True):
        check(f"step.{name}", values, (len(step.rows),), INTS, device)
    return heads, head_dim, groups, size


def recompute_update(
    ssm_state: torch.Tensor,
    ring: RecomputeRing,
    step: RecomputeStep,
    x: torch.Tensor,
    dt: torch.Tensor,
    dt_bias: torch.Tensor,
    A_log: torch.Tensor,
    B: torch.Tensor,
    C: torch.Tensor,
    D: torch.Tensor,
    cu_seqlens: torch.Tensor,
) -> torch.Tensor:
    """Run every row's tokens after its history, append their inputs, flush; one launch.

    Row r has the tokens `cu_seqlens[r] … cu_seqlens[r + 1] - 1`, at most `step.max_query_len`. A
    row of padding (`src` or `dst` is the null block) neither reads nor writes states and rings; its
    outputs are zeros. No `dst` may be another row's `src` or `dst`; a row may flush in place.

    With bfloat16 inputs the products run on tensor cores: operands are rounded to bfloat16, the
    state included, of which only the upper plane is read unless the row flushes; what a flush adds
    is accurate to 16 bits. Otherwise all arithmetic is in float32. So y errs by 6e-3 and 1e-5 of
    the largest of its head, checkpoints by 5e-6 a flush.

    Args:
        ssm_state: [num_blocks, 2, heads, head_dim, state] int16, planes of float32 (`split_state`);
            or [num_blocks, heads, head_dim, state] bfloat16 or float16; blocks at any stride;
            written.
        ring: of the layer; written.
        step: of the layer's group, from `commit`.
        x: [num_tokens, heads, head_dim]; B, C: [num_tokens, groups, state]; of the ring's dtype,
            tokens at any stride.
        dt: [num_tokens, heads] before bias and softplus, tokens at any stride.
        dt_bias, A_log, D: [heads].
        cu_seqlens: [num_reqs + 1] int32 or int64 from 0, never falling.

    Returns:
        y like x, contiguous; tokens of no row are not written.

    Raises:
        ValueError: a shape, dtype, device or stride is none of these.
    """
    heads, head_dim, groups, size = check_history(ssm_state, ring, step)
    device = ssm_state.device
    dtype = ring.x.dtype
    tokens = len(x)
    num_reqs = len(step.rows)
    check("x", x, (tokens, heads, head_dim), (dtype,), device, free=1)
    check("dt", dt, (tokens, heads), FLOATS, device, free=1)
    for name, per_group in (("B", B), ("C", C)):
        check(name, per_group, (tokens, groups, size), (dtype,), device, free=1)
    for name, per_head in (("dt_bias", dt_bias), ("A_log", A_log), ("D", D)):
        check(name, per_head, (heads,), FLOATS, device)
    check("cu_seqlens", cu_seqlens, (num_reqs + 1,), INTS, device)
    y = torch.empty_like(x, memory_format=torch.contiguous_format)
    token_strides = x.stride(0), dt.stride(0), B.stride(0), C.stride(0)
    _launch(ssm_state, ring, step, (x, dt, dt_bias, A_log, B, C, D, y), cu_seqlens, token_strides)
    return y


def recompute_flush(
    ssm_state: torch.Tensor, ring: RecomputeRing, step: RecomputeStep, A_log: torch.Tensor
) -> None:
    """Run the flush of `recompute_update` alone, for rows without tokens.

    A request leaves and its last boundary is due.

    Raises:
        ValueError: a shape, dtype, device or stride is not as `recompute_update` has it.
    """
    heads, *_ = check_history(ssm_state, ring, step)
    check("A_log", A_log, (heads,), FLOATS, ssm_state.device)
    _launch(
        ssm_state, ring, step, (None, None, None, A_log, None, None, None, None), None, (0,) * 4
    )


def _launch(
    ssm_state: torch.Tensor,
    ring: RecomputeRing,
    step: RecomputeStep,
    inputs: tuple[torch.Tensor | None, ...],
    cu_seqlens: torch.Tensor | None,
    token_strides: tuple[int, ...],
) -> None:
    lanes = warp_size()
    rings = (ring.x.shape[1:], ring.B.shape[1:])
    update = cu_seqlens is not None
    dtypes = ssm_state.dtype, ring.x.dtype
    constexprs = launch_constexprs(
        *rings, step.max_query_len, len(step.rows), *dtypes, update, lanes
    )
    jit(recompute_kernel)[(constexprs["HEADS"] // constexprs["HEADS_PER_PROGRAM"], len(step.rows))](
        *(ssm_state, ring.x, ring.B, ring.dt, *inputs),
        *(*step[:6], cu_seqlens),
        *(ssm_state.stride(0), *token_strides),
        **constexprs,
        **_options(constexprs["HEADS_PER_PROGRAM"], lanes),
    )

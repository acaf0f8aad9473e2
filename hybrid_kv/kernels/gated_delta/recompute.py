"""The verify step of a gated delta rule in scheme `recompute`: one state per request.

See `kernels.recompute` for checkpoints, rings and flushes, which are the same here. What a ring
keeps of a token is not its input but what the state got of it: `u`, its unit key and its log decay.
So a history is linear, as that of Mamba-2: only the step's own tokens depend on each other by the
delta rule.

Shapes considered. (a) The ring keeps keys, values and betas: exact in bfloat16, but each step
solves a triangular system of its whole history, and a flush another. (b) It keeps `u` in the type
of the activations, as a prefill has it: the system is that of 1 + K tokens. (c) As (b), token by
token in registers as in `slots`: no products of matrices, but instructions grow with the history.
This is (b).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from hybrid_kv.kernels.common.functions import softplus
from hybrid_kv.kernels.common.integers import cdiv, next_power_of_2
from hybrid_kv.kernels.common.interpreter import is_interpreter
from hybrid_kv.kernels.common.launch import INTS, check, jit, register_limit, strides, warp_size
from hybrid_kv.kernels.gated_delta.reference import EPS
from hybrid_kv.kernels.gated_delta.slots import check_inputs
from hybrid_kv.kernels.recompute import RecomputeRing, RecomputeStep, check_history

if TYPE_CHECKING:
    import triton.language as tl

ROWS = 64  # of a state in one program
REGISTERS = {False: 168, True: 232}  # with decays per channel; three programs on an SM, or two


def _delta_recompute(
    state: tl.tensor,
    u_ring: tl.tensor,
    k_ring: tl.tensor,
    g_ring: tl.tensor,
    q: tl.tensor,
    k: tl.tensor,
    v: tl.tensor,
    dt: tl.tensor,
    dt_bias: tl.tensor,
    A_log: tl.tensor,
    beta: tl.tensor,
    y: tl.tensor,
    rows: tl.tensor,
    sources: tl.tensor,
    targets: tl.tensor,
    ring_starts: tl.tensor,
    histories: tl.tensor,
    flushes: tl.tensor,
    cu_seqlens: tl.tensor,
    state_stride: tl.tensor,
    q_stride: tl.tensor,
    k_stride: tl.tensor,
    v_stride: tl.tensor,
    dt_stride: tl.tensor,
    beta_stride: tl.tensor,
    HEADS: tl.constexpr,
    VALUE: tl.constexpr,
    KEY: tl.constexpr,
    KEY_HEADS: tl.constexpr,
    RING: tl.constexpr,
    PER_CHANNEL: tl.constexpr,
    BETA_SCALE: tl.constexpr,
    EPS: tl.constexpr,
    SPLIT: tl.constexpr,
    TENSOR: tl.constexpr,
    INTERPRETED: tl.constexpr,
    UPDATE: tl.constexpr,
    BLOCK_V: tl.constexpr,
    BLOCK_K: tl.constexpr,
    HISTORY: tl.constexpr,
    TOKENS: tl.constexpr,
    CHUNK: tl.constexpr,
) -> None:
    # A program owns BLOCK_V rows of one head's state, which meet no others: it reads its own in
    # full before it writes.
    KIND: tl.constexpr = tl.bfloat16 if TENSOR else tl.float32
    OPERAND: tl.constexpr = tl.float32 if INTERPRETED else KIND
    GATES: tl.constexpr = KEY if PER_CHANNEL else 1
    LOW: tl.constexpr = HEADS * VALUE * KEY  # from the upper plane to the lower
    tiles: tl.constexpr = (VALUE + BLOCK_V - 1) // BLOCK_V
    row = tl.program_id(1)
    head = tl.program_id(0) // tiles
    tile_index = tl.program_id(0) % tiles
    key_head = head // (HEADS // KEY_HEADS)
    # Block ids are widened before they are multiplied: a pool passes 2^31 elements.
    ring = tl.load(rows + row).to(tl.int64)
    source = tl.load(sources + row).to(tl.int64)
    target = tl.load(targets + row).to(tl.int64)
    start = tl.load(ring_starts + row).to(tl.int32)
    held = tl.load(histories + row).to(tl.int32)
    flush = tl.load(flushes + row).to(tl.int32)
    owned = (source != 0) & (target != 0)

    p = tile_index * BLOCK_V + tl.arange(0, BLOCK_V)
    n = tl.arange(0, BLOCK_K)
    j = tl.arange(0, HISTORY)
    # True where the sizes divide, so that no mask is left.
    in_p = (p < VALUE) | (VALUE % BLOCK_V == 0)
    in_n = (n < KEY) | (KEY == BLOCK_K)
    place = start + j
    place = tl.where(place >= RING, place - RING, place)
    # A sum over what is after token j is taken of what is after, one place on.
    next_place = tl.where(place + 1 >= RING, 0, place + 1)
    u_ring += (ring * HEADS + head) * (RING * VALUE)
    k_ring += (ring * KEY_HEADS + key_head) * (RING * KEY)
    g_ring += (ring * HEADS + head) * (RING * GATES)
    state += head * (VALUE * KEY)

    if UPDATE:
        first = tl.load(cu_seqlens + row).to(tl.int64)
        length = (tl.load(cu_seqlens + row + 1) - first).to(tl.int32)
        t = tl.arange(0, TOKENS)
        q += first * q_stride + key_head * KEY
        k += first * k_stride + key_head * KEY
        v += first * v_stride + head * VALUE
        y += (first * HEADS + head) * VALUE
        dt += first * dt_stride + head * GATES
        beta += first * beta_stride + head
        # Of padding only the output is written: what follows must not meet NaN.
        held = tl.where(owned, held, 0)
        in_t = (t < length) & owned
        in_j = j < held
        gate = n[None, :] if PER_CHANNEL else tl.zeros([1, 1], tl.int32)
        in_gate = (gate < KEY) | (KEY == BLOCK_K)
        behind = start + held + t
        behind = tl.where(behind >= RING, behind - RING, behind)

        a = -tl.exp(tl.load(A_log + head).to(tl.float32))
        w = tl.load(dt + t[:, None] * dt_stride + gate, mask=in_t[:, None] & in_gate, other=0.0).to(
            tl.float32
        )
        w += tl.load(dt_bias + head * GATES + gate, mask=in_gate, other=0.0).to(tl.float32)
        g = tl.where(in_t[:, None], softplus(w) * a, 0.0)
        learned = tl.load(beta + t * beta_stride, mask=in_t, other=0.0).to(tl.float32)
        learned = BETA_SCALE / (1.0 + tl.exp(-learned))
        cells = in_t[:, None] & in_n[None, :]
        keys = tl.load(k + t[:, None] * k_stride + n[None, :], mask=cells, other=0.0).to(tl.float32)
        keys *= tl.rsqrt(tl.sum(keys * keys, axis=1) + EPS)[:, None]
        queries = tl.load(q + t[:, None] * q_stride + n[None, :], mask=cells, other=0.0).to(
            tl.float32
        )
        queries *= (tl.rsqrt(tl.sum(queries * queries, axis=1) + EPS) * (KEY**-0.5))[:, None]

        # The history as the step finds it: of the checkpoint what is left, and of each token. No
        # exponent is positive, and none is a difference of sums.
        gates = place[:, None] * GATES + gate
        past = tl.load(g_ring + gates, mask=in_j[:, None] & in_gate, other=0.0)
        gates = next_place[:, None] * GATES + gate
        later = tl.load(g_ring + gates, mask=(j < held - 1)[:, None] & in_gate, other=0.0)
        left = tl.exp(tl.cumsum(later, axis=0, reverse=True))
        past_cells = place[:, None] * KEY + n[None, :]
        past_k = tl.load(k_ring + past_cells, mask=in_j[:, None] & in_n[None, :], other=0.0)
        past_k = (past_k.to(tl.float32) * left).to(KIND).to(OPERAND)
        past_cells = place[:, None] * VALUE + p[None, :]
        past_u = tl.load(u_ring + past_cells, mask=in_j[:, None] & in_p[None, :], other=0.0)
        past_u = tl.trans(past_u.to(OPERAND))
        tile = p[:, None] * KEY + n[None, :]
        mine = in_p[:, None] & in_n[None, :] & owned
        h = tl.load(state + source * state_stride + tile, mask=mine, other=0)
        if SPLIT:
            if TENSOR:
                h = h.to(tl.bfloat16, bitcast=True)
            else:
                low = tl.load(state + source * state_stride + LOW + tile, mask=mine, other=0)
                h = ((h.to(tl.int32) << 16) + low.to(tl.int32)).to(tl.float32, bitcast=True)
        h = h.to(KIND).to(OPERAND)
        so_far = tl.exp(tl.cumsum(g, axis=0))
        from_state = tl.exp(tl.sum(past, axis=0))[None, :] * so_far
        read_k = tl.dot(
            h, tl.trans((keys * from_state).to(KIND).to(OPERAND)), input_precision="ieee"
        )
        read_q = tl.dot(
            h, tl.trans((queries * from_state).to(KIND).to(OPERAND)), input_precision="ieee"
        )
        weights = tl.dot(
            past_k, tl.trans((keys * so_far).to(KIND).to(OPERAND)), input_precision="ieee"
        )
        read_k = tl.dot(past_u, weights.to(KIND).to(OPERAND), read_k, input_precision="ieee")
        weights = tl.dot(
            past_k, tl.trans((queries * so_far).to(KIND).to(OPERAND)), input_precision="ieee"
        )
        read_q = tl.dot(past_u, weights.to(KIND).to(OPERAND), read_q, input_precision="ieee")

        # Columns are tokens. Each corrects what those before it left, whose keys decay on the way.
        tokens = t[None, :] * v_stride + p[:, None]
        new = (
            tl.load(v + tokens, mask=in_t[None, :] & in_p[:, None], other=0.0).to(tl.float32)
            - read_k
        )
        u = new * 0.0
        seen = keys * 0.0
        decay = tl.exp(g)
        for i in range(length):
            here = t == i
            seen *= tl.sum(tl.where(here[:, None], decay, 0.0), axis=0)[None, :]
            key = tl.sum(tl.where(here[:, None], keys, 0.0), axis=0)[None, :]
            known = tl.sum(u * tl.sum(seen * key, axis=1)[None, :], axis=1)
            u = tl.where(here[None, :], (new - known[:, None]) * learned[None, :], u)
            seen = tl.where(here[:, None], key, seen)
            query = tl.sum(tl.where(here[:, None], queries, 0.0), axis=0)[None, :]
            out = u * tl.sum(seen * query, axis=1)[None, :] + tl.where(here[None, :], read_q, 0.0)
            tl.store(
                y + i * (HEADS * VALUE) + p, tl.sum(out, axis=1).to(y.dtype.element_ty), mask=in_p
            )
        # After everything that any program reads in this launch; keys and decays by one program of
        # those that share them.
        mask = in_t[None, :] & in_p[:, None]
        tl.store(
            u_ring + behind[None, :] * VALUE + p[:, None], u.to(u_ring.dtype.element_ty), mask=mask
        )
        alone = in_t & (tile_index == 0)
        tl.store(g_ring + behind[:, None] * GATES + gate, g, mask=alone[:, None] & in_gate)
        alone &= head % (HEADS // KEY_HEADS) == 0
        mask = alone[:, None] & in_n[None, :]
        tl.store(
            k_ring + behind[:, None] * KEY + n[None, :], keys.to(k_ring.dtype.element_ty), mask=mask
        )

    if owned & (flush > 0):
        # The outputs did not need the new checkpoint. In place it overwrites what they read.
        tl.debug_barrier()
        folded = j < flush
        folded_cells = place[:, None] * VALUE + p[None, :]
        past_u = tl.load(u_ring + folded_cells, mask=folded[:, None] & in_p[None, :], other=0.0)
        past_u = tl.trans(past_u.to(OPERAND))
        for start_n in tl.range(0, BLOCK_K, CHUNK, num_stages=1):
            m = start_n + tl.arange(0, CHUNK)
            in_m = (m < KEY) | (KEY == BLOCK_K)
            gate_m = m[None, :] if PER_CHANNEL else tl.zeros([1, 1], tl.int32)
            in_gate_m = (gate_m < KEY) | (KEY == BLOCK_K)
            gate_piece = place[:, None] * GATES + gate_m
            passed = tl.load(g_ring + gate_piece, mask=folded[:, None] & in_gate_m, other=0.0)
            gate_piece = next_place[:, None] * GATES + gate_m
            coming = tl.load(
                g_ring + gate_piece, mask=(j < flush - 1)[:, None] & in_gate_m, other=0.0
            )
            in_piece = folded[:, None] & in_m[None, :]
            added = tl.load(
                k_ring + place[:, None] * KEY + m[None, :], mask=in_piece, other=0.0
            ).to(tl.float32)
            added *= tl.exp(tl.cumsum(coming, axis=0, reverse=True))
            if TENSOR:
                # Two terms of eight bits: one would leave an error that the checkpoint carries on.
                upper = added.to(tl.bfloat16)
                rest = (added - upper.to(tl.float32)).to(tl.bfloat16)
                added = tl.dot(past_u, rest.to(OPERAND))
                added = tl.dot(past_u, upper.to(OPERAND), added)
            else:
                added = tl.dot(past_u, added, input_precision="ieee")
            inside = in_p[:, None] & in_m[None, :]
            piece = p[:, None] * KEY + m[None, :]
            folded_h = tl.load(state + source * state_stride + piece, mask=inside, other=0)
            if SPLIT:
                low = tl.load(state + source * state_stride + LOW + piece, mask=inside, other=0)
                folded_h = ((folded_h.to(tl.int32) << 16) + low.to(tl.int32)).to(
                    tl.float32, bitcast=True
                )
            folded_h = folded_h.to(tl.float32) * tl.exp(tl.sum(passed, axis=0))[None, :] + added
            if SPLIT:
                bits = folded_h.to(tl.int32, bitcast=True)
                high = ((bits + 0x8000) >> 16).to(tl.int16)
                tl.store(state + target * state_stride + piece, high, mask=inside)
                tl.store(
                    state + target * state_stride + LOW + piece, bits.to(tl.int16), mask=inside
                )
            else:
                tl.store(
                    state + target * state_stride + piece,
                    folded_h.to(state.dtype.element_ty),
                    mask=inside,
                )


def gated_delta_recompute(
    state: torch.Tensor,
    ring: RecomputeRing,
    step: RecomputeStep,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    dt: torch.Tensor,
    dt_bias: torch.Tensor,
    A_log: torch.Tensor,
    beta: torch.Tensor,
    cu_seqlens: torch.Tensor,
    beta_scale: float = 1.0,
) -> torch.Tensor:
    """Run every row's tokens after its history, append what they learn, flush; one launch.

    Rows, padding, blocks, and what is rounded with bfloat16 inputs are as in `recompute_update`,
    but for this: what a token learns depends on what it reads, so an error of reading, 2^-9, is
    learned, and forgotten as what it is.

    Args:
        state: [num_blocks, 2, heads, V, K] int16, planes of float32 (`split_state`); or
            [num_blocks, heads, V, K] bfloat16 or float16; blocks at any stride; written.
        ring: of the layer, with V and K channels of x and B, and dt per head or, as `dt`, per
            channel; written.
        step: of the layer's group, from `commit`.
        q, k, v, dt, dt_bias, A_log, beta, beta_scale: as `gated_delta_update_slots` takes them; q,
            k and v of the ring's dtype.
        cu_seqlens: [num_reqs + 1] int32 or int64 from 0, never falling.

    Returns:
        y like v, contiguous; tokens of no row are not written.

    Raises:
        ValueError: a shape, dtype, device or stride is none of these.
    """
    heads, value, key_heads, key = check_history(state, ring, step, per_channel=dt.dim() == 3)
    device = state.device
    dtype = (ring.x.dtype,)
    check("v", v, (len(v), heads, value), dtype, device, free=1)
    check("k", k, (len(v), key_heads, key), dtype, device, free=1)
    check_inputs(q, k, v, dt, dt_bias, A_log, beta, shared=dtype)
    check("cu_seqlens", cu_seqlens, (len(step.rows) + 1,), INTS, device)
    y = torch.empty_like(v, memory_format=torch.contiguous_format)
    _launch(
        state,
        ring,
        step,
        (q, k, v, dt, dt_bias, A_log, beta, y),
        cu_seqlens,
        strides(q, k, v, dt, beta),
        beta_scale,
    )
    return y


def gated_delta_flush(state: torch.Tensor, ring: RecomputeRing, step: RecomputeStep) -> None:
    """Run the flush of `gated_delta_recompute` alone, as `recompute_flush` does it.

    Raises:
        ValueError: a shape, dtype, device or stride is not as `gated_delta_recompute` has it.
    """
    check_history(state, ring, step, per_channel=ring.dt.dim() == 4)
    _launch(state, ring, step, (None,) * 8, None, (0,) * 5, 1.0)


def _launch(
    state: torch.Tensor,
    ring: RecomputeRing,
    step: RecomputeStep,
    inputs: tuple[torch.Tensor | None, ...],
    cu_seqlens: torch.Tensor | None,
    token_strides: tuple[int, ...],
    beta_scale: float,
) -> None:
    lanes = warp_size()
    per_channel = ring.dt.dim() == 4
    update = cu_seqlens is not None
    _, heads, ring_len, value = ring.x.shape
    _, key_heads, _, key = ring.B.shape
    block_v = min(ROWS, max(16, next_power_of_2(value)))
    block_k = max(16, next_power_of_2(key))
    jit(_delta_recompute)[(heads * cdiv(value, block_v), len(step.rows))](
        *(
            state,
            ring.x,
            ring.B,
            ring.dt,
            *inputs,
            *step[:6],
            cu_seqlens,
            state.stride(0),
            *token_strides,
        ),
        HEADS=heads,
        VALUE=value,
        KEY=key,
        KEY_HEADS=key_heads,
        RING=ring_len,
        PER_CHANNEL=per_channel,
        BETA_SCALE=beta_scale,
        EPS=EPS,
        SPLIT=state.dtype == torch.int16,
        TENSOR=ring.x.dtype == torch.bfloat16,
        INTERPRETED=is_interpreter(),
        UPDATE=update,
        BLOCK_V=block_v,
        BLOCK_K=block_k,
        HISTORY=max(16, next_power_of_2(ring_len - step.max_query_len)),
        TOKENS=max(lanes // 4, next_power_of_2(step.max_query_len)),
        CHUNK=min(32, block_k),
        num_warps=4,
        num_stages=1,
        **(register_limit(REGISTERS[per_channel], lanes) if update else {}),
    )

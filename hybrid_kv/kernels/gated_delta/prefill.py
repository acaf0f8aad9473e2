"""The scan of a prefill with a gated delta rule in two launches: all chunks, then their chain.

With the state `S` [V, K] before a chunk, what the delta rule makes of its tokens is linear in `S`:
the WY form of Gated DeltaNet (Yang et al., 2024, arXiv 2412.06464), with decays per key channel
that of Kimi Linear (2025, arXiv 2510.26692). The first launch has a program per chunk and head. It
solves the triangular system of the chunk's keys and leaves `U` [T, V], `W`, `Q`, `R` [T, K], `P`
[T, T] and the chunk's decay `D` [K]. The second has a program per row, head and slice of `V`, which
keeps its state in registers in float32 while it walks along the row,

    u = U - W S^T        what each token learns
    y = Q S^T + P u
    S = S D + u^T R

and stores it in its block at the end of each of the `Spans`. It knows neither gates nor keys.

The inverse of the system is found column by column from the last token to the first, `x_j = e_j - X
l_j`: as stable as substitution, while powers of the system lose all digits where a key repeats.
Decays per channel are multiplied up on the way: nothing is divided by one, and no difference of
large sums is taken.

Shapes considered. (a) Many launches (flash-linear-attention: sums of decays, products of keys,
inverse, U and W, states, outputs): each leaves a tensor for the next, and all states pass memory.
(b) Three, with the outputs in one of their own that knows no order: one product less on the chain,
but all states pass memory. (c) Two: a state leaves its program for its block alone. This is (c).

bfloat16 and float16 inputs are multiplied as they are, with what weighs them rounded to the same
type, and summed in float32; float32 inputs are multiplied in float32.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from hybrid_kv.kernels.common.functions import softplus
from hybrid_kv.kernels.common.integers import cdiv, next_power_of_2
from hybrid_kv.kernels.common.launch import FLOATS, check, jit, strides, warp_size
from hybrid_kv.kernels.common.spans import Spans, check_scan
from hybrid_kv.kernels.gated_delta.reference import EPS
from hybrid_kv.kernels.gated_delta.slots import check_inputs

if TYPE_CHECKING:
    import triton.language as tl

# Differs from step to step: specialised on, it would compile the kernels again.
_COUNTS = ("num_tokens",)
TILE_BYTES = 64  # of a channel, tokens of a chunk; of a column of a state, what walks together


def _inside(
    q: tl.tensor,
    k: tl.tensor,
    v: tl.tensor,
    dt: tl.tensor,
    dt_bias: tl.tensor,
    A_log: tl.tensor,
    beta: tl.tensor,
    U: tl.tensor,
    W: tl.tensor,
    Q: tl.tensor,
    R: tl.tensor,
    P: tl.tensor,
    D: tl.tensor,
    chunks: tl.tensor,
    q_stride: tl.tensor,
    k_stride: tl.tensor,
    v_stride: tl.tensor,
    dt_stride: tl.tensor,
    beta_stride: tl.tensor,
    num_tokens: tl.tensor,
    HEADS: tl.constexpr,
    VALUE: tl.constexpr,
    KEY: tl.constexpr,
    KEY_HEADS: tl.constexpr,
    PER_CHANNEL: tl.constexpr,
    BETA_SCALE: tl.constexpr,
    EPS: tl.constexpr,
    PARTS: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_V: tl.constexpr,
    BLOCK_K: tl.constexpr,
) -> None:
    """Compute the part of a chunk that does not depend on the state: see the module.

    A chunk of `Spans` is `PARTS` of them. `P` lies transposed, [j, i], and a row of it is that of
    token j.
    """
    head = tl.program_id(0)
    chunk = tl.program_id(1)
    skipped = (chunk % PARTS) * BLOCK_T
    begin = (tl.load(chunks + chunk // PARTS * 2) + skipped).to(tl.int64)
    length = (tl.load(chunks + chunk // PARTS * 2 + 1) - begin).to(tl.int32)
    if length <= 0:
        return
    length = tl.minimum(length, BLOCK_T)
    n = tl.arange(0, BLOCK_K)
    t = tl.arange(0, BLOCK_T)
    p = tl.arange(0, BLOCK_V)
    in_t = t < length
    # True where the sizes divide, so that no mask is left.
    in_n = (n < KEY) | (KEY == BLOCK_K)
    in_p = (p < VALUE) | (VALUE == BLOCK_V)
    cells = in_n[:, None] & in_t[None, :]
    key = head // (HEADS // KEY_HEADS) * KEY
    gate = head * KEY if PER_CHANNEL else head
    q += begin * q_stride + key
    k += begin * k_stride + key
    v += begin * v_stride + head * VALUE
    dt += begin * dt_stride + gate
    first = head.to(tl.int64) * num_tokens + begin
    P += first * BLOCK_T
    keyed = first * KEY + (t[None, :] * KEY + n[:, None])
    D += (chunk.to(tl.int64) * HEADS + head) * KEY

    # Queries and keys as [K, T], products of tokens as [j, i]: column j of the system then lies
    # along a row.
    qt = tl.load(q + (t[None, :] * q_stride + n[:, None]), mask=cells, other=0.0)
    kt = tl.load(k + (t[None, :] * k_stride + n[:, None]), mask=cells, other=0.0)
    q_wide = qt.to(tl.float32)
    k_wide = kt.to(tl.float32)
    q_scale = tl.rsqrt(tl.sum(q_wide * q_wide, axis=0) + EPS) * (KEY**-0.5)
    k_scale = tl.rsqrt(tl.sum(k_wide * k_wide, axis=0) + EPS)
    q_wide *= q_scale[None, :]
    k_wide *= k_scale[None, :]
    raw_beta = tl.load(
        beta + begin * beta_stride + t * beta_stride + head, mask=in_t, other=0.0
    ).to(tl.float32)
    learned = BETA_SCALE / (1.0 + tl.exp(-raw_beta))
    a = -tl.exp(tl.load(A_log + head).to(tl.float32))
    if PER_CHANNEL:
        bias = tl.load(dt_bias + gate + n, mask=in_n, other=0.0).to(tl.float32)
        passed = tl.zeros([BLOCK_K, BLOCK_T], tl.float32)
        behind = tl.full([BLOCK_K], 1.0, tl.float32)
    else:
        w = tl.load(dt + t * dt_stride, mask=in_t, other=0.0).to(tl.float32) + tl.load(
            dt_bias + gate
        ).to(tl.float32)
        step = tl.where(in_t, softplus(w), 0.0)
        # Sums in base 2, integers and rest apart, for the reasons given in `ssd.prefill`.
        decay = tl.maximum(step * a * 1.4426950408889634, -1000.0)
        whole = tl.floor(decay + 0.5)
        rest = decay - whole
        whole_end = tl.sum(whole, axis=0)
        rest_end = tl.sum(rest, axis=0)
        whole = tl.cumsum(whole, axis=0)
        rest = tl.cumsum(rest, axis=0)
        between = tl.exp2((whole[None, :] - whole[:, None]) + (rest[None, :] - rest[:, None]))
        # Before the diagonal powers may be infinite: selected away, as a product with a mask of
        # zeros would be NaN.
        between = tl.where(t[:, None] <= t[None, :], between * k_scale[:, None], 0.0)
        system = (
            tl.dot(tl.trans(kt), kt, input_precision="ieee")
            * between
            * (k_scale * learned)[None, :]
        )
        pairs = tl.dot(tl.trans(kt), qt, input_precision="ieee") * between * q_scale[None, :]
        tl.store(
            P + (t[:, None] * BLOCK_T + t[None, :]),
            pairs.to(P.dtype.element_ty),
            mask=in_t[:, None],
        )
        passed = tl.exp2(whole + rest)[None, :]
        left = tl.exp2((whole_end - whole) + (rest_end - rest))[None, :]
        tl.store(R + keyed, (k_wide * left).to(R.dtype.element_ty), mask=cells)
        tl.store(D + n, tl.exp2(whole_end + rest_end), mask=in_n)

    inverse = tl.zeros([BLOCK_T, BLOCK_T], tl.float32)
    for down in range(length):
        j = length - 1 - down
        if PER_CHANNEL:
            # Of token i, `passed` is the decay from behind token j to i; `behind` that to the
            # chunk's end.
            kj = tl.load(k + j * k_stride + n, mask=in_n, other=0.0).to(tl.float32)
            kj *= tl.rsqrt(tl.sum(kj * kj, axis=0) + EPS)
            w = tl.load(dt + j * dt_stride + n, mask=in_n, other=0.0).to(tl.float32) + bias
            e = tl.exp(tl.minimum(w, 20.0))
            u = 1.0 + e
            step = tl.where(u == 1.0, e, tl.log(u) * (e / (u - 1.0)))
            decay = tl.exp(tl.where(w > 20.0, w, step) * a)
            passed = tl.where(t[None, :] == j, 1.0, passed)
            seen = passed * kj[:, None]
            column = tl.sum(k_wide * seen, axis=0) * learned
            pairs_of_j = tl.sum(q_wide * seen, axis=0)
            tl.store(P + (j * BLOCK_T + t), pairs_of_j.to(P.dtype.element_ty))
            tl.store(R + (first + j) * KEY + n, (kj * behind).to(R.dtype.element_ty), mask=in_n)
            passed *= decay[:, None]
            behind *= decay
        else:
            column = tl.sum(tl.where(t[:, None] == j, system, 0.0), axis=0)
        # Of the column the diagonal counts for nothing: column j of the inverse is still zero.
        solved = tl.where(t == j, 1.0, 0.0) - tl.sum(inverse * column[None, :], axis=1)
        inverse = tl.where(t[None, :] == j, solved[:, None], inverse)
    if PER_CHANNEL:
        tl.store(D + n, behind, mask=in_n)
    weights = (inverse * learned[None, :]).to(v.dtype.element_ty)
    vt = tl.load(
        v + (t[:, None] * v_stride + p[None, :]), mask=in_t[:, None] & in_p[None, :], other=0.0
    )
    values = tl.dot(weights, vt, input_precision="ieee")
    valued = first * VALUE + (t[:, None] * VALUE + p[None, :])
    tl.store(U + valued, values.to(U.dtype.element_ty), mask=in_t[:, None] & in_p[None, :])
    keys = tl.dot(
        (k_wide * passed).to(v.dtype.element_ty), tl.trans(weights), input_precision="ieee"
    )
    tl.store(W + keyed, keys.to(W.dtype.element_ty), mask=cells)
    tl.store(Q + keyed, (q_wide * passed).to(Q.dtype.element_ty), mask=cells)


def _across(
    state: tl.tensor,
    y: tl.tensor,
    U: tl.tensor,
    W: tl.tensor,
    Q: tl.tensor,
    R: tl.tensor,
    P: tl.tensor,
    D: tl.tensor,
    row_spans: tl.tensor,
    cu_spans: tl.tensor,
    cu_chunks: tl.tensor,
    span_blocks: tl.tensor,
    source_indices: tl.tensor,
    has_initial_state: tl.tensor,
    state_stride: tl.tensor,
    num_tokens: tl.tensor,
    HEADS: tl.constexpr,
    VALUE: tl.constexpr,
    KEY: tl.constexpr,
    PARTS: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_V: tl.constexpr,
    BLOCK_K: tl.constexpr,
) -> None:
    """Compute outputs, and store the states after all spans."""
    slices: tl.constexpr = (VALUE + BLOCK_V - 1) // BLOCK_V
    row = tl.program_id(1)
    head = tl.program_id(0) // slices
    p = (tl.program_id(0) % slices) * BLOCK_V + tl.arange(0, BLOCK_V)
    n = tl.arange(0, BLOCK_K)
    t = tl.arange(0, BLOCK_T)
    in_p = (p < VALUE) | (VALUE % BLOCK_V == 0)
    in_n = (n < KEY) | (KEY == BLOCK_K)
    in_slice = in_p[:, None] & in_n[None, :]
    cells = head * (VALUE * KEY) + p[:, None] * KEY + n[None, :]
    keyed = t[:, None] * KEY + n[None, :]
    plane = head.to(tl.int64) * num_tokens
    y += head * VALUE

    # Block ids are widened before they are multiplied: a pool passes 2^31 elements.
    source = tl.load(source_indices + row).to(tl.int64)
    readable = (source > 0) & (tl.load(has_initial_state + row) != 0)
    s = tl.load(state + source * state_stride + cells, mask=in_slice & readable, other=0.0).to(
        tl.float32
    )
    for span in range(tl.load(row_spans + row), tl.load(row_spans + row + 1)):
        chunk = tl.load(cu_chunks + span).to(tl.int64) * PARTS
        end = tl.load(cu_spans + span + 1)
        for start in range(tl.load(cu_spans + span), end, BLOCK_T):
            in_t = t < end - start
            first = plane + start
            in_keys = in_t[:, None] & in_n[None, :]
            in_values = in_t[:, None] & in_p[None, :]
            w = tl.load(W + first * KEY + keyed, mask=in_keys, other=0.0)
            q = tl.load(Q + first * KEY + keyed, mask=in_keys, other=0.0)
            r = tl.load(R + first * KEY + keyed, mask=in_keys, other=0.0)
            u = tl.load(
                U + first * VALUE + (t[:, None] * VALUE + p[None, :]), mask=in_values, other=0.0
            )
            pair_cells = t[:, None] * BLOCK_T + t[None, :]
            pairs = tl.load(P + first * BLOCK_T + pair_cells, mask=in_t[:, None], other=0.0)
            decay = tl.load(D + (chunk * HEADS + head) * KEY + n, mask=in_n, other=0.0)
            before = tl.trans(s.to(w.dtype))
            learned = (u.to(tl.float32) - tl.dot(w, before, input_precision="ieee")).to(w.dtype)
            out = tl.dot(q, before, input_precision="ieee")
            out = tl.dot(tl.trans(pairs), learned, out, input_precision="ieee")
            outputs = tl.cast(start, tl.int64) * (HEADS * VALUE) + (
                t[:, None] * (HEADS * VALUE) + p[None, :]
            )
            tl.store(y + outputs, out.to(y.dtype.element_ty), mask=in_values)
            s = tl.dot(tl.trans(learned), r, s * decay[None, :], input_precision="ieee")
            chunk += 1
        target = tl.load(span_blocks + span)
        # A program has read its slice before it writes one, and no other touches that slice of
        # these blocks.
        if target > 0:
            tl.store(
                state + target * state_stride + cells, s.to(state.dtype.element_ty), mask=in_slice
            )


def gated_delta_prefill(
    state: torch.Tensor,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    dt: torch.Tensor,
    dt_bias: torch.Tensor,
    A_log: torch.Tensor,
    beta: torch.Tensor,
    spans: Spans,
    source_indices: torch.Tensor,
    has_initial_state: torch.Tensor,
    beta_scale: float = 1.0,
) -> torch.Tensor:
    """Run every row's tokens from the row's state, and store the state at the end of each span.

    A row's initial state is zero, and not read, where `has_initial_state` is False, and for the
    null block 0 and negative ids, which are never written either. A row may write the block that it
    starts from. No block may be written twice, nor by one row and read by another.

    Args:
        state: [num_blocks, heads, V, K] float32, bfloat16 or float16, blocks at any stride;
            written.
        q, k, v, dt, dt_bias, A_log, beta, beta_scale: as `gated_delta_update_slots` takes them; q,
            k and v of one dtype, tokens at any stride below 2^24.
        spans: of the rows, on the device of v.
        source_indices: [num_rows] int32 or int64, the block that a row starts from.
        has_initial_state: [num_rows] bool.

    Returns:
        y like v, contiguous; tokens of no row are not written.

    Raises:
        ValueError: a shape, dtype, device or stride is none of these.
    """
    device = v.device
    per_channel = dt.dim() == 3
    key_heads, heads, key, value = check_inputs(
        q, k, v, dt, dt_bias, A_log, beta, shared=(v.dtype,)
    )
    check_scan(spans, source_indices, has_initial_state, v=v, q=q, k=k, dt=dt, beta=beta)
    check("state", state, (*state.shape[:1], heads, value, key), FLOATS, device, free=1)
    y = torch.empty_like(v, memory_format=torch.contiguous_format)
    if not len(spans.chunks):
        return y
    # Twice the tokens are half the links of the chain, but four times the work on their system, for
    # which there are no registers. Tiles are at least as wide as the narrowest matrix instruction.
    block_k, whole_v = (max(16, next_power_of_2(extent)) for extent in (key, value))
    block_t, block_v = (
        min(TILE_BYTES // v.element_size(), most) for most in (spans.chunk_size, whole_v)
    )
    parts = spans.chunk_size // block_t
    num_chunks = parts * len(spans.chunks)
    shared = {
        "HEADS": heads,
        "VALUE": value,
        "KEY": key,
        "PARTS": parts,
        "BLOCK_T": block_t,
        "BLOCK_K": block_k,
    }
    widths = (value, key, key, key, block_t)
    scratch = [
        torch.empty(heads, spans.num_tokens, width, dtype=v.dtype, device=device)
        for width in widths
    ]
    scratch.append(torch.empty(num_chunks, heads, key, dtype=torch.float32, device=device))
    jit(_inside, _COUNTS)[(heads, num_chunks)](
        *(
            q,
            k,
            v,
            dt,
            dt_bias,
            A_log,
            beta,
            *scratch,
            spans.chunks,
            *strides(q, k, v, dt, beta),
            spans.num_tokens,
        ),
        **shared,
        KEY_HEADS=key_heads,
        PER_CHANNEL=per_channel,
        BETA_SCALE=beta_scale,
        EPS=EPS,
        BLOCK_V=whole_v,
        num_warps=2 * v.element_size(),
        num_stages=1,
    )
    jit(_across, _COUNTS)[(heads * cdiv(value, block_v), spans.num_rows)](
        *(state, y, *scratch, spans.row_spans, spans.cu_spans, spans.cu_chunks, spans.span_blocks),
        *(source_indices, has_initial_state.view(torch.int8), *strides(state), spans.num_tokens),
        **shared,
        BLOCK_V=block_v,
        num_warps=8,
        # The next chunk on its way; of float32, and on AMD, where a stage more is held in
        # registers, there is no room.
        num_stages=2 if v.element_size() == 2 and warp_size() == 32 else 1,
    )
    return y

"""The programs of scheme `recompute`: a group's cursors, and one layer's step with its flush."""

from __future__ import annotations

from typing import TYPE_CHECKING

from hybrid_kv.kernels.common.functions import softplus

if TYPE_CHECKING:
    import triton.language as tl


def commit_kernel(
    base_pos: tl.tensor,
    ring_start: tl.tensor,
    n_hist: tl.tensor,
    prev_t: tl.tensor,
    rows: tl.tensor,
    num_gained_tokens: tl.tensor,
    cu_seqlens: tl.tensor,
    block_table: tl.tensor,
    step: tl.tensor,
    num_reqs: tl.tensor,
    table_stride: tl.tensor,
    RING: tl.constexpr,
    MAX_QUERY: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    # A lane owns a request and its cursors, which no other lane touches.
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = i < num_reqs
    row = tl.load(rows + i, mask=inside, other=-1).to(tl.int64)
    active = row >= 0
    row = tl.where(active, row, 0)
    before = tl.load(cu_seqlens + i, mask=inside, other=0).to(tl.int64)
    length = tl.load(cu_seqlens + i + 1, mask=inside, other=0).to(tl.int64) - before
    accepted = tl.load(num_gained_tokens + i, mask=active, other=0).to(tl.int64)
    base = tl.load(base_pos + row, mask=active, other=0)
    start = tl.load(ring_start + row, mask=active, other=0)
    appended = tl.load(prev_t + row, mask=active, other=0)
    held = tl.load(n_hist + row, mask=active, other=0) + tl.minimum(accepted, appended)

    flush = tl.where(held + length + MAX_QUERY > RING, held, 0)
    column = tl.zeros_like(base)
    new_column = column
    if BLOCK_SIZE > 0:
        to_boundary = BLOCK_SIZE - base % BLOCK_SIZE
        flush = tl.where(held >= to_boundary, to_boundary, flush)
        column = tl.maximum(base - 1, 0) // BLOCK_SIZE
        new_column = tl.maximum(base + flush - 1, 0) // BLOCK_SIZE
    table = block_table + i.to(tl.int64) * table_stride
    src = tl.load(table + column, mask=active, other=0).to(tl.int64)
    dst = tl.load(table + new_column, mask=active, other=0).to(tl.int64)

    tl.store(step + i, row, mask=inside)
    tl.store(step + num_reqs + i, src, mask=inside)
    tl.store(step + 2 * num_reqs + i, dst, mask=inside)
    tl.store(step + 3 * num_reqs + i, start, mask=inside)
    tl.store(step + 4 * num_reqs + i, held, mask=inside)
    tl.store(step + 5 * num_reqs + i, tl.where(active, flush, 0), mask=inside)
    tl.store(base_pos + row, base + flush, mask=active)
    tl.store(ring_start + row, (start + flush) % RING, mask=active)
    tl.store(n_hist + row, held - flush, mask=active)
    tl.store(prev_t + row, length, mask=active)


def recompute_kernel(
    state: tl.tensor,
    x_ring: tl.tensor,
    B_ring: tl.tensor,
    dt_ring: tl.tensor,
    x: tl.tensor,
    dt: tl.tensor,
    dt_bias: tl.tensor,
    A_log: tl.tensor,
    B: tl.tensor,
    C: tl.tensor,
    D: tl.tensor,
    y: tl.tensor,
    rows: tl.tensor,
    sources: tl.tensor,
    targets: tl.tensor,
    ring_starts: tl.tensor,
    histories: tl.tensor,
    flushes: tl.tensor,
    cu_seqlens: tl.tensor,
    state_stride: tl.tensor,
    x_stride: tl.tensor,
    dt_stride: tl.tensor,
    B_stride: tl.tensor,
    C_stride: tl.tensor,
    HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    STATE: tl.constexpr,
    GROUPS: tl.constexpr,
    RING: tl.constexpr,
    SPLIT: tl.constexpr,
    TENSOR: tl.constexpr,
    INTERPRETED: tl.constexpr,
    UPDATE: tl.constexpr,
    HEADS_PER_PROGRAM: tl.constexpr,
    BLOCK_P: tl.constexpr,
    BLOCK_N: tl.constexpr,
    HISTORY: tl.constexpr,
    TOKENS: tl.constexpr,
    KEYS: tl.constexpr,
    CHUNK: tl.constexpr,
) -> None:
    # Heads of one group share a program, so that B, C and B C^T are loaded and multiplied once.
    # Channels are the rows of every product, tokens its columns: 64 of one fill a tensor core's
    # tile, 8 of the other are its narrowest.
    OPERAND: tl.constexpr = tl.bfloat16 if TENSOR and not INTERPRETED else tl.float32
    row = tl.program_id(1)
    head = tl.program_id(0) * HEADS_PER_PROGRAM
    group = head // (HEADS // GROUPS)
    # Block ids are widened before they are multiplied: a pool passes 2^31 elements.
    ring = tl.load(rows + row).to(tl.int64)
    source = tl.load(sources + row).to(tl.int64)
    target = tl.load(targets + row).to(tl.int64)
    start = tl.load(ring_starts + row).to(tl.int32)
    held = tl.load(histories + row).to(tl.int32)
    flush = tl.load(flushes + row).to(tl.int32)
    owned = (source != 0) & (target != 0)

    p = tl.arange(0, BLOCK_P)
    n = tl.arange(0, BLOCK_N)
    j = tl.arange(0, HISTORY)
    # True where the sizes divide, so that no mask is left.
    in_p = (p < HEAD_DIM) | (HEAD_DIM == BLOCK_P)
    in_n = (n < STATE) | (STATE == BLOCK_N)
    place = start + j
    place = tl.where(place >= RING, place - RING, place)
    # A sum over what is after token j is taken of what is after, one place on.
    next_place = tl.where(place + 1 >= RING, 0, place + 1)
    x_ring += (ring * HEADS + head) * (RING * HEAD_DIM)
    dt_ring += (ring * HEADS + head) * RING
    B_ring += (ring * GROUPS + group) * (RING * STATE)
    state += head * (HEAD_DIM * STATE)
    LOW: tl.constexpr = HEADS * HEAD_DIM * STATE  # from the upper plane to the lower

    if UPDATE:
        first = tl.load(cu_seqlens + row).to(tl.int64)
        length = (tl.load(cu_seqlens + row + 1) - first).to(tl.int32)
        t = tl.arange(0, TOKENS)
        s = tl.arange(0, KEYS)
        x += first * x_stride + head * HEAD_DIM
        y += (first * HEADS + head) * HEAD_DIM
        B += first * B_stride + group * STATE
        C += first * C_stride + group * STATE
        dt += first * dt_stride + head
        in_t = t < length
        # Of padding only the output is written: what follows must not meet NaN.
        held = tl.where(owned, held, 0)
        in_s = (s < length) & owned
        in_j = j < held
        mine = in_p[:, None] & in_n[None, :] & owned
        behind = start + held + s
        behind = tl.where(behind >= RING, behind - RING, behind)

        in_c = (in_t & owned)[:, None] & in_n[None, :]
        c = tl.load(C + t[:, None] * C_stride + n[None, :], mask=in_c, other=0.0)
        c = tl.trans(c.to(OPERAND))
        in_b = in_s[:, None] & in_n[None, :]
        b = tl.load(B + s[:, None] * B_stride + n[None, :], mask=in_b, other=0.0)
        # One program of the group does it; as a branch it takes a third more registers.
        appends = in_s & (head % (HEADS // GROUPS) == 0)
        tl.store(
            B_ring + behind[:, None] * STATE + n[None, :],
            b.to(B_ring.dtype.element_ty),
            mask=appends[:, None] & in_n[None, :],
        )
        new = tl.dot(b.to(OPERAND), c, input_precision="ieee")
        new = tl.where(s[:, None] <= t[None, :], new, 0.0)
        in_b = in_j[:, None] & in_n[None, :]
        b = tl.load(B_ring + place[:, None] * STATE + n[None, :], mask=in_b, other=0.0)
        past = tl.dot(b.to(OPERAND), c, input_precision="ieee")

        for i in tl.range(0, HEADS_PER_PROGRAM, num_stages=1):
            a = -tl.exp(tl.load(A_log + head + i).to(tl.float32))
            tile = i * (HEAD_DIM * STATE) + p[:, None] * STATE + n[None, :]
            h = tl.load(state + source * state_stride + tile, mask=mine, other=0)
            if SPLIT:
                if TENSOR:
                    h = h.to(tl.bfloat16, bitcast=True)
                else:
                    low = tl.load(state + source * state_stride + LOW + tile, mask=mine, other=0)
                    h = ((h.to(tl.int32) << 16) + low.to(tl.int32)).to(tl.float32, bitcast=True)
            if TENSOR:
                h = h.to(tl.bfloat16)
            cells = (i * RING + place[:, None]) * HEAD_DIM + p[None, :]
            past_x = tl.load(x_ring + cells, mask=in_j[:, None] & in_p[None, :], other=0.0)
            in_x = in_s[:, None] & in_p[None, :]
            new_x = tl.load(
                x + s[:, None] * x_stride + i * HEAD_DIM + p[None, :], mask=in_x, other=0.0
            )
            past_dt = tl.load(dt_ring + i * RING + place, mask=in_j, other=0.0)
            later_dt = tl.load(dt_ring + i * RING + next_place, mask=j < held - 1, other=0.0)
            v = tl.load(dt + s * dt_stride + i, mask=in_s, other=0.0).to(tl.float32)
            v += tl.load(dt_bias + head + i).to(tl.float32)
            new_dt = tl.where(in_s, softplus(v), 0.0)

            # Every exponent is a sum of what lies between two tokens. It cannot be positive, and no
            # difference of sums loses the digits of neighbours.
            dt_t = tl.sum(tl.where(s[:, None] == t[None, :], new_dt[:, None], 0.0), axis=0)
            so_far = tl.cumsum(dt_t, axis=0)
            between = tl.cumsum(tl.where(s[:, None] < t[None, :], dt_t[None, :], 0.0), axis=1)
            later = tl.cumsum(later_dt, axis=0, reverse=True)
            out = tl.dot(h.to(OPERAND), c, input_precision="ieee")
            out *= tl.exp(a * (tl.sum(past_dt, axis=0) + so_far))[None, :]
            weights = past * (tl.exp(a * (later[:, None] + so_far[None, :])) * past_dt[:, None])
            if TENSOR:
                weights = weights.to(tl.bfloat16)
            out = tl.dot(
                tl.trans(past_x.to(OPERAND)), weights.to(OPERAND), out, input_precision="ieee"
            )
            weights = new * (tl.exp(a * between) * new_dt[:, None])
            if TENSOR:
                weights = weights.to(tl.bfloat16)
            out = tl.dot(
                tl.trans(new_x.to(OPERAND)), weights.to(OPERAND), out, input_precision="ieee"
            )
            # By itself: in the weights it would be rounded to bfloat16.
            token = t[None, :] * x_stride + i * HEAD_DIM + p[:, None]
            now = in_t[None, :] & in_p[:, None]
            skip = tl.load(x + token, mask=now & owned, other=0.0).to(tl.float32)
            out += tl.load(D + head + i).to(tl.float32) * skip
            tl.store(
                y + (t[None, :] * HEADS + i) * HEAD_DIM + p[:, None],
                out.to(y.dtype.element_ty),
                mask=now,
            )
            # After everything that any program reads in this launch.
            tl.store(
                x_ring + (i * RING + behind[:, None]) * HEAD_DIM + p[None, :],
                new_x.to(x_ring.dtype.element_ty),
                mask=in_s[:, None] & in_p[None, :],
            )
            tl.store(dt_ring + i * RING + behind, new_dt, mask=in_s)

    if owned & (flush > 0):
        # The outputs did not need the new checkpoint. In place it overwrites what they read.
        tl.debug_barrier()
        folded = j < flush
        for i in tl.range(0, HEADS_PER_PROGRAM, num_stages=1):
            a = -tl.exp(tl.load(A_log + head + i).to(tl.float32))
            past_dt = tl.load(dt_ring + i * RING + place, mask=folded, other=0.0)
            later_dt = tl.load(dt_ring + i * RING + next_place, mask=j < flush - 1, other=0.0)
            scale = tl.exp(a * tl.cumsum(later_dt, axis=0, reverse=True)) * past_dt
            decay = tl.exp(a * tl.sum(past_dt, axis=0))
            folded_cells = (i * RING + place[:, None]) * HEAD_DIM + p[None, :]
            in_folded = folded[:, None] & in_p[None, :]
            past_x = tl.load(x_ring + folded_cells, mask=in_folded, other=0.0)
            past_x = tl.trans(past_x.to(OPERAND))
            for start_n in tl.range(0, BLOCK_N, CHUNK, num_stages=1):
                k = start_n + tl.arange(0, CHUNK)
                in_k = (k < STATE) | (STATE == BLOCK_N)
                inside = in_p[:, None] & in_k[None, :]
                tile = i * (HEAD_DIM * STATE) + p[:, None] * STATE + k[None, :]
                h = tl.load(state + source * state_stride + tile, mask=inside, other=0)
                if SPLIT:
                    low = tl.load(state + source * state_stride + LOW + tile, mask=inside, other=0)
                    h = ((h.to(tl.int32) << 16) + low.to(tl.int32)).to(tl.float32, bitcast=True)
                b_cells = place[:, None] * STATE + k[None, :]
                in_piece = folded[:, None] & in_k[None, :]
                added = tl.load(B_ring + b_cells, mask=in_piece, other=0.0)
                added = added.to(tl.float32) * scale[:, None]
                if TENSOR:
                    # Two terms of eight bits: one would leave an error that the checkpoint carries
                    # on.
                    upper = added.to(tl.bfloat16)
                    rest = (added - upper.to(tl.float32)).to(tl.bfloat16)
                    added = tl.dot(past_x, rest.to(OPERAND))
                    added = tl.dot(past_x, upper.to(OPERAND), added)
                else:
                    added = tl.dot(past_x, added, input_precision="ieee")
                h = h.to(tl.float32) * decay + added
                if SPLIT:
                    bits = h.to(tl.int32, bitcast=True)
                    high = ((bits + 0x8000) >> 16).to(tl.int16)
                    tl.store(state + target * state_stride + tile, high, mask=inside)
                    tl.store(
                        state + target * state_stride + LOW + tile, bits.to(tl.int16), mask=inside
                    )
                else:
                    tl.store(
                        state + target * state_stride + tile,
                        h.to(state.dtype.element_ty),
                        mask=inside,
                    )

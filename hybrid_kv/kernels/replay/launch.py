"""The verify step of a Mamba-2 layer in the `replay` scheme: one state per request and the inputs of its last tokens.

A request keeps a *checkpoint*, its state after `base_pos` tokens, and a *ring* with the inputs (x, B, dt) of the tokens
since. A step reads the checkpoint, lets its tokens see the `n_hist` tokens of the ring as well, and appends their own
inputs behind them. Nothing is ever undone: the inputs of rejected tokens are overwritten, because the next step counts
only accepted ones. Now and then a step *flushes*: it folds the oldest `n_flush` tokens of the ring into the checkpoint
and writes it to the block of the last one of them. So a step moves one state, not the 2 + K of scheme `slots`, and most
steps half a one (see `split_state`).

Per step `commit` runs once for a group, then `replay_update` once for each of its layers. Both are device-only.

Invariants. The checkpoint lies in the block of column `(base_pos - 1) // block_size` of the request's block table
(column 0 in mode `none`), and so does what a flush writes, for the new `base_pos`: a block that no other request can
have seen. A step that does not flush writes no block, so a checkpoint may be a cached block that others read too.

Rule for `n_flush`, with `n_hist` the tokens in the ring at the start of the step, T those of the step and T_max the
most that a step can have:

1. The history reaches the next block boundary: all tokens up to it, and the rest, less than T_max, stays. One step
   passes at most one boundary, as `1 + K <= block_size`.
2. Otherwise, `n_hist + T + T_max > ring_len`: all. Were they kept and all T accepted, then the T_max of the next step
   would run into the history that it reads. (It could not flush first: programs of other heads may still read.)
3. Otherwise none.

A ring of `3 * T_max - 1` tokens holds what rule 1 leaves, the step and the one behind it; `n_hist` never exceeds
`ring_len - T_max`.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F

from hybrid_kv.kernels.common.launch import FLOATS, INTS, AotCase, check, jit, next_power_of_2, warp_size
from hybrid_kv.kernels.common.strided import copy_blocks
from hybrid_kv.kernels.replay.bytes import SHAPES, step_bytes

if TYPE_CHECKING:
    import triton.language as tl

WINDOW = 32  # tokens of history that a ring holds besides the step's; one tile of the kernel
HEADS_TOGETHER = 8  # in one program of a large batch …
SATURATED = 1024  # … which has this many programs even so
NUM_WARPS = 4
COMMIT_BLOCK = 32
COMMIT_RUNTIME = ("num_reqs", "table_stride")  # change with the batch: no kernel of their own for multiples of 16


# ---- states ----


def split_state(state: torch.Tensor) -> torch.Tensor:
    """Two 16-bit planes of float32 states: the bits are `(hi << 16) + lo`, for every bit pattern.

    Plane 0, `hi`, holds the bits of the state rounded to bfloat16 (half away from zero), plane 1 what is missing. Where
    bfloat16 is enough, half of the bytes are read.

    Args:
        state: [..., heads, head_dim, state] float32.

    Returns:
        [..., 2, heads, head_dim, state] int16.
    """
    low, high = state.contiguous().view(torch.int16).unflatten(-1, (-1, 2)).unbind(-1)
    # `low` counts as signed, so where its sign bit is set it takes one from `high`.
    return torch.stack([high - (low >> 15), low], dim=-4)


def join_state(planes: torch.Tensor) -> torch.Tensor:
    """The inverse of `split_state`."""
    high, low = planes.int().unbind(-4)
    return ((high << 16) + low).view(torch.float32)


def read_states(ssm_state: torch.Tensor, blocks: torch.Tensor) -> torch.Tensor:
    """The states in `blocks`.

    Args:
        ssm_state: [num_blocks, 2, heads, head_dim, state] int16, the planes of float32 states; or
            [num_blocks, heads, head_dim, state] in the states' own dtype.
        blocks: [n] int64.

    Returns:
        [n, heads, head_dim, state] float32, or of the states' dtype.
    """
    states = ssm_state.index_select(0, blocks)
    return join_state(states) if states.dtype == torch.int16 else states


def write_states(ssm_state: torch.Tensor, blocks: torch.Tensor, states: torch.Tensor) -> None:
    """Put states, [n, heads, head_dim, state] of any dtype, into `blocks`, each but the null block at most once."""
    kept = blocks != 0
    if not bool(kept.all()):
        blocks, states = blocks[kept], states[kept]
    values = split_state(states.float()) if ssm_state.dtype == torch.int16 else states.to(ssm_state.dtype)
    copy_blocks(ssm_state, blocks, values)


# ---- rings and cursors ----


def default_ring_len(max_query_len: int) -> int:
    """Tokens of a ring: longer ones flush less often, but every step reads the history."""
    return max(WINDOW, 2 * max_query_len - 1) + max_query_len


@dataclass(frozen=True)
class ReplayRing:
    """The inputs of the last tokens of every request, of one layer; a request's token i is at `i % ring_len`.

    The memory is never cleared: nothing beyond a request's `n_hist` tokens is read.

    Attributes:
        x: [num_rows, heads, ring_len, head_dim].
        B: [num_rows, groups, ring_len, state], of the dtype of x.
        dt: [num_rows, heads, ring_len], after softplus; float64 where x is, else float32.
    """

    x: torch.Tensor
    B: torch.Tensor
    dt: torch.Tensor

    @classmethod
    def allocate(
        cls,
        num_rows: int,
        ring_len: int,
        heads: int,
        head_dim: int,
        groups: int,
        state_size: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> ReplayRing:
        """Rings for `num_rows` requests at once; `dtype` is that of the layer's activations."""
        wide = torch.promote_types(dtype, torch.float32)
        return cls(
            torch.zeros(num_rows, heads, ring_len, head_dim, dtype=dtype, device=device),
            torch.zeros(num_rows, groups, ring_len, state_size, dtype=dtype, device=device),
            torch.zeros(num_rows, heads, ring_len, dtype=wide, device=device),
        )

    @property
    def ring_len(self) -> int:
        return self.x.shape[2]

    @property
    def nbytes(self) -> int:
        """Of all rows."""
        return self.x.nbytes + self.B.nbytes + self.dt.nbytes


@dataclass(frozen=True)
class ReplayCursors:
    """Where each request's checkpoint and history are; one for all layers of a group. A graph may keep reading it.

    Attributes:
        base_pos: [num_rows] int64, tokens that the checkpoint has seen.
        ring_start: [num_rows] int64, place in the ring of the first token behind the checkpoint.
        n_hist: [num_rows] int64, tokens behind the checkpoint that were accepted, as of the last `commit`.
        prev_t: [num_rows] int64, tokens that the last step appended behind those; 0 after a prefill.
        ring_len: of the rings.
        max_query_len: 1 + K.
    """

    base_pos: torch.Tensor
    ring_start: torch.Tensor
    n_hist: torch.Tensor
    prev_t: torch.Tensor
    ring_len: int
    max_query_len: int

    @classmethod
    def allocate(cls, num_rows: int, ring_len: int, max_query_len: int, device: torch.device) -> ReplayCursors:
        """Cursors of `num_rows` requests.

        Raises:
            ValueError: the ring is too short.
        """
        shortest = 3 * max_query_len - 1
        if ring_len < shortest:
            raise ValueError(f"ring_len={ring_len} is too short for steps of {max_query_len} tokens; use {shortest}")
        base_pos, ring_start, n_hist, prev_t = torch.zeros(4, num_rows, dtype=torch.int64, device=device)
        return cls(base_pos, ring_start, n_hist, prev_t, ring_len, max_query_len)

    def restart(self, rows: torch.Tensor, base_pos: torch.Tensor) -> None:
        """Begin anew from states after `base_pos` tokens: after a prefill, and when a request takes a row.

        Args:
            rows: [n] int64, each at most once.
            base_pos: [n] int64, at least 1 by the time of the first `commit`.
        """
        self.base_pos[rows] = base_pos
        for part in (self.ring_start, self.n_hist, self.prev_t):
            part[rows] = 0


@dataclass(frozen=True)
class ReplayStep:
    """What every layer of a group does in one step, per row of the batch; all [num_reqs] int64.

    Attributes:
        rows: row of the rings; any for padding.
        src: block of the checkpoint; 0: padding, the row reads and writes nothing.
        dst: block of the checkpoint after the flush; `src` where none is due.
        ring_start: place of the history's first token.
        n_hist: tokens of history, those to flush included; behind them this step appends its own.
        n_flush: how many of them, from the first, go into the checkpoint.
        max_query_len: the most tokens of a row.
    """

    rows: torch.Tensor
    src: torch.Tensor
    dst: torch.Tensor
    ring_start: torch.Tensor
    n_hist: torch.Tensor
    n_flush: torch.Tensor
    max_query_len: int


def commit_reference(
    cursors: ReplayCursors,
    rows: torch.Tensor,
    num_accepted_tokens: torch.Tensor,
    cu_seqlens: torch.Tensor,
    block_table: torch.Tensor,
    block_size: int | None,
) -> ReplayStep:
    """Take in what the last step had accepted, decide what this one flushes, and move the cursors past it.

    A row without tokens only flushes, and only what a boundary demands: that is how a request that leaves is finalized.

    Args:
        cursors: of the group; written.
        rows: [num_reqs] int32 or int64, where each request's cursors and rings are, each at most once; -1: padding.
        num_accepted_tokens: [num_reqs] int32 or int64, in the request's last decode step, bonus token included; any
            number if there was none since its `restart`.
        cu_seqlens: [num_reqs + 1] int32 or int64, tokens of this step; at most `max_query_len` each.
        block_table: [num_reqs, width] int32 or int64 in the order of the batch.
        block_size: tokens of a column; None in mode `none`, which has one column.

    Raises:
        ValueError: a step could pass two boundaries.
    """
    if block_size is not None and block_size < cursors.max_query_len:
        raise ValueError(f"block_size={block_size} is shorter than a step of {cursors.max_query_len} tokens")
    padding = rows < 0
    row = rows.clamp(min=0).long()
    lengths = cu_seqlens.diff().long()
    base_pos, ring_start = cursors.base_pos[row], cursors.ring_start[row]
    n_hist = cursors.n_hist[row] + torch.minimum(num_accepted_tokens, cursors.prev_t[row])
    full = n_hist + lengths + cursors.max_query_len > cursors.ring_len
    n_flush = torch.where(full, n_hist, 0)
    column = torch.zeros_like(row)
    new_column = column
    if block_size is not None:
        to_boundary = block_size - base_pos % block_size
        n_flush = torch.where(n_hist >= to_boundary, to_boundary, n_flush)
        column = (base_pos - 1).clamp(min=0) // block_size
        new_column = (base_pos + n_flush - 1).clamp(min=0) // block_size
    src, dst = (
        block_table.gather(1, part.masked_fill(padding, 0)[:, None])[:, 0].long().masked_fill(padding, 0)
        for part in (column, new_column)
    )
    n_flush, n_hist, ring_start = (part.masked_fill(padding, 0) for part in (n_flush, n_hist, ring_start))
    kept = ~padding
    for target, values in (
        (cursors.base_pos, base_pos + n_flush),
        (cursors.ring_start, (ring_start + n_flush) % cursors.ring_len),
        (cursors.n_hist, n_hist - n_flush),
        (cursors.prev_t, lengths),
    ):
        target[row[kept]] = values[kept]
    return ReplayStep(row, src, dst, ring_start, n_hist, n_flush, cursors.max_query_len)


# ---- one layer, in plain torch ----


def _arithmetic(ssm_state: torch.Tensor, ring: ReplayRing) -> torch.dtype:
    return torch.promote_types(ring.dt.dtype, torch.float64 if ssm_state.dtype == torch.float64 else torch.float32)


def _history(
    ring: ReplayRing, step: ReplayStep, count: torch.Tensor, dtype: torch.dtype
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """x [num_reqs, W, heads, head_dim], dt and B alike, of the first `count` tokens of the history; then zeros."""
    j = torch.arange(ring.ring_len - step.max_query_len, device=ring.x.device)
    place, row = (step.ring_start[:, None] + j) % ring.ring_len, step.rows[:, None]
    beyond = (j >= count[:, None])[..., None]
    # Filled, not multiplied: an earlier request may have left NaN or infinity behind. With dt = 0 a token neither
    # decays nor adds.
    x, B = (part[row, :, place].to(dtype).masked_fill(beyond[..., None], 0) for part in (ring.x, ring.B))
    return x, ring.dt[row, :, place].to(dtype).masked_fill(beyond, 0), B


def replay_flush_reference(ssm_state: torch.Tensor, ring: ReplayRing, step: ReplayStep, A_log: torch.Tensor) -> None:
    """`replay_flush` in plain torch, in float64 where states or activations are, else float32."""
    dtype = _arithmetic(ssm_state, ring)
    x, dt, B = _history(ring, step, step.n_flush, dtype)
    A = -torch.exp(A_log.to(dtype))
    # Sums of what is still to come, not differences of sums: those would lose the digits that matter most.
    later = F.pad(dt, (0, 0, 0, 1))[:, 1:].flip(1).cumsum(1).flip(1)
    u = x * (dt * torch.exp(later * A)).unsqueeze(-1)
    states = read_states(ssm_state, step.src).to(dtype) * torch.exp(dt.sum(1) * A)[..., None, None]
    states = states + torch.einsum("rjhp,rjhn->rhpn", u, B.repeat_interleave(x.shape[2] // B.shape[2], dim=2))
    write_states(ssm_state, step.dst.masked_fill((step.src == 0) | (step.n_flush == 0), 0), states)


def replay_update_reference(
    ssm_state: torch.Tensor,
    ring: ReplayRing,
    step: ReplayStep,
    x: torch.Tensor,
    dt: torch.Tensor,
    dt_bias: torch.Tensor,
    A_log: torch.Tensor,
    B: torch.Tensor,
    C: torch.Tensor,
    D: torch.Tensor,
    cu_seqlens: torch.Tensor,
) -> torch.Tensor:
    """`replay_update` in plain torch, in float64 where states or activations are, else float32.

    Tokens of no row come out as zeros.
    """
    y = torch.zeros_like(x, memory_format=torch.contiguous_format)
    if len(x):
        dtype = _arithmetic(ssm_state, ring)
        t = torch.arange(step.max_query_len, device=x.device)
        inside = (t < cu_seqlens.diff()[:, None]) & ((step.src != 0) & (step.dst != 0))[:, None]
        row, j = inside.nonzero(as_tuple=True)
        token = (cu_seqlens[:-1, None] + t).clamp(max=len(x) - 1)

        def padded(tokens: torch.Tensor) -> torch.Tensor:
            values = tokens[token].to(dtype)
            return values.masked_fill(~inside.view(*inside.shape, *[1] * (values.dim() - 2)), 0)

        new_x, new_B, C_rows = padded(x), padded(B), padded(C)
        new_dt = F.softplus(padded(dt) + dt_bias.to(dtype)).masked_fill(~inside[..., None], 0)
        past = _history(ring, step, step.n_hist, dtype)
        every_x, every_dt, every_B = (torch.cat(pair, 1) for pair in zip(past, (new_x, new_dt, new_B), strict=True))
        log_decay = (every_dt * -torch.exp(A_log.to(dtype))).transpose(1, 2)  # [num_reqs, heads, W + T]
        i = torch.arange(log_decay.shape[2], device=x.device)
        now = len(i) - len(t) + t
        # From token s to token t: the sum over what lies behind s, since a difference of sums would lose the digits of
        # neighbours. exp() is 1 where s is yet to come, so these are left out of the scores.
        between = log_decay.unsqueeze(2).where(i > i[:, None], 0).cumsum(3)[..., now].transpose(2, 3)
        groups, per_group = B.shape[1], x.shape[1] // B.shape[1]
        scores = torch.einsum("rtgn,rsgn->rgts", C_rows, every_B).where(i <= now[:, None], 0)
        weights = scores.repeat_interleave(per_group, dim=1) * between.exp()
        out = torch.einsum("rhts,rshp->rthp", weights, every_x * every_dt.unsqueeze(-1))
        states = _readout(ssm_state, step.src, x.dtype).to(dtype).masked_fill((step.src == 0)[:, None, None, None], 0)
        decay = log_decay.cumsum(2)[..., now].exp().transpose(1, 2).unsqueeze(-1)
        read = torch.einsum("rtgn,rgkpn->rtgkp", C_rows, states.unflatten(1, (groups, per_group)))
        out = torch.addcmul(out + read.flatten(2, 3) * decay, new_x, D.to(dtype)[:, None])
        y[token[row, j]] = out[row, j].to(y.dtype)

        place, ring_row = ((step.ring_start + step.n_hist)[row] + j) % ring.ring_len, step.rows[row]
        for target, values in ((ring.x, new_x), (ring.B, new_B), (ring.dt, new_dt)):
            target[ring_row, :, place] = values[row, j].to(target.dtype)
    replay_flush_reference(ssm_state, ring, step, A_log)
    return y


def _readout(ssm_state: torch.Tensor, blocks: torch.Tensor, activations: torch.dtype) -> torch.Tensor:
    """The states as outputs see them: with bfloat16 activations their upper plane."""
    if ssm_state.dtype == torch.int16 and activations == torch.bfloat16:
        return ssm_state[blocks, 0].view(torch.bfloat16)
    return read_states(ssm_state, blocks)


# ---- the kernels ----


def _commit(
    base_pos: tl.tensor,
    ring_start: tl.tensor,
    n_hist: tl.tensor,
    prev_t: tl.tensor,
    rows: tl.tensor,
    num_accepted_tokens: tl.tensor,
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
    # A lane owns a request and its cursors, which nobody else touches.
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = i < num_reqs
    row = tl.load(rows + i, mask=inside, other=-1).to(tl.int64)
    active = row >= 0
    row = tl.where(active, row, 0)
    before = tl.load(cu_seqlens + i, mask=inside, other=0).to(tl.int64)
    length = tl.load(cu_seqlens + i + 1, mask=inside, other=0).to(tl.int64) - before
    accepted = tl.load(num_accepted_tokens + i, mask=active, other=0).to(tl.int64)
    base = tl.load(base_pos + row, mask=active, other=0)
    start = tl.load(ring_start + row, mask=active, other=0)
    appended = tl.load(prev_t + row, mask=active, other=0)
    held = tl.load(n_hist + row, mask=active, other=0) + tl.minimum(accepted, appended)

    flush = tl.where(held + length + MAX_QUERY > RING, held, 0)
    column = base * 0
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


def _replay(
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
    # Heads of one group share a program, so that B, C and B C^T are loaded and multiplied once. Channels are the rows
    # of every product, tokens its columns: 64 of one fill a tensor core's tile, 8 of the other are its narrowest.
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
    # A sum over what is behind token j is taken of what is behind, one place on.
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

        c = tl.load(C + t[:, None] * C_stride + n[None, :], mask=(in_t & owned)[:, None] & in_n[None, :], other=0.0)
        c = tl.trans(c.to(OPERAND))
        b = tl.load(B + s[:, None] * B_stride + n[None, :], mask=in_s[:, None] & in_n[None, :], other=0.0)
        # One program of the group does it; as a branch it takes a third more registers.
        appends = in_s & (head % (HEADS // GROUPS) == 0)
        tl.store(
            B_ring + behind[:, None] * STATE + n[None, :],
            b.to(B_ring.dtype.element_ty),
            mask=appends[:, None] & in_n[None, :],
        )
        new = tl.dot(b.to(OPERAND), c, input_precision="ieee")
        new = tl.where(s[:, None] <= t[None, :], new, 0.0)
        b = tl.load(B_ring + place[:, None] * STATE + n[None, :], mask=in_j[:, None] & in_n[None, :], other=0.0)
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
            past_x = tl.load(
                x_ring + (i * RING + place[:, None]) * HEAD_DIM + p[None, :],
                mask=in_j[:, None] & in_p[None, :],
                other=0.0,
            )
            new_x = tl.load(
                x + s[:, None] * x_stride + i * HEAD_DIM + p[None, :], mask=in_s[:, None] & in_p[None, :], other=0.0
            )
            past_dt = tl.load(dt_ring + i * RING + place, mask=in_j, other=0.0)
            later_dt = tl.load(dt_ring + i * RING + next_place, mask=j < held - 1, other=0.0)
            v = tl.load(dt + s * dt_stride + i, mask=in_s, other=0.0).to(tl.float32)
            v += tl.load(dt_bias + head + i).to(tl.float32)
            # softplus = log1p(exp(v)). log(1 + e) alone errs by 6e-5 of dt at v = -7, where time steps are: dividing by
            # the rounded (1 + e) - 1 cancels the error of the sum. Above 20 it is v, as in torch.
            e = tl.exp(tl.minimum(v, 20.0))
            u = 1.0 + e
            new_dt = tl.where(u == 1.0, e, tl.log(u) * (e / (u - 1.0)))
            new_dt = tl.where(in_s, tl.where(v > 20.0, v, new_dt), 0.0)

            # Every exponent is a sum of what lies between two tokens. It cannot be positive, and no difference of sums
            # loses the digits of neighbours.
            dt_t = tl.sum(tl.where(s[:, None] == t[None, :], new_dt[:, None], 0.0), axis=0)
            so_far = tl.cumsum(dt_t, axis=0)
            between = tl.cumsum(tl.where(s[:, None] < t[None, :], dt_t[None, :], 0.0), axis=1)
            later = tl.cumsum(later_dt, axis=0, reverse=True)
            out = tl.dot(h.to(OPERAND), c, input_precision="ieee")
            out *= tl.exp(a * (tl.sum(past_dt, axis=0) + so_far))[None, :]
            weights = past * (tl.exp(a * (later[:, None] + so_far[None, :])) * past_dt[:, None])
            if TENSOR:
                weights = weights.to(tl.bfloat16)
            out = tl.dot(tl.trans(past_x.to(OPERAND)), weights.to(OPERAND), out, input_precision="ieee")
            weights = new * (tl.exp(a * between) * new_dt[:, None])
            if TENSOR:
                weights = weights.to(tl.bfloat16)
            out = tl.dot(tl.trans(new_x.to(OPERAND)), weights.to(OPERAND), out, input_precision="ieee")
            # By itself: in the weights it would be rounded to bfloat16.
            token = t[None, :] * x_stride + i * HEAD_DIM + p[:, None]
            now = in_t[None, :] & in_p[:, None]
            skip = tl.load(x + token, mask=now & owned, other=0.0).to(tl.float32)
            out += tl.load(D + head + i).to(tl.float32) * skip
            tl.store(y + (t[None, :] * HEADS + i) * HEAD_DIM + p[:, None], out.to(y.dtype.element_ty), mask=now)
            # Behind everything that any program reads in this launch.
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
            past_x = tl.load(
                x_ring + (i * RING + place[:, None]) * HEAD_DIM + p[None, :],
                mask=folded[:, None] & in_p[None, :],
                other=0.0,
            )
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
                added = tl.load(
                    B_ring + place[:, None] * STATE + k[None, :], mask=folded[:, None] & in_k[None, :], other=0.0
                )
                added = added.to(tl.float32) * scale[:, None]
                if TENSOR:
                    # Two terms of eight bits: one would leave an error that the checkpoint carries on.
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
                    tl.store(state + target * state_stride + LOW + tile, bits.to(tl.int16), mask=inside)
                else:
                    tl.store(state + target * state_stride + tile, h.to(state.dtype.element_ty), mask=inside)


# ---- launches ----


def _constexprs(
    x_ring: Sequence[int],
    B_ring: Sequence[int],
    max_query_len: int,
    num_reqs: int,
    state_dtype: torch.dtype,
    dtype: torch.dtype,
    update: bool,
    lanes: int,
    interpreted: bool = False,
) -> dict[str, Any]:
    """Of a launch for rings [num_rows, *x_ring] and [num_rows, *B_ring]."""
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
        "INTERPRETED": interpreted,
        "UPDATE": update,
        "HEADS_PER_PROGRAM": together,
        "BLOCK_P": max(16, next_power_of_2(head_dim)),
        "BLOCK_N": block_n,
        "HISTORY": max(16, next_power_of_2(ring_len - max_query_len)),
        "TOKENS": max(lanes // 4, next_power_of_2(max_query_len)),
        "KEYS": max(16, next_power_of_2(max_query_len)),
        "CHUNK": min(32, block_n),
    }


def commit(
    cursors: ReplayCursors,
    rows: torch.Tensor,
    num_accepted_tokens: torch.Tensor,
    cu_seqlens: torch.Tensor,
    block_table: torch.Tensor,
    block_size: int | None,
) -> ReplayStep:
    """`commit_reference` in one launch for all layers of a group.

    Raises:
        ValueError: a shape, dtype, device or stride is not as `commit_reference` has it, or a step could pass two
            boundaries.
    """
    if block_size is not None and block_size < cursors.max_query_len:
        raise ValueError(f"block_size={block_size} is shorter than a step of {cursors.max_query_len} tokens")
    device, num_reqs = cursors.base_pos.device, len(rows)
    for name in ("base_pos", "ring_start", "n_hist", "prev_t"):
        check(f"cursors.{name}", getattr(cursors, name), (len(cursors.base_pos),), (torch.int64,), device)
    check("rows", rows, (num_reqs,), INTS, device)
    check("num_accepted_tokens", num_accepted_tokens, (num_reqs,), INTS, device)
    check("cu_seqlens", cu_seqlens, (num_reqs + 1,), INTS, device)
    if block_table.dim() != 2:
        raise ValueError(f"block_table has shape {tuple(block_table.shape)}; it must be [num_reqs, width]")
    check("block_table", block_table, (num_reqs, block_table.shape[1]), INTS, device, free=1)
    step = torch.empty(6, num_reqs, dtype=torch.int64, device=device)
    jit(_commit, COMMIT_RUNTIME)[(-(-num_reqs // COMMIT_BLOCK),)](
        cursors.base_pos,
        cursors.ring_start,
        cursors.n_hist,
        cursors.prev_t,
        rows,
        num_accepted_tokens,
        cu_seqlens,
        block_table,
        step,
        num_reqs,
        block_table.stride(0),
        RING=cursors.ring_len,
        MAX_QUERY=cursors.max_query_len,
        BLOCK_SIZE=block_size or 0,
        BLOCK=COMMIT_BLOCK,
        num_warps=1,
    )
    row, src, dst, ring_start, n_hist, n_flush = step
    return ReplayStep(row, src, dst, ring_start, n_hist, n_flush, cursors.max_query_len)


def _check_layer(
    ssm_state: torch.Tensor, ring: ReplayRing, step: ReplayStep, A_log: torch.Tensor
) -> tuple[int, int, int, int]:
    """heads, head_dim, groups and state of a layer whose tensors fit together."""
    device = ssm_state.device
    if ring.x.dim() != 4 or ring.B.dim() != 4:
        raise ValueError(f"ring.x and ring.B have {ring.x.dim()} and {ring.B.dim()} dimensions; both must have 4")
    num_rows, heads, ring_len, head_dim = ring.x.shape
    groups, size = ring.B.shape[1], ring.B.shape[3]
    if groups < 1 or heads % groups:
        raise ValueError(f"{groups} groups of ring.B do not divide {heads} heads")
    planes = (2,) if ssm_state.dtype == torch.int16 else ()
    shape = (len(ssm_state), *planes, heads, head_dim, size)
    check("ssm_state", ssm_state, shape, (torch.int16, torch.bfloat16, torch.float16), device, free=1)
    check("ring.x", ring.x, ring.x.shape, FLOATS, device)
    check("ring.B", ring.B, (num_rows, groups, ring_len, size), (ring.x.dtype,), device)
    check("ring.dt", ring.dt, (num_rows, heads, ring_len), (torch.float32,), device)
    check("A_log", A_log, (heads,), FLOATS, device)
    if ring_len < 3 * step.max_query_len - 1:
        raise ValueError(f"a ring of {ring_len} tokens is too short for steps of {step.max_query_len}")
    for name in ("rows", "src", "dst", "ring_start", "n_hist", "n_flush"):
        check(f"step.{name}", getattr(step, name), (len(step.rows),), INTS, device)
    return heads, head_dim, groups, size


def replay_update(
    ssm_state: torch.Tensor,
    ring: ReplayRing,
    step: ReplayStep,
    x: torch.Tensor,
    dt: torch.Tensor,
    dt_bias: torch.Tensor,
    A_log: torch.Tensor,
    B: torch.Tensor,
    C: torch.Tensor,
    D: torch.Tensor,
    cu_seqlens: torch.Tensor,
) -> torch.Tensor:
    """Run the tokens of every row behind its checkpoint and history, append their inputs, flush; one launch.

    Row r has the tokens `cu_seqlens[r] … cu_seqlens[r + 1] - 1`, at most `step.max_query_len`. A row of padding (`src`
    or `dst` is the null block) neither reads nor writes states and rings; its outputs are zeros. No `dst` may be
    another row's `src` or `dst`; a row may flush in place.

    With bfloat16 inputs the products run on tensor cores: operands are rounded to bfloat16, the state included, of
    which only the upper plane is read unless the row flushes; what a flush adds is accurate to 16 bits. Otherwise all
    arithmetic is in float32. So y errs by 6e-3 and 1e-5 of the largest of its head, checkpoints by 5e-6 a flush.

    Args:
        ssm_state: [num_blocks, 2, heads, head_dim, state] int16, planes of float32 (`split_state`); or
            [num_blocks, heads, head_dim, state] bfloat16 or float16; blocks at any stride; written.
        ring: of the layer; written.
        step: of the layer's group, from `commit`.
        x: [num_tokens, heads, head_dim]; B, C: [num_tokens, groups, state]; of the ring's dtype, tokens at any stride.
        dt: [num_tokens, heads] before bias and softplus, tokens at any stride.
        dt_bias, A_log, D: [heads].
        cu_seqlens: [num_reqs + 1] int32 or int64 from 0, never falling.

    Returns:
        y like x, contiguous; tokens of no row are not written.

    Raises:
        ValueError: a shape, dtype, device or stride is none of these.
    """
    heads, head_dim, groups, size = _check_layer(ssm_state, ring, step, A_log)
    device, dtype = ssm_state.device, ring.x.dtype
    tokens, num_reqs = len(x), len(step.rows)
    check("x", x, (tokens, heads, head_dim), (dtype,), device, free=1)
    check("dt", dt, (tokens, heads), FLOATS, device, free=1)
    for name, per_group in (("B", B), ("C", C)):
        check(name, per_group, (tokens, groups, size), (dtype,), device, free=1)
    for name, per_head in (("dt_bias", dt_bias), ("D", D)):
        check(name, per_head, (heads,), FLOATS, device)
    check("cu_seqlens", cu_seqlens, (num_reqs + 1,), INTS, device)
    y = torch.empty_like(x, memory_format=torch.contiguous_format)
    inputs = (x, dt, dt_bias, A_log, B, C, D, y)
    strides = (x.stride(0), dt.stride(0), B.stride(0), C.stride(0))
    _launch(ssm_state, ring, step, inputs, cu_seqlens, strides)
    return y


def replay_flush(ssm_state: torch.Tensor, ring: ReplayRing, step: ReplayStep, A_log: torch.Tensor) -> None:
    """The flush of `replay_update` alone, for rows without tokens: a request leaves and its last boundary is due.

    Raises:
        ValueError: a shape, dtype, device or stride is not as `replay_update` has it.
    """
    _check_layer(ssm_state, ring, step, A_log)
    _launch(ssm_state, ring, step, (None, None, None, A_log, None, None, None, None), None, (0, 0, 0, 0))


def _launch(
    ssm_state: torch.Tensor,
    ring: ReplayRing,
    step: ReplayStep,
    inputs: tuple[torch.Tensor | None, ...],
    cu_seqlens: torch.Tensor | None,
    strides: tuple[int, int, int, int],
) -> None:
    constexprs = _constexprs(
        ring.x.shape[1:],
        ring.B.shape[1:],
        step.max_query_len,
        len(step.rows),
        ssm_state.dtype,
        ring.x.dtype,
        cu_seqlens is not None,
        warp_size(),
        interpreted=ssm_state.device.type == "cpu",
    )
    jit(_replay)[(constexprs["HEADS"] // constexprs["HEADS_PER_PROGRAM"], len(step.rows))](
        ssm_state,
        ring.x,
        ring.B,
        ring.dt,
        *inputs,
        step.rows,
        step.src,
        step.dst,
        step.ring_start,
        step.n_hist,
        step.n_flush,
        cu_seqlens,
        ssm_state.stride(0),
        *strides,
        **constexprs,
        num_warps=NUM_WARPS,
    )


def aot_cases(lanes: int = 32) -> list[AotCase]:
    """What launches compile on GPUs with warps of `lanes`, for bfloat16 activations."""
    # One tile of tokens serves up to seven drafts, so K moves only the length of the ring.
    cases = [
        ("Nemotron-3-Nano", torch.float32, 3, 256, True),
        ("Nemotron-3-Nano", torch.float32, 3, 1, True),
        ("Nemotron-3-Nano", torch.bfloat16, 3, 256, True),
        ("Nemotron-3-Nano", torch.float32, 3, 1, False),
        ("Nemotron-H-8B", torch.float32, 5, 256, True),
    ]
    activations = dict.fromkeys(("x", "dt", "B", "C", "y"), "*bf16") | dict.fromkeys(("dt_bias", "D"), "*fp32")
    strides = ("x_stride", "dt_stride", "B_stride", "C_stride")
    update_only = activations | {"cu_seqlens": "*i64"} | dict.fromkeys(strides, "i32")
    found = []
    for name, dtype, k, num_reqs, update in cases:
        heads, head_dim, size, groups = shape = SHAPES[name]
        ring_len = default_ring_len(1 + k)
        planes = torch.int16 if dtype == torch.float32 else dtype
        constexprs: dict[str, Any] = _constexprs(
            (heads, ring_len, head_dim),
            (groups, ring_len, size),
            1 + k,
            num_reqs,
            planes,
            torch.bfloat16,
            update,
            lanes,
        )
        share = constexprs["HEADS_PER_PROGRAM"] / heads
        moved = sum(step_bytes(shape, dtype, 1 + k, ring_len - 1 - k, False).values())
        pointers = {"state": "*i16" if planes == torch.int16 else "*bf16", "A_log": "*fp32"}
        pointers |= {"x_ring": "*bf16", "B_ring": "*bf16", "dt_ring": "*fp32"}
        indices = ("rows", "sources", "targets", "ring_starts", "histories", "flushes")
        found.append(
            AotCase(
                kernel=f"replay.replay_{'update' if update else 'flush'}",
                shape=f"{name}, K={k}, {num_reqs} rows",
                dtype=str(dtype).removeprefix("torch."),
                fn=jit(_replay),
                signature={**pointers, **dict.fromkeys(indices, "*i64"), "state_stride": "i32", **update_only},
                constexprs=constexprs | ({} if update else dict.fromkeys(update_only)),
                num_warps=NUM_WARPS,
                num_stages=1,
                bytes_per_program=round(share * moved) if update else None,
                divisible=("state_stride", *(strides if update else ())),
                state_access=True,
            )
        )
    ints = ("base_pos", "ring_start", "n_hist", "prev_t", "rows", "num_accepted_tokens", "cu_seqlens", "step")
    found.append(
        AotCase(
            kernel="replay.commit",
            shape="K=3, blocks of 528",
            dtype="int64",
            fn=jit(_commit, COMMIT_RUNTIME),
            signature={**dict.fromkeys(ints, "*i64"), "block_table": "*i32", "num_reqs": "i32", "table_stride": "i32"},
            constexprs={"RING": default_ring_len(4), "MAX_QUERY": 4, "BLOCK_SIZE": 528, "BLOCK": COMMIT_BLOCK},
            num_warps=1,
            num_stages=1,
        )
    )
    return found

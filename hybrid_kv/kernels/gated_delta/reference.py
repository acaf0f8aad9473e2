"""The gated delta rule (Yang et al., 2024, arXiv 2412.06464): token by token, and in chunks.

Per head with state `S` [V, K], as vLLM lays it out: `S_t = S_{t-1} * exp(g_t) + u_t k_t^T` with
`u_t = beta_t * (v_t - (S_{t-1} * exp(g_t)) k_t)`, and `o_t = S_t q_t`. The log decay `g_t <= 0` is
one number per head (Qwen3-Next, OLMo-Hybrid) or one per column of the state (Kimi Delta Attention,
arXiv 2510.26692). `q` comes in scaled, `q` and `k` normalised: see `delta_operands`. All arithmetic
is in the dtype of the state, float32 or float64; sums of log decays alone are in float64. Nothing
here divides by a decay: after a strong one its inverse overflows.

Rows may be padded at their end with what a token may be (`Ragged` repeats the last one): no token
sees what comes after it, and only the wanted states are returned. A longer `k` would not do: with
`beta * |k|^2 > 2` states grow without bound, and what overflowed spoils the products that it shares
with real tokens.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F

from hybrid_kv.kernels.common.integers import cdiv
from hybrid_kv.kernels.common.ragged import Ragged, WantedStates
from hybrid_kv.kernels.common.spans import Spans
from hybrid_kv.kernels.recompute import RecomputeRing, RecomputeStep
from hybrid_kv.kernels.recompute.reference import (
    StepTokens,
    arithmetic,
    readout,
    recompute_flush_reference,
    states_behind,
)

CHANNEL_CHUNK = 8  # tokens; of decays per channel a token needs chunk * K exponentials, not chunk
EPS = 1e-6  # under the root of a squared length, as in flash-linear-attention


def delta_operands(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    dt: torch.Tensor,
    dt_bias: torch.Tensor,
    rates: torch.Tensor,
    beta: torch.Tensor,
    beta_scale: float,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Make the operands of the recurrence from a layer's projections.

    Args:
        q, k: [..., key_heads, K], of any length; neighbouring value heads share those of a key
            head.
        v: [..., heads, V]; beta: [..., heads] before the sigmoid.
        dt: [..., heads] or, per channel, [..., heads, K], before bias and softplus; dt_bias:
            [heads] or [heads, K].
        rates: [heads], `-exp(A_log)`.
        beta_scale: 2 lets a state forget the other way: eigenvalues from -1 on (OLMo-Hybrid).

    Returns:
        q, k, v, g, beta as `gated_delta_update` takes them.
    """
    q = unit(q)
    k = unit(k)
    shared = v.shape[-2] // k.shape[-2]
    if shared > 1:
        q = q.repeat_interleave(shared, -2)
        k = k.repeat_interleave(shared, -2)
    g = (rates if dt_bias.dim() == 1 else rates.unsqueeze(-1)) * F.softplus(dt + dt_bias)
    return q * k.shape[-1] ** -0.5, k, v, g, beta.sigmoid() * beta_scale


def unit(x: torch.Tensor) -> torch.Tensor:
    """Scale vectors [..., size] to length 1, or a little less."""
    return x * (x.square().sum(-1, keepdim=True) + EPS).rsqrt()


def gated_delta_update(
    state: torch.Tensor,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    g: torch.Tensor,
    beta: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Run a few tokens of each row; return the state after every one of them.

    Args:
        state: [num_rows, heads, V, K] before the first token.
        q, k: [num_rows, len, heads, K]; v: [num_rows, len, heads, V].
        g: [num_rows, len, heads] or, per channel, [num_rows, len, heads, K]; beta: [num_rows, len,
            heads].

    Returns:
        out [num_rows, len, heads, V] and the states [num_rows, len, heads, V, K], in the dtype of
        `state`.
    """
    q, k, v, g, beta = (operand.to(state.dtype) for operand in (q, k, v, g, beta))
    decay = (g if g.dim() == 4 else g.unsqueeze(-1)).exp()
    # Each state is read once for k and q, before it is written: `S_t q = (S_{t-1} * exp(g)) q +
    # (k^T q) u`.
    both = torch.stack([k, q], 3) * decay.unsqueeze(3)
    overlap = (k * q).sum(-1, keepdim=True)
    outputs = []
    states = []
    for t in range(q.shape[1]):
        # Vectors from the left: with one column on the right a product takes six times as long on a
        # CPU.
        read = both[:, t] @ state.mT
        update = (v[:, t] - read[:, :, 0]).mul_(beta[:, t].unsqueeze(-1))
        added = update.unsqueeze(-1) * k[:, t].unsqueeze(-2)
        state = added.addcmul_(state, decay[:, t].unsqueeze(-2))
        outputs.append(torch.addcmul(read[:, :, 1], update, overlap[:, t]))
        states.append(state)
    if len(states) == 1:
        return outputs[0].unsqueeze(1), state.unsqueeze(1)
    return torch.stack(outputs, 1), torch.stack(states, 1)


def gated_delta_chunk(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    g: torch.Tensor,
    beta: torch.Tensor,
    state: torch.Tensor,
    chunk_size: int,
    row: torch.Tensor,
    offsets: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Run all tokens of each row, about `chunk_size` at a time.

    There is a triangular system inside a chunk, a recurrence between them. Chunks are cut from the
    start of each row: an offset may lie anywhere in one, and its state is that after exactly so
    many tokens.

    Args:
        q, k: [num_rows, len, heads, K]; v: [num_rows, len, heads, V].
        g: [num_rows, len, heads] or, per channel, [num_rows, len, heads, K]; beta: [num_rows, len,
            heads].
        state: [num_rows, heads, V, K] before the first token.
        chunk_size: tokens; decays per channel take `CHANNEL_CHUNK` of them at most.
        row, offsets: [M] int64, the wanted states: after `offsets[m]` tokens (1 … len) of row
            `row[m]`.

    Returns:
        out [num_rows, len, heads, V] and the wanted states [M, heads, V, K], in the dtype of
        `state`.
    """
    length = q.shape[1]
    if g.dim() == 4:
        chunk_size = min(chunk_size, CHANNEL_CHUNK)
    # Chunks of one size: a short one at the end would take as many operations as any other.
    chunk_size = cdiv(length, max(1, round(length / chunk_size)))
    # Heads first: then all that follows are products of matrices.
    q, k, v = (operand.to(state.dtype).transpose(1, 2).contiguous() for operand in (q, k, v))
    g = (g if g.dim() == 4 else g.unsqueeze(-1)).transpose(1, 2)
    beta = beta.to(state.dtype).mT.unsqueeze(-1)
    kept_states = WantedStates(row, offsets, chunk_size)
    outputs = []
    for start in range(0, length, chunk_size):
        span = slice(start, start + chunk_size)
        keys = k[:, :, span]
        # [rows, heads, width, 1 or K] in float64: between two tokens after a strong decay lies
        # little of a large sum.
        total = g[:, :, span].cumsum(2, dtype=torch.float64)
        out, updates = _inside(q[:, :, span], keys, v[:, :, span], total, beta[:, :, span], state)
        outputs.append(out)
        kept = kept_states.inside(start)
        if kept is not None:
            rows, last = kept
            kept_states.add(_advance(state[rows], updates[rows], keys[rows], total[rows], last))
        if span.stop < length:
            state = _advance(
                state, updates, keys, total, row.new_full((len(state),), chunk_size - 1)
            )
    out = outputs[0] if len(outputs) == 1 else torch.cat(outputs, 2)
    return out.transpose(1, 2), kept_states.gather(state)


def _inside(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    total: torch.Tensor,
    beta: torch.Tensor,
    state: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return outputs [rows, heads, width, V] of a chunk, and its tokens' `u_t` of that shape.

    `u_i = beta_i * (v_i - S_0 (exp(G_i) k_i) - sum_{j < i} (k_j^T exp(G_i - G_j) k_i) u_j)`, with
    `G` the summed log decays: one unit lower triangular system for all.
    """
    width = q.shape[2]
    both = torch.cat([q, k], 2)
    # exp() can overflow where j comes after i: above the diagonal, which is overwritten, not
    # multiplied.
    if total.shape[-1] == 1:
        pairs = (both @ k.mT).unflatten(2, (2, width))
        pairs *= (total - total.mT).to(q.dtype).exp_().tril_().unsqueeze(2)
    else:
        # [rows, heads, i, j, K]: keys as token i finds them.
        seen = (total.unsqueeze(3) - total.unsqueeze(2)).to(q.dtype).exp_().mul_(k.unsqueeze(2))
        pairs = (both.unflatten(2, (2, width)).transpose(2, 3) @ seen.mT).transpose(2, 3).tril_()
    decay = total.to(q.dtype).exp()
    carried = (
        (both.unflatten(2, (2, width)) * decay.unsqueeze(2)).flatten(2, 3) @ state.mT
    ).unflatten(2, (2, width))
    # Of the system's matrix only what lies below the diagonal is read.
    system = pairs[:, :, 1] * beta
    right = (v - carried[:, :, 1]).mul_(beta)
    updates = torch.linalg.solve_triangular(system, right, upper=False, unitriangular=True)
    return carried[:, :, 0] + pairs[:, :, 0] @ updates, updates


def _advance(
    state: torch.Tensor,
    updates: torch.Tensor,
    k: torch.Tensor,
    total: torch.Tensor,
    last: torch.Tensor,
) -> torch.Tensor:
    """Return the state after token `last` [num_rows] of a chunk, from the one before the chunk.

    Args:
        updates: [num_rows, heads, width, V]; k: [num_rows, heads, width, K].
        total: [num_rows, heads, width, 1 or K] float64, log decay of the old state up to each
            token.
    """
    end = total.gather(2, last[:, None, None, None].expand(-1, total.shape[1], 1, total.shape[3]))
    behind = torch.arange(total.shape[2], device=total.device) > last[:, None]
    decay = (end - total).to(state.dtype).exp_().masked_fill_(behind[:, None, :, None], 0)
    return (updates.mT @ (k * decay)).addcmul_(state, end.to(state.dtype).exp_())


def gated_delta_update_slots_reference(
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
    """Run `gated_delta_update_slots` in plain torch; tokens of no row come out as zeros."""
    y = torch.zeros_like(v, memory_format=torch.contiguous_format)
    lengths = cu_seqlens.diff()
    active = lengths.nonzero()[:, 0]
    if not len(active):
        return y
    rows = Ragged(lengths[active].cpu().long(), v.device)
    tokens = int(cu_seqlens[-1])
    q, k, v, dt, beta = (rows.padded(flat[:tokens].float()) for flat in (q, k, v, dt, beta))
    sources = source_indices[active].long()
    initial = state[sources].float().masked_fill((sources == 0)[:, None, None, None], 0)
    operands = delta_operands(q, k, v, dt, dt_bias.float(), -A_log.float().exp(), beta, beta_scale)
    out, states = gated_delta_update(initial, *operands)
    y[:tokens] = rows.flat(out).to(y.dtype)
    targets = state_indices[active, : rows.max_len].long()
    owned = (torch.arange(rows.max_len, device=y.device) < rows.lengths[:, None]) & (targets != 0)
    state.index_copy_(0, targets[owned], states[owned].to(state.dtype))
    return y


def gated_delta_recompute_reference(
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
    """Run `gated_delta_recompute` in plain torch, in float64 where operands are, else float32.

    Tokens of no row come out as zeros.
    """
    y = torch.zeros_like(v, memory_format=torch.contiguous_format)
    if len(v):
        dtype = arithmetic(state, ring)
        tokens = StepTokens(step, cu_seqlens, len(v), dtype)
        q, k, v, dt, beta = map(tokens.padded, (q, k, v, dt, beta))
        operands = delta_operands(
            q, k, v, dt, dt_bias.to(dtype), -A_log.to(dtype).exp(), beta, beta_scale
        )
        q, keys, v, g, beta = (operand.transpose(1, 2) for operand in operands)
        before = (
            readout(state, step.src, ring.x.dtype)
            .to(dtype)
            .masked_fill((step.src == 0)[:, None, None, None], 0)
        )
        before = states_behind(before, ring, step, step.n_hist, None)
        total = (g if g.dim() == 4 else g.unsqueeze(-1)).cumsum(2, dtype=torch.float64)
        out, updates = _inside(q, keys, v, total, beta.unsqueeze(-1), before)
        tokens.store(y, out.transpose(1, 2), ring, updates.transpose(1, 2), operands[3], unit(k))
    recompute_flush_reference(state, ring, step, None)
    return y


def gated_delta_prefill_reference(
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
    """Run `gated_delta_prefill` in plain torch; tokens of no row come out as zeros."""
    y = torch.zeros_like(v, memory_format=torch.contiguous_format)
    lengths = spans.cu_seqlens.diff()
    active = lengths.nonzero()[:, 0]
    if not len(active):
        return y
    rows = Ragged(lengths[active].cpu().long(), v.device)
    q, k, v, dt, beta = (
        rows.padded(flat[: spans.num_tokens].float()) for flat in (q, k, v, dt, beta)
    )
    sources = source_indices[active].long()
    readable = has_initial_state[active] & (sources > 0)
    initial = state[sources.clamp(min=0)].float().masked_fill(~readable[:, None, None, None], 0)
    operands = delta_operands(q, k, v, dt, dt_bias.float(), -A_log.float().exp(), beta, beta_scale)
    span_rows = torch.arange(len(active), device=y.device).repeat_interleave(
        spans.row_spans.diff()[active]
    )
    offsets = (spans.cu_spans[1:] - spans.cu_seqlens[active][span_rows]).long()
    out, states = gated_delta_chunk(*operands, initial, spans.chunk_size, span_rows, offsets)
    y[: spans.num_tokens] = rows.flat(out).to(y.dtype)
    kept = spans.span_blocks > 0
    state.index_copy_(0, spans.span_blocks[kept], states[kept].to(state.dtype))
    return y

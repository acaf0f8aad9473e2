"""The state-space recurrence of Mamba-2 (Dao and Gu, 2024): token by token, and in chunks.

Per head with state `S` [head_dim, state]: `S_t = exp(dt_t * A) * S_{t-1} + dt_t * x_t B_t^T`, `y_t
= S_t C_t + D x_t`. `B` and `C` are shared by the heads of a group. `dt` comes in after softplus; a
token with `dt == 0` leaves the state alone. Rows may be padded at their end with anything finite:
no token sees what comes after it, and only the wanted states are returned. All arithmetic is in
float32 (float64 if the inputs are), as vLLM keeps Nemotron-H states: bf16 states stagnate. Sums of
log decays alone are in float64.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F

from hybrid_kv.kernels.common.integers import cdiv
from hybrid_kv.kernels.common.ragged import Ragged, WantedStates
from hybrid_kv.kernels.common.spans import Spans
from hybrid_kv.kernels.ssd.host import scan_loop, scan_tokens


def selective_state_update(
    state: torch.Tensor,
    x: torch.Tensor,
    dt: torch.Tensor,
    A: torch.Tensor,
    B: torch.Tensor,
    C: torch.Tensor,
    D: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Run a few tokens of each row; return the state after every one of them.

    Args:
        state: [num_rows, heads, head_dim, state] before the first token.
        x: [num_rows, len, heads, head_dim]; dt: [num_rows, len, heads]; A, D: [heads];
        B, C: [num_rows, len, groups, state].

    Returns:
        y [num_rows, len, heads, head_dim] and the states [num_rows, len, heads, head_dim, state].
    """
    rows, length, heads, head_dim = x.shape
    groups, size = B.shape[2:]
    decay = torch.exp(dt * A)[..., None, None]
    update = (x * dt.unsqueeze(-1)).view(rows, length, groups, -1, 1) * B.unsqueeze(-2)
    states = update.view(rows, length, heads, head_dim, size)
    for t in range(length):
        state = states[:, t].addcmul_(state, decay[:, t])
    # C from the left: with one column on the right a product takes six times as long on a CPU.
    y = torch.matmul(C.unsqueeze(-2), states.view(rows, length, groups, -1, size).mT).view_as(x)
    return y.addcmul_(x, D[:, None]), states


def chunk_scan(
    x: torch.Tensor,
    dt: torch.Tensor,
    A: torch.Tensor,
    B: torch.Tensor,
    C: torch.Tensor,
    D: torch.Tensor,
    initial_state: torch.Tensor,
    chunk_size: int,
    rows: torch.Tensor,
    offsets: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Run all tokens of each row, about `chunk_size` at a time.

    Work is quadratic inside a chunk, recurrent between chunks.

    On one or two cores of a CPU token by token instead, see `host`.

    Chunks are cut from the start of each row, block boundaries from the start of its request: an
    offset may lie anywhere in a chunk, and its state is that after exactly so many tokens
    (sgl#31833 and vllm!34587 took a chunk's).

    Args:
        x: [num_rows, len, heads, head_dim]; dt: [num_rows, len, heads]; A, D: [heads];
        B, C: [num_rows, len, groups, state]; initial_state: [num_rows, heads, head_dim, state].
        rows, offsets: [M] int64, the wanted states: after `offsets[m]` tokens (1 … len) of row
            `rows[m]`.

    Returns:
        y [num_rows, len, heads, head_dim] and the wanted states [M, heads, head_dim, state].
    """
    loop = scan_loop(x)
    if loop is not None:
        return scan_tokens(loop, (x, dt, A, B, C, D), initial_state, rows, offsets)
    num_rows, length, heads, _ = x.shape
    groups, size = B.shape[2:]
    per_group = heads // groups
    # Chunks of one size: a short one at the end would take as many operations as any other.
    chunk_size = cdiv(length, max(1, round(length / chunk_size)))
    scaled = x * dt.unsqueeze(-1)
    # Heads first: then all that follows are products of matrices.
    u = scaled.transpose(1, 2).contiguous()
    b_all = B.transpose(1, 2)
    c_all = C.transpose(1, 2)
    log_decay = (dt * A).transpose(1, 2)
    kept_states = WantedStates(rows, offsets, chunk_size)
    state = initial_state
    outputs = []
    for start in range(0, length, chunk_size):
        stop = min(start + chunk_size, length)
        width = stop - start
        b = b_all[:, :, start:stop]
        c = c_all[:, :, start:stop]
        # [rows, heads, width] in float64: between two tokens after a strong decay lies little of a
        # large sum.
        total = log_decay[..., start:stop].cumsum(-1, dtype=torch.float64)
        # exp() can overflow above the diagonal, which is overwritten, not multiplied.
        weights = (total.unsqueeze(-1) - total.unsqueeze(-2)).to(x.dtype).exp_().tril_()
        weights.view(num_rows, groups, per_group, width, width).mul_((c @ b.mT).unsqueeze(2))
        inside = (weights @ u[:, :, start:stop]).transpose(1, 2)
        carried = (
            (c @ state.view(num_rows, groups, -1, size).mT).transpose(1, 2).reshape(inside.shape)
        )
        outputs.append(
            torch.addcmul(inside, carried, total.to(x.dtype).exp().transpose(1, 2).unsqueeze(-1))
        )

        kept = kept_states.inside(start)
        if kept is not None:
            row, last = kept
            inputs = scaled[:, start:stop].index_select(0, row)
            kept_states.add(_advance(state[row], inputs, b.index_select(0, row), total[row], last))
        if stop < length:
            last = rows.new_full((num_rows,), width - 1)
            state = _advance(state, scaled[:, start:stop], b, total, last)
    y = outputs[0] if len(outputs) == 1 else torch.cat(outputs, dim=1)
    return y.addcmul_(x, D[:, None]), kept_states.gather(state)


def _advance(
    state: torch.Tensor,
    scaled: torch.Tensor,
    b: torch.Tensor,
    total: torch.Tensor,
    last: torch.Tensor,
) -> torch.Tensor:
    """Return the state after token `last` [num_rows] of a chunk, from the one before the chunk.

    Args:
        scaled: [num_rows, width, heads, head_dim], x times dt; b: [num_rows, groups, width, state].
        total: [num_rows, heads, width] float64, log decay of the old state up to each token.
    """
    end = total.gather(2, last[:, None, None].expand(-1, total.shape[1], 1))
    behind = torch.arange(total.shape[2], device=total.device) > last[:, None]
    decay = (end - total).to(state.dtype).exp_().masked_fill_(behind.unsqueeze(1), 0)
    grouped = (
        (scaled * decay.transpose(1, 2).unsqueeze(-1)).unflatten(2, (b.shape[1], -1)).flatten(3)
    )
    added = (grouped.permute(0, 2, 3, 1) @ b).view(state.shape)
    return added.addcmul_(state, end.to(state.dtype).exp_().unsqueeze(-1))


def selective_state_update_slots_reference(
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
    """Run `selective_state_update_slots` in plain torch; tokens of no row come out as zeros."""
    y = torch.zeros_like(x, memory_format=torch.contiguous_format)
    lengths = cu_seqlens.diff()
    active = lengths.nonzero()[:, 0]
    if not len(active):
        return y
    rows = Ragged(lengths[active].cpu().long(), x.device)
    tokens = int(cu_seqlens[-1])

    def padded(values: torch.Tensor) -> torch.Tensor:
        return rows.padded(values[:tokens].float())

    sources = source_indices[active].long()
    initial = state[sources].float().masked_fill((sources == 0)[:, None, None, None], 0)
    step = F.softplus(padded(dt) + dt_bias.float())
    A = -torch.exp(A_log.float())
    out, states = selective_state_update(
        initial, padded(x), step, A, padded(B), padded(C), D.float()
    )
    y[:tokens] = rows.flat(out).to(y.dtype)
    targets = state_indices[active, : rows.max_len].long()
    owned = (torch.arange(rows.max_len, device=x.device) < rows.lengths[:, None]) & (targets != 0)
    state.index_copy_(0, targets[owned], states[owned].to(state.dtype))
    return y


def chunk_scan_prefill_reference(
    state: torch.Tensor,
    x: torch.Tensor,
    dt: torch.Tensor,
    dt_bias: torch.Tensor,
    A_log: torch.Tensor,
    B: torch.Tensor,
    C: torch.Tensor,
    D: torch.Tensor,
    spans: Spans,
    source_indices: torch.Tensor,
    has_initial_state: torch.Tensor,
) -> torch.Tensor:
    """Run `chunk_scan_prefill` in plain torch; tokens of no row come out as zeros.

    In float64, because `ssd.chunk_scan` takes differences of summed decays: in float32 they err by
    2e-4 after strong decays.
    """
    y = torch.zeros_like(x, memory_format=torch.contiguous_format)
    lengths = spans.cu_seqlens.diff()
    active = lengths.nonzero()[:, 0]
    if not len(active):
        return y
    rows = Ragged(lengths[active].cpu().long(), x.device)

    def padded(values: torch.Tensor) -> torch.Tensor:
        return rows.padded(values[: spans.num_tokens].double())

    sources = source_indices[active].long()
    readable = has_initial_state[active] & (sources > 0)
    initial = state[sources.clamp(min=0)].double().masked_fill(~readable[:, None, None, None], 0)
    step = F.softplus(padded(dt) + dt_bias.double())
    A = -torch.exp(A_log.double())
    span_rows = torch.arange(len(active), device=x.device).repeat_interleave(
        spans.row_spans.diff()[active]
    )
    offsets = (spans.cu_spans[1:] - spans.cu_seqlens[active][span_rows]).long()
    inputs = (padded(x), step, A, padded(B), padded(C), D.double())
    out, states = chunk_scan(*inputs, initial, spans.chunk_size, span_rows, offsets)
    y[: spans.num_tokens] = rows.flat(out).to(y.dtype)
    kept = spans.span_blocks > 0
    state.index_copy_(0, spans.span_blocks[kept], states[kept].to(state.dtype))
    return y

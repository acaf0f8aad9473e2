"""The state-space recurrence of Mamba-2 (Dao and Gu, 2024): token by token, and in chunks.

Per head with state `S` [head_dim, state]: `S_t = exp(dt_t * A) * S_{t-1} + dt_t * x_t B_t^T`, `y_t = S_t C_t + D x_t`.
`B` and `C` are shared by the heads of a group. `dt` comes in after softplus; a token with `dt == 0` leaves the state
alone. Rows may be padded at their end with anything finite: no token sees what comes after it, and only the states that
are asked for come back. All arithmetic is in float32 (float64 if the inputs are), as vLLM keeps Nemotron-H states: bf16
states stagnate.
"""

from __future__ import annotations

import torch


def selective_state_update(
    state: torch.Tensor,
    x: torch.Tensor,
    dt: torch.Tensor,
    A: torch.Tensor,
    B: torch.Tensor,
    C: torch.Tensor,
    D: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor]:
    """A few tokens of each row, and the state after every one of them.

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
    y = torch.matmul(states.view(rows, length, groups, -1, size), C.unsqueeze(-1)).view_as(x)
    return torch.addcmul(y, x, D[:, None]), states


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
    """All tokens of each row, `chunk_size` at a time: quadratic inside a chunk, recurrent between chunks.

    Chunks are cut from the start of each row, block boundaries from the start of its request: an offset may lie
    anywhere in a chunk, and its state is that after exactly so many tokens (sgl#31833 and vllm!34587 took a chunk's).

    Args:
        x: [num_rows, len, heads, head_dim]; dt: [num_rows, len, heads]; A, D: [heads];
        B, C: [num_rows, len, groups, state]; initial_state: [num_rows, heads, head_dim, state].
        rows, offsets: [M] int64, the wanted states: after `offsets[m]` tokens (1 … len) of row `rows[m]`.

    Returns:
        y [num_rows, len, heads, head_dim] and the wanted states [M, heads, head_dim, state].
    """
    length, heads = x.shape[1:3]
    per_group = heads // B.shape[2]
    scaled = x * dt.unsqueeze(-1)
    log_decay = dt * A
    state = initial_state
    outputs = []
    wanted = state.new_empty(len(rows), *state.shape[1:])
    for start in range(0, length, chunk_size):
        stop = min(start + chunk_size, length)
        b, c, u = B[:, start:stop], C[:, start:stop], scaled[:, start:stop]
        steps = torch.arange(stop - start, device=x.device)
        total = log_decay[:, start:stop].cumsum(1).transpose(1, 2)  # [rows, heads, width]
        # exp() of the upper triangle can overflow, so it is masked before, not after.
        future = steps > steps[:, None]
        decay = (total.unsqueeze(-1) - total.unsqueeze(-2)).masked_fill(future, -torch.inf).exp()
        scores = torch.einsum("rtgn,rsgn->rgts", c, b).repeat_interleave(per_group, dim=1) * decay
        inside = torch.einsum("rhts,rshp->rthp", scores, u)
        c_heads = c.repeat_interleave(per_group, dim=2)
        carried = torch.einsum("rthn,rhpn->rthp", c_heads, state) * total.exp().transpose(1, 2).unsqueeze(-1)
        outputs.append(inside + carried)

        b_heads = b.repeat_interleave(per_group, dim=2)
        here = ((offsets > start) & (offsets <= stop)).nonzero()[:, 0]
        if len(here):
            row, last = rows[here], offsets[here] - 1 - start
            wanted[here] = _advance(state[row], u[row], b_heads[row], total[row, :, last], decay[row, :, last])
        if stop < length:
            state = _advance(state, u, b_heads, total[..., -1], decay[..., -1, :])
    return torch.addcmul(torch.cat(outputs, dim=1), x, D[:, None]), wanted


def _advance(
    state: torch.Tensor, u: torch.Tensor, b: torch.Tensor, total: torch.Tensor, decay: torch.Tensor
) -> torch.Tensor:
    """The state after a token of a chunk, from the one before the chunk.

    Args:
        u: [num_rows, width, heads, head_dim]; b: [num_rows, width, heads, state].
        total: [num_rows, heads], log decay of the old state up to the token.
        decay: [num_rows, heads, width], of each token's update; 0 for those behind the token.
    """
    added = torch.einsum("rshp,rshn->rhpn", u * decay.transpose(1, 2).unsqueeze(-1), b)
    return state * total[..., None, None].exp() + added

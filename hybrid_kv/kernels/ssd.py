"""The state-space recurrence of Mamba-2 (Dao and Gu, 2024): one token at a time, and in chunks.

Per head with state `S` [head_dim, state]: `S_t = exp(dt_t * A) * S_{t-1} + dt_t * x_t B_t^T`, `y_t = S_t C_t + D x_t`.
`B` and `C` are shared by the heads of a group. `dt` comes in after softplus; a token with `dt == 0` leaves the state
alone, which is how padding is neutral. All arithmetic is in float32 (float64 if the inputs are), as vLLM keeps
Nemotron-H states: bf16 states stagnate.
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
    """One token of each row.

    Args:
        state: [num_rows, heads, head_dim, state] before the token.
        x: [num_rows, heads, head_dim]; dt: [num_rows, heads]; A, D: [heads]; B, C: [num_rows, groups, state].

    Returns:
        y [num_rows, heads, head_dim] and the state after the token.
    """
    rows, heads, head_dim = x.shape
    groups, size = B.shape[1:]
    decay = torch.exp(dt * A)
    grouped = (rows, groups, heads // groups, head_dim, size)
    update = (x * dt.unsqueeze(-1)).view(*grouped[:-1], 1) * B.view(rows, groups, 1, 1, size)
    new_state = torch.addcmul(update.view_as(state), state, decay[..., None, None])
    y = torch.matmul(new_state.view(rows, groups, -1, size), C.unsqueeze(-1)).view_as(x)
    return torch.addcmul(y, x, D[:, None]), new_state


def chunk_scan(
    x: torch.Tensor,
    dt: torch.Tensor,
    A: torch.Tensor,
    B: torch.Tensor,
    C: torch.Tensor,
    D: torch.Tensor,
    initial_state: torch.Tensor,
    chunk_size: int,
) -> tuple[torch.Tensor, torch.Tensor]:
    """All tokens of each row, `chunk_size` at a time: quadratic inside a chunk, recurrent between chunks.

    Args:
        x: [num_rows, len, heads, head_dim]; dt: [num_rows, len, heads], 0 at padding; A, D: [heads];
        B, C: [num_rows, len, groups, state]; initial_state: [num_rows, heads, head_dim, state].

    Returns:
        y [num_rows, len, heads, head_dim] and the state after each row's last token.
    """
    length, heads = x.shape[1:3]
    per_group = heads // B.shape[2]
    scaled = x * dt.unsqueeze(-1)
    log_decay = dt * A
    state = initial_state
    outputs = []
    for start in range(0, length, chunk_size):
        span = slice(start, min(start + chunk_size, length))
        b, c, u = B[:, span], C[:, span], scaled[:, span]
        width = b.shape[1]
        total = log_decay[:, span].cumsum(1).transpose(1, 2)  # [rows, heads, width]
        # exp() of the upper triangle can overflow, so it is masked before, not after.
        future = torch.ones(width, width, dtype=torch.bool, device=x.device).triu(1)
        decay = (total.unsqueeze(-1) - total.unsqueeze(-2)).masked_fill(future, -torch.inf).exp()
        scores = torch.einsum("rtgn,rsgn->rgts", c, b).repeat_interleave(per_group, dim=1) * decay
        inside = torch.einsum("rhts,rshp->rthp", scores, u)
        c_heads = c.repeat_interleave(per_group, dim=2)
        carried = torch.einsum("rthn,rhpn->rthp", c_heads, state) * total.exp().transpose(1, 2).unsqueeze(-1)
        outputs.append(inside + carried)
        to_end = (total[..., -1:] - total).exp().transpose(1, 2).unsqueeze(-1)
        b_heads = b.repeat_interleave(per_group, dim=2)
        state = state * total[..., -1, None, None].exp() + torch.einsum("rshp,rshn->rhpn", u * to_end, b_heads)
    return torch.addcmul(torch.cat(outputs, dim=1), x, D[:, None]), state

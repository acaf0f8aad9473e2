"""The state-space recurrence of Mamba-1 (Gu and Dao, 2023, arXiv 2312.00752).

Per channel with state `h` [N]: `h_t = exp(dt_t * A) * h_{t-1} + dt_t * x_t * B_t`, `y_t = h_t C_t +
D x_t`. `B` and `C` are shared by all channels. `dt` comes in after softplus; a token with `dt == 0`
leaves the state alone. Rows may be padded at their end with anything finite: no token sees what
comes after it, and only the wanted states are returned. All arithmetic is in the dtype of the
state, float32 or float64.

Every element of a state has a decay of its own, so no product of matrices stands for a chunk of
tokens, as in Mamba-2. A chunk's tokens are prepared together and then take one operation each. To
double the reach of each token instead, in log2(chunk) steps, was 1.3 to 1.6 times as slow on a CPU:
97 ms, not 64, for 512 tokens of 1024 channels with N = 16. So a prefill leaves the same states as a
decode, bit for bit, wherever it is cut.
"""

from __future__ import annotations

import torch

from hybrid_kv.kernels.common.ragged import WantedStates


def selective_scan_update(
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
        state: [num_rows, channels, N] before the first token.
        x, dt: [num_rows, len, channels]; A: [channels, N], negative; B, C: [num_rows, len, N]; D:
            [channels].

    Returns:
        y [num_rows, len, channels] and the states [num_rows, len, channels, N], in the dtype of
        `state`.
    """
    x, dt, A, B, C, D = (operand.to(state.dtype) for operand in (x, dt, A, B, C, D))
    decay = (dt.unsqueeze(-1) * A).exp_()
    states = (x * dt).unsqueeze(-1) * B.unsqueeze(-2)
    for t in range(x.shape[1]):
        state = states[:, t].addcmul_(state, decay[:, t])
    # C from the left: with one column on the right a product takes six times as long on a CPU.
    y = torch.matmul(C.unsqueeze(-2), states.mT).squeeze(-2)
    return y.addcmul_(x, D), states


def selective_scan(
    x: torch.Tensor,
    dt: torch.Tensor,
    A: torch.Tensor,
    B: torch.Tensor,
    C: torch.Tensor,
    D: torch.Tensor,
    state: torch.Tensor,
    chunk_size: int,
    row: torch.Tensor,
    offsets: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Run all tokens of each row, `chunk_size` at a time.

    Args:
        x, dt: [num_rows, len, channels]; A: [channels, N], negative; B, C: [num_rows, len, N]; D:
            [channels].
        state: [num_rows, channels, N] before the first token.
        chunk_size: tokens whose states are held at a time; it changes no state.
        row, offsets: [M] int64, the wanted states: after `offsets[m]` tokens (1 … len) of row
            `row[m]`.

    Returns:
        y [num_rows, len, channels] and the wanted states [M, channels, N], in the dtype of `state`.
    """
    kept_states = WantedStates(row, offsets, chunk_size)
    outputs = []
    for start in range(0, x.shape[1], chunk_size):
        span = slice(start, start + chunk_size)
        y, states = selective_scan_update(
            state, x[:, span], dt[:, span], A, B[:, span], C[:, span], D
        )
        outputs.append(y)
        kept = kept_states.inside(start)
        if kept is not None:
            kept_states.add(states[kept])
        state = states[:, -1]
    return torch.cat(outputs, 1), kept_states.gather(state)

"""Scheme `recompute` in plain torch."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from hybrid_kv.kernels.recompute.ring import (
    RecomputeRing,
    RecomputeStep,
    read_states,
    write_states,
)


def arithmetic(ssm_state: torch.Tensor, ring: RecomputeRing) -> torch.dtype:
    """Return float64 where states or activations are, else float32."""
    return torch.promote_types(
        ring.dt.dtype, torch.float64 if ssm_state.dtype == torch.float64 else torch.float32
    )


def _history(
    ring: RecomputeRing, step: RecomputeStep, count: torch.Tensor, dtype: torch.dtype
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return x, dt and B of the first `count` tokens of the history; then zeros.

    x is [num_reqs, W, heads, head_dim], the others alike.
    """
    j = torch.arange(ring.ring_len - step.max_query_len, device=ring.x.device)
    place = (step.ring_start[:, None] + j) % ring.ring_len
    row = step.rows[:, None]
    # An earlier request may have left NaN or infinity behind. With zeros a token neither decays nor
    # adds.
    x, dt, B = (
        _kept(inputs[row, :, place].to(dtype), j < count[:, None])
        for inputs in (ring.x, ring.dt, ring.B)
    )
    return x, dt, B


def _kept(values: torch.Tensor, kept: torch.Tensor) -> torch.Tensor:
    """Set tokens [num_reqs, len] that are not kept to zeros: filled, not multiplied."""
    return values.masked_fill(~kept.view(*kept.shape, *[1] * (values.dim() - 2)), 0)


def states_behind(
    states: torch.Tensor,
    ring: RecomputeRing,
    step: RecomputeStep,
    count: torch.Tensor,
    A_log: torch.Tensor | None,
) -> torch.Tensor:
    """Return the states after the first `count` tokens of the history.

    Args:
        states: [num_reqs, heads, head_dim, state], the checkpoints, in the dtype of the arithmetic.
        A_log: [heads] of a Mamba-2 layer; None: of a delta rule.
    """
    x, dt, B = _history(ring, step, count, states.dtype)
    if A_log is not None:
        x = x * dt.unsqueeze(-1)
        dt = dt * -torch.exp(A_log.to(dt.dtype))
    # Sums of what is still to come, not differences of sums: those would lose the digits that
    # matter most.
    left = torch.cat([dt[:, 1:], dt.new_zeros(dt[:, :1].shape)], 1).flip(1).cumsum(1).flip(1).exp()
    keys = B.repeat_interleave(x.shape[2] // B.shape[2], dim=2)
    decay = dt.sum(1).exp()
    if dt.dim() == 3:
        x = x * left.unsqueeze(-1)
        decay = decay.unsqueeze(-1)
    else:
        keys = keys * left
    return states * decay.unsqueeze(-2) + torch.einsum("rjhp,rjhn->rhpn", x, keys)


def recompute_flush_reference(
    ssm_state: torch.Tensor, ring: RecomputeRing, step: RecomputeStep, A_log: torch.Tensor | None
) -> None:
    """Run `recompute_flush` in plain torch.

    The arithmetic is in float64 where states or activations are, else in float32.
    """
    before = read_states(ssm_state, step.src).to(arithmetic(ssm_state, ring))
    states = states_behind(before, ring, step, step.n_flush, A_log)
    write_states(ssm_state, step.dst.masked_fill((step.src == 0) | (step.n_flush == 0), 0), states)


class StepTokens:
    """The tokens of a step by row, [num_reqs, max_query_len, …]; padding is zeros.

    Attributes:
        inside: [num_reqs, max_query_len] bool, of rows with a block to read and one to write.
    """

    def __init__(
        self, step: RecomputeStep, cu_seqlens: torch.Tensor, num_tokens: int, dtype: torch.dtype
    ) -> None:
        t = torch.arange(step.max_query_len, device=cu_seqlens.device)
        self.inside = (t < cu_seqlens.diff()[:, None]) & ((step.src != 0) & (step.dst != 0))[
            :, None
        ]
        self._step = step
        self._dtype = dtype
        self._token = (cu_seqlens[:-1, None] + t).clamp(max=num_tokens - 1)

    def padded(self, tokens: torch.Tensor) -> torch.Tensor:
        """Return tokens [num_tokens, …] by row."""
        return _kept(tokens[self._token].to(self._dtype), self.inside)

    def store(
        self,
        y: torch.Tensor,
        out: torch.Tensor,
        ring: RecomputeRing,
        x: torch.Tensor,
        dt: torch.Tensor,
        B: torch.Tensor,
    ) -> None:
        """Store outputs at their tokens [num_tokens, …], and inputs in the rings after the history.

        The inputs x, dt and B are what a later step adds to the states.
        """
        row, j = self.inside.nonzero(as_tuple=True)
        y[self._token[row, j]] = out[row, j].to(y.dtype)
        place = ((self._step.ring_start + self._step.n_hist)[row] + j) % ring.ring_len
        for target, values in ((ring.x, x), (ring.B, B), (ring.dt, dt)):
            target[self._step.rows[row], :, place] = values[row, j].to(target.dtype)


def recompute_update_reference(
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
    """Run `recompute_update` in plain torch.

    The arithmetic is in float64 where states or activations are, else in float32.

    Tokens of no row come out as zeros.
    """
    y = torch.zeros_like(x, memory_format=torch.contiguous_format)
    if len(x):
        dtype = arithmetic(ssm_state, ring)
        tokens = StepTokens(step, cu_seqlens, len(x), dtype)
        new_x, new_B, C_rows = map(tokens.padded, (x, B, C))
        new_dt = F.softplus(tokens.padded(dt) + dt_bias.to(dtype))
        past = _history(ring, step, step.n_hist, dtype)
        every_x, every_dt, every_B = (
            torch.cat(pair, 1) for pair in zip(past, (new_x, new_dt, new_B), strict=True)
        )
        # [num_reqs, heads, W + T].
        log_decay = (every_dt * -torch.exp(A_log.to(dtype))).transpose(1, 2)
        i = torch.arange(log_decay.shape[2], device=x.device)
        now = i[-step.max_query_len :]
        # From token s to token t: the sum over what lies after s, since a difference of sums would
        # lose the digits of neighbours. exp() is 1 where s is yet to come, so these are left out of
        # the scores.
        between = (
            log_decay.unsqueeze(2).where(i > i[:, None], 0).cumsum(3)[..., now].transpose(2, 3)
        )
        groups = B.shape[1]
        per_group = x.shape[1] // B.shape[1]
        scores = torch.einsum("rtgn,rsgn->rgts", C_rows, every_B).where(i <= now[:, None], 0)
        weights = scores.repeat_interleave(per_group, dim=1) * between.exp()
        out = torch.einsum("rhts,rshp->rthp", weights, every_x * every_dt.unsqueeze(-1))
        states = (
            readout(ssm_state, step.src, x.dtype)
            .to(dtype)
            .masked_fill((step.src == 0)[:, None, None, None], 0)
        )
        decay = log_decay.cumsum(2)[..., now].exp().transpose(1, 2).unsqueeze(-1)
        read = torch.einsum("rtgn,rgkpn->rtgkp", C_rows, states.unflatten(1, (groups, per_group)))
        out = torch.addcmul(out + read.flatten(2, 3) * decay, new_x, D.to(dtype)[:, None])
        tokens.store(y, out, ring, new_x, new_dt, new_B)
    recompute_flush_reference(ssm_state, ring, step, A_log)
    return y


def readout(
    ssm_state: torch.Tensor, blocks: torch.Tensor, activations: torch.dtype
) -> torch.Tensor:
    """Return the states in `blocks` as outputs see them.

    With bfloat16 activations that is their upper plane.
    """
    if ssm_state.dtype == torch.int16 and activations == torch.bfloat16:
        return ssm_state[blocks, 0].view(torch.bfloat16)
    return read_states(ssm_state, blocks)

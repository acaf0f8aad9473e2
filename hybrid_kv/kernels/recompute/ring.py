"""The memory of scheme `recompute`: checkpoints as two planes, rings of inputs, and cursors."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import torch

from hybrid_kv.kernels.common.integers import shortest_ring_len
from hybrid_kv.kernels.common.strided import copy_blocks


def split_state(state: torch.Tensor) -> torch.Tensor:
    """Split float32 states into two 16-bit planes: the bits are `(hi << 16) + lo`, for any pattern.

    Plane 0, `hi`, holds the bits of the state rounded to bfloat16 (half away from zero), plane 1
    what is missing. Where bfloat16 is enough, half of the bytes are read.

    Args:
        state: [..., heads, head_dim, state] float32.

    Returns:
        [..., 2, heads, head_dim, state] int16.
    """
    # Flat, since a dimension of size 1 may have any stride, in a contiguous tensor too.
    flat = state.contiguous().as_strided((state.numel(),), (1,))
    low, high = flat.view(torch.int16).view(*state.shape, 2).unbind(-1)
    # `low` counts as signed, so where its sign bit is set it takes one from `high`.
    return torch.stack([high - (low >> 15), low], dim=-4)


def join_state(planes: torch.Tensor) -> torch.Tensor:
    """Join the planes of `split_state` [..., 2, heads, head_dim, state] to float32 states."""
    high, low = planes.int().unbind(-4)
    return ((high << 16) + low).view(torch.float32)


def read_states(ssm_state: torch.Tensor, blocks: torch.Tensor) -> torch.Tensor:
    """Return the states in `blocks`.

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
    """Put states, [n, heads, head_dim, state] of any dtype, into `blocks`.

    Each block but the null block occurs at most once.
    """
    # On a GPU the host would wait to choose: there the null block is written.
    if not blocks.is_cuda and not bool(blocks.all()):
        kept = blocks != 0
        blocks = blocks[kept]
        states = states[kept]
    values = (
        split_state(states.float())
        if ssm_state.dtype == torch.int16
        else states.to(ssm_state.dtype)
    )
    copy_blocks(ssm_state, blocks, values)


@dataclass(frozen=True)
class RecomputeRing:
    """The inputs of every request's last tokens to one layer's state; token i is at `i % ring_len`.

    A token decays a state and adds an outer product to it. Of a Mamba-2 layer, whose inputs these
    are, that is `exp(dt * A) * state + dt * x B^T`; of a delta rule `exp(dt) * state + x B^T`, with
    what the token learns (`u`) as x, its unit key as B and its log decay as dt
    (`kernels.gated_delta`).

    The memory is never cleared: nothing beyond a request's `n_hist` tokens is read.

    Attributes:
        x: [num_rows, heads, ring_len, head_dim].
        B: [num_rows, groups, ring_len, state], of the dtype of x.
        dt: [num_rows, heads, ring_len], after softplus, or per channel [num_rows, heads, ring_len,
            state]; float64 where x is, else float32.
    """

    x: torch.Tensor
    B: torch.Tensor
    dt: torch.Tensor

    @classmethod
    def allocate(
        cls,
        num_rows: int,
        ring_len: int,
        x: Sequence[int],
        B: Sequence[int],
        dtype: torch.dtype,
        device: torch.device,
        dt: Sequence[int] = (),
    ) -> RecomputeRing:
        """Allocate rings for `num_rows` requests at once, whose tokens have these shapes.

        Args:
            dtype: of the layer's activations.
            dt: by default one for each head.
        """
        wide = torch.promote_types(dtype, torch.float32)

        def ring(shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
            heads, *channels = shape
            return torch.zeros(num_rows, heads, ring_len, *channels, dtype=dtype, device=device)

        return cls(ring(x, dtype), ring(B, dtype), ring(dt or x[:1], wide))

    @property
    def ring_len(self) -> int:
        return self.x.shape[2]

    @property
    def nbytes(self) -> int:
        """Bytes of all rows."""
        return self.x.nbytes + self.B.nbytes + self.dt.nbytes


@dataclass(frozen=True)
class RecomputeCursors:
    """Places of each request's checkpoint and history; one for all layers of a group.

    A captured graph may keep reading it.

    Attributes:
        base_pos: [num_rows] int64, tokens that the checkpoint has seen.
        ring_start: [num_rows] int64, place in the ring of the first token after the checkpoint.
        n_hist: [num_rows] int64, tokens after the checkpoint that were accepted, as of the last
            `commit`.
        prev_t: [num_rows] int64, tokens that the last step appended after those; 0 after a
            prefill.
        ring_len: of the rings.
        max_query_len: 1 + K.
        steps: of each number of requests, what a launch decides: the next one of as many writes
            over it.
    """

    base_pos: torch.Tensor
    ring_start: torch.Tensor
    n_hist: torch.Tensor
    prev_t: torch.Tensor
    ring_len: int
    max_query_len: int
    steps: dict[int, torch.Tensor] = field(default_factory=dict)

    @classmethod
    def allocate(
        cls, num_rows: int, ring_len: int, max_query_len: int, device: torch.device
    ) -> RecomputeCursors:
        """Allocate cursors of `num_rows` requests.

        Raises:
            ValueError: the ring is too short.
        """
        shortest = shortest_ring_len(max_query_len)
        if ring_len < shortest:
            raise ValueError(
                f"ring_len={ring_len} is too short for steps of {max_query_len} tokens; "
                f"use {shortest}"
            )
        base_pos, ring_start, n_hist, prev_t = torch.zeros(
            4, num_rows, dtype=torch.int64, device=device
        )
        return cls(base_pos, ring_start, n_hist, prev_t, ring_len, max_query_len)

    def restart(self, rows: torch.Tensor, base_pos: torch.Tensor) -> None:
        """Begin anew from states after `base_pos` tokens.

        After a prefill, and when a request takes a row.

        Args:
            rows: [n] int64, each at most once.
            base_pos: [n] int64, at least 1 by the time of the first `commit`.
        """
        self.base_pos[rows] = base_pos
        for cursor in (self.ring_start, self.n_hist, self.prev_t):
            cursor[rows] = 0


class RecomputeStep(NamedTuple):
    """A step of every layer of a group, per row of the batch; all [num_reqs] int64.

    Attributes:
        rows: row of the rings; any for padding.
        src: block of the checkpoint; 0: padding, the row reads and writes nothing.
        dst: block of the checkpoint after the flush; `src` where none is due.
        ring_start: place of the history's first token.
        n_hist: tokens of history, those to flush included; after them this step appends its own.
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

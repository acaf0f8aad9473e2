"""Scheme `replay`: steps of a few requests against the recurrence over the tokens that they accepted."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

import numpy as np
import torch

from hybrid_kv.guard import definitions
from hybrid_kv.guard.definitions import Floats
from hybrid_kv.guard.kernel_cases.draw import Compared, Draw, longs, own_tokens, starts, wide
from hybrid_kv.kernels.replay import (
    ReplayCursors,
    ReplayRing,
    commit_reference,
    join_state,
    read_states,
    replay_flush_reference,
    replay_update_reference,
    split_state,
    write_states,
)

STEPS = 5
NULL = 0
CPU = torch.device("cpu")
Token = tuple[Floats, ...]  # x, dt after softplus, and B


@dataclass
class Request:
    """A checkpoint after `base_pos` tokens, in one of `blocks`, and the tokens behind it.

    Attributes:
        blocks: its row of the block table.
        limits: tokens of a step, of the ring, and from one boundary to the next; see `definitions.num_flushed`.
        history: the accepted tokens behind the checkpoint.
        last: the tokens of the last step.
    """

    blocks: list[int]
    base_pos: int
    limits: tuple[int, int, int | None]
    history: list[Token] = field(default_factory=list)
    last: list[Token] = field(default_factory=list)

    @property
    def block(self) -> int:
        block_size = self.limits[2]
        return self.blocks[0 if block_size is None else (self.base_pos - 1) // block_size]

    def step(self, num_accepted: int, tokens: list[Token]) -> None:
        """Of the last tokens some are kept; these are the next."""
        self.history += self.last[:num_accepted]
        self.last = tokens

    def flush(self) -> list[Token]:
        """The tokens that go into the checkpoint in this step."""
        count = definitions.num_flushed(self.base_pos, len(self.history), len(self.last), *self.limits)
        flushed, self.history = self.history[:count], self.history[count:]
        self.base_pos += count
        return flushed


class Layer:
    """A layer in one of three forms: all of it float64, or a pool of two planes with float32 or bfloat16 tokens."""

    def __init__(self, draw: Draw, num_blocks: int, ring_len: int) -> None:
        self.dtype = draw.one_of(torch.float64, torch.float32, torch.bfloat16)
        (self.groups, head_dim), size = draw.numbers(1, 2, 2), draw.number(2, 3)
        self.shape = self.heads, _, _ = self.groups * draw.number(1, 2), head_dim, size
        own = torch.promote_types(self.dtype, torch.float32)
        self.dt_bias, self.A_log, self.D = (draw.floats(self.heads, dtype=own) for _ in range(3))
        pool = draw.pool(num_blocks, *self.shape, dtype=own)
        self.pool = pool if own == torch.float64 else split_state(pool)
        self.ring = ReplayRing.allocate(3, ring_len, *self.shape[:2], self.groups, size, self.dtype, CPU)
        for part in self.ring.x, self.ring.dt, self.ring.B:
            part.fill_(torch.nan)

    def states(self) -> torch.Tensor:
        """Of all blocks."""
        return read_states(self.pool, torch.arange(len(self.pool)))

    def inputs(self, draw: Draw, count: int) -> tuple[torch.Tensor, ...]:
        """x, dt, B and C; the last token is no row's."""
        (heads, head_dim, size), groups = self.shape, self.groups
        shapes = (heads, head_dim), (heads,), (groups, size), (groups, size)
        made = tuple(draw.floats(count + 1, *shape, dtype=self.dtype) for shape in shapes)
        for part in made:
            part[count:] = torch.nan
        return made

    def tokens(self, x: torch.Tensor, dt: torch.Tensor, B: torch.Tensor) -> list[Token]:
        after = definitions.softplus(wide(dt) + wide(self.dt_bias))
        return [*zip(wide(x), after, wide(B), strict=True)]

    def outputs(self, state: Floats, request: Request, C: torch.Tensor) -> Floats:
        """Of the step's tokens, which read by `C` what lies before them; with bfloat16 of a state the upper plane."""
        seen = definitions.bfloat16(state) if self.dtype == torch.bfloat16 else state
        reads = np.concatenate([np.zeros((len(request.history), *C.shape[1:])), wide(C)])
        return self._recurrence(seen, request.history + request.last, reads)[0][len(request.history) :]

    def checkpoint(self, state: Floats, flushed: list[Token]) -> Floats:
        """The state after all of them."""
        return self._recurrence(state, flushed, np.zeros((len(flushed), self.groups, self.shape[2])))[1][-1]

    def _recurrence(self, state: Floats, tokens: list[Token], C: Floats) -> tuple[Floats, Floats]:
        x, dt, B = (np.array(part) for part in zip(*tokens, strict=True))
        return definitions.mamba2(state, x, dt, -np.exp(wide(self.A_log)), B, C, wide(self.D))


def planes(draw: Draw) -> Iterator[Compared]:
    """The upper one is the state rounded to bfloat16; both together lose no bit."""
    state = draw.floats(2, 3, 4, dtype=torch.float32)
    upper = split_state(state)[0].view(torch.bfloat16)
    yield "split_state", upper.double(), definitions.bfloat16(wide(state))
    yield "join_state", join_state(split_state(state)).double(), wide(state)


def steps(draw: Draw) -> Iterator[Compared]:
    """Two requests and a row of padding pass block boundaries, or fill their rings; the last step only flushes."""
    most = draw.number(1, 3)
    limits = most, 3 * most - 1 + draw.number(0, 2), draw.one_of(None, most, most + 2)
    columns = 1 if limits[2] is None else (5 + STEPS * most) // limits[2] + 1
    blocks = draw.blocks(2 * columns)
    requests = [Request([blocks.pop() for _ in range(columns)], draw.number(1, 5), limits) for _ in range(2)]
    table = torch.tensor([*(request.blocks for request in requests), [NULL] * columns])
    layer, rows = Layer(draw, 1 + 2 * columns, limits[1]), longs([2, 0, -1])
    cursors = ReplayCursors.allocate(3, limits[1], most, CPU)
    cursors.restart(rows[:2], longs([request.base_pos for request in requests]))
    write_states(layer.pool, longs([request.block for request in requests]), draw.floats(2, *layer.shape))
    for number in range(STEPS):
        lengths = [draw.number(0, most) if number < STEPS - 1 else 0 for _ in requests] + [0]
        gained = [draw.number(1, len(request.last) or 9) for request in requests] + [0]
        bounds, (x, dt, B, C) = torch.tensor(starts(lengths)), layer.inputs(draw, sum(lengths))
        step = commit_reference(cursors, rows, longs(gained), bounds, table, limits[2])
        before, outputs, flushes = wide(layer.states()), np.zeros(x.shape), list[int]()
        expected = before.copy()
        for request, own, num_accepted in zip(requests, own_tokens(lengths), gained, strict=False):
            request.step(num_accepted, layer.tokens(x[own], dt[own], B[own]))
            state = before[request.block]
            if request.last:
                outputs[own] = layer.outputs(state, request, C[own])
            flushed = request.flush()
            flushes.append(len(flushed))
            if flushed:
                expected[request.block] = layer.checkpoint(state, flushed)
        yield "commit", step.n_flush, np.array([*flushes, 0])
        yield "commit, base_pos", cursors.base_pos[rows[:2]], np.array([request.base_pos for request in requests])
        if sum(lengths):
            operands = layer.pool, layer.ring, step, x, dt, layer.dt_bias, layer.A_log, B, C, layer.D, bounds
            yield "replay_update", replay_update_reference(*operands), outputs
        else:
            replay_flush_reference(layer.pool, layer.ring, step, layer.A_log)
        yield "replay, blocks", layer.states(), expected


CASES = (planes, steps)

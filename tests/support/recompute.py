"""Runs of many steps in scheme `recompute`, against the recurrence in float64."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any
from unittest.mock import patch

import numpy as np
import torch
import torch.nn.functional as F
from hypothesis import example, given, settings
from hypothesis import strategies as st
from hypothesis.strategies import DrawFn, SearchStrategy

from hybrid_kv.kernels.recompute import (
    RecomputeCursors,
    RecomputeRing,
    RecomputeStep,
    read_states,
    split_state,
    write_states,
)
from tests.kernels import definitions
from tests.kernels.harness import (
    GAPS,
    INTS,
    Shape,
    bits,
    flat_tokens,
    shapes,
)
from tests.kernels.ssd.layer import mamba2

Update = Callable[..., torch.Tensor]
Appended = tuple[tuple[torch.Tensor | None, float], ...]

OUTPUTS = {
    torch.float64: 1e-12,
    torch.float32: 1e-5,
    torch.float16: 2.0**-11 + 1e-5,
    torch.bfloat16: 6e-3,
}


ELEMENT, FROBENIUS = 5e-5, 5e-6


ROUNDING = {torch.bfloat16: 2.0**-8, torch.float16: 2.0**-11}


PLANES = "planes"  # of float32 states


FIELDS = ("rows", "src", "dst", "ring_start", "n_hist", "n_flush")


CPU = torch.device("cpu")


@contextlib.contextmanager
def rounding_of_the_hardware() -> Iterator[None]:
    """Round float32 to bfloat16 as hardware does; the interpreter truncates, and slowly."""
    import triton.language as tl
    from triton.runtime.interpreter import InterpreterBuilder, TensorHandle

    cast = InterpreterBuilder.cast_impl

    def nearest(self: InterpreterBuilder, source: TensorHandle, kind: tl.dtype) -> TensorHandle:
        types = source.dtype.scalar, kind.scalar
        if types == (tl.float32, tl.bfloat16):
            rounded = (
                torch.from_numpy(np.ascontiguousarray(source.data)).bfloat16().view(torch.int16)
            )
            return TensorHandle(rounded.numpy().view(np.uint16), kind.scalar)
        if types == (tl.bfloat16, tl.float32):
            return TensorHandle((source.data.astype(np.uint32) << 16).view(np.float32), kind.scalar)
        return cast(self, source, kind)

    with patch.object(InterpreterBuilder, "cast_impl", nearest):
        yield


# `starts`: tokens that each request's first state has seen; requests with the same start at a block
# boundary start from one cached block. `slack`: tokens that rings are longer than they must be.
# `extreme`: time steps around every bend of softplus, else as models have them. `together`: heads
# of a group share programs.
BASE = Shape(
    starts=(9,),
    steps=12,
    max_query_len=4,
    slack=0,
    block_size=8,
    groups=1,
    per_group=2,
    head_dim=3,
    size=5,
    gap=3,
    state=PLANES,
    dtype=torch.float32,
    parameters=torch.float32,
    indices=torch.int64,
    extreme=False,
    together=True,
    lanes=32,
    seed=0,
)


@st.composite
def cases(
    draw: DrawFn, dtypes: Sequence[torch.dtype], states: Sequence[torch.dtype | str]
) -> Shape:
    max_query_len = draw(st.sampled_from([1, 2, 4, 6, 10]))
    block_size = draw(st.sampled_from([None, max_query_len, max_query_len + 1, 12, 16]))
    if block_size is not None:
        block_size = max(block_size, max_query_len)
    end = 2 * (block_size or 3)
    drawn = shapes(
        BASE.but(max_query_len=max_query_len, block_size=block_size),
        starts=[(end, end), (1, end), (end + 1,), (end - 1, end)],
        slack=[0, 1, 5, 14],
        groups=[1, 2],
        per_group=[1, 2, 3],
        head_dim=[1, 3, 8, 17],
        size=[1, 5, 16, 33],
        gap=GAPS,
        state=states,
        dtype=dtypes,
        parameters=[torch.float32, torch.bfloat16],
        indices=INTS,
        extreme=[False, True],
        together=[False, True],
        lanes=[32, 64],
    )
    return draw(drawn)


@dataclass
class Request:
    """The recurrence of a request in float64; tokens are (x, dt after softplus, B, C)."""

    row: int
    base_pos: int
    base: torch.Tensor  # state after base_pos tokens
    now: torch.Tensor  # state after those of the history, too
    history: list
    drafts: list  # of the last step
    accepted: int = 1


class Run:
    """A pool, rings and cursors, NaN wherever nothing may be read, and their requests."""

    def __init__(self, case: Shape, device: torch.device = CPU) -> None:
        self.case, self.device = case, device
        self.g = g = torch.Generator().manual_seed(case.seed)
        self.heads = case.groups * case.per_group
        shape = (self.heads, case.head_dim, case.size)
        self.ring_len = 3 * case.max_query_len - 1 + case.slack
        num_rows, num_reqs = len(case.starts) + 1, len(case.starts)
        self.cursors = RecomputeCursors.allocate(
            num_rows, self.ring_len, case.max_query_len, device
        )
        sizes = num_rows, self.ring_len, shape[:2], (case.groups, case.size)
        self.ring = RecomputeRing.allocate(*sizes, case.dtype, device)
        for part in (self.ring.x, self.ring.B, self.ring.dt):
            part.fill_(torch.nan)
        size = case.block_size
        columns = (
            1 if size is None else (max(case.starts) + case.steps * case.max_query_len) // size + 1
        )
        ids = 1 + torch.randperm(num_reqs * columns, generator=g).view(num_reqs, columns)
        for index, start in enumerate(case.starts):
            same = case.starts.index(start)
            if size is not None and start % size == 0:
                ids[index, : start // size] = ids[same, : start // size]
        self.table = torch.zeros(num_reqs + 1, columns, dtype=case.indices)
        self.table[:num_reqs] = ids.to(case.indices)
        self.storage, self.state = self.reserve(1 + num_reqs * columns, shape)
        self.dt_bias = torch.rand(self.heads, generator=g).sub(0.5).to(device, case.parameters)
        self.A_log, self.D = (
            torch.randn(self.heads, generator=g).to(device, case.parameters) for _ in range(2)
        )
        self.requests, first = [], {}
        for index, start in enumerate(case.starts):
            state = torch.randn(shape, generator=g)
            state[0, 0, 0] = -0.0  # Who writes a state with nothing added leaves 0.
            if self.column(start) >= 0 and int(ids[index, self.column(start)]) in first:
                state = first[int(ids[index, self.column(start)])]
            first[int(ids[index, self.column(start)])] = state
            block = ids[index, self.column(start)][None].to(device)
            write_states(self.state, block, state[None].to(device))
            stored = read_states(self.state, block)[0].double().cpu()
            row = num_rows - 1 - index
            self.cursors.restart(
                torch.tensor([row], device=device), torch.tensor([start], device=device)
            )
            self.requests.append(Request(row, start, stored, stored, [], []))
        self.shared = [
            int(ids[i, self.column(s)])
            for i, s in enumerate(case.starts)
            if case.starts.count(s) > 1
        ]
        self.shared = self.shared if size is not None and case.starts[0] % size == 0 else []
        self.outputs, self.expected = [], []

    def reserve(self, blocks: int, shape: tuple[int, ...]) -> tuple[torch.Tensor, torch.Tensor]:
        """Return storage that holds NaN, and the states in it, with gaps between blocks."""
        case = self.case
        planes = (2,) if case.state == PLANES else ()
        dtype = torch.int16 if case.state == PLANES else case.state
        elements = torch.Size((*planes, *shape)).numel()
        storage = torch.full((2 + blocks * (elements + case.gap),), 0x7F81, dtype=torch.int16)
        storage = (
            storage if dtype == torch.int16 else torch.full(storage.shape, torch.nan, dtype=dtype)
        )
        storage = storage.to(self.device)
        strides = torch.empty(planes + shape).stride()
        state = storage.as_strided((blocks, *planes, *shape), (elements + case.gap, *strides), 2)
        return storage, state

    def column(self, pos: int) -> int:
        return 0 if self.case.block_size is None else (pos - 1) // self.case.block_size

    def inputs(self, num_tokens: int) -> tuple[torch.Tensor, ...]:
        """x, dt, B and C of tokens, NaN in the last, which is no row's."""
        case, g = self.case, self.g
        shared = case.groups, case.size
        sizes = (self.heads, case.head_dim), shared, shared
        parts = flat_tokens(num_tokens + 2, sizes, case.gap, case.dtype, g)
        x, B, C = (part[: num_tokens + 1].to(self.device) for part in parts)
        bends = (
            [-24.0, -16.7, -7.0, -3.0, 0.0, 2.0, 19.0, 20.0]
            if case.extreme
            else [-5.0, -4.0, -2.0, -1.0]
        )
        dt = torch.tensor(bends)[
            torch.randint(len(bends), (num_tokens + 1, self.heads + 1), generator=g)
        ]
        dt = (
            (dt + torch.rand(dt.shape, generator=g)).to(case.dtype)[:, : self.heads].to(self.device)
        )
        return x, dt, B, C

    def update(
        self,
        run_update: Update,
        step: RecomputeStep,
        tokens: Sequence[torch.Tensor],
        cu_seqlens: torch.Tensor,
    ) -> torch.Tensor:
        x, dt, B, C = tokens
        return run_update(
            self.state, self.ring, step, x, dt, self.dt_bias, self.A_log, B, C, self.D, cu_seqlens
        )

    def appended(
        self, x: torch.Tensor, dt: torch.Tensor, B: torch.Tensor, C: torch.Tensor
    ) -> Appended:
        """What the ring's x, B and dt get of each token, and the error as a share of it."""
        # Of small time steps too: log(1 + e) alone would err by 6e-5 of them.
        return (x, 0.0), (B, 0.0), (F.softplus(dt.double() + self.dt_bias.double()), 5e-6)

    def step(self, run_commit: Callable[..., RecomputeStep], run_update: Update) -> None:
        """Run a step of some requests in some order, then a padding row with a token of its own."""
        case, g = self.case, self.g
        order = torch.randperm(len(self.requests), generator=g)[
            : torch.randint(1, len(self.requests) + 1, (1,), generator=g)
        ]
        # Now and then a row has no tokens.
        lengths = [
            int(
                torch.randint(
                    0 if self.chance(0.1) else 1, case.max_query_len + 1, (1,), generator=g
                )
            )
            for _ in order
        ]
        chosen = [self.requests[int(i)] for i in order]
        cu_seqlens = torch.tensor([0, *lengths, 1]).cumsum(0)
        inputs = self.inputs(int(cu_seqlens[-1]))
        indices = (
            torch.tensor([request.row for request in chosen] + [-1]),
            torch.tensor([request.accepted for request in chosen] + [9]),
            cu_seqlens,
        )
        rows, accepted, cu_seqlens = (part.to(self.device, case.indices) for part in indices)
        table = self.table[[*order.tolist(), -1]].to(self.device)
        step = run_commit(self.cursors, rows, accepted, cu_seqlens, table, case.block_size)
        written, appended, flushed = [], [], []
        for i, (request, length) in enumerate(zip(chosen, lengths, strict=True)):
            request.history += request.drafts[: request.accepted]
            held = len(request.history)
            limits = case.max_query_len, self.ring_len, case.block_size
            n_flush = definitions.num_flushed(request.base_pos, held, length, *limits)
            after = request.base_pos + n_flush
            expected = [self.table[order[i], self.column(pos)] for pos in (request.base_pos, after)]
            found = [int(getattr(step, name)[i]) for name in FIELDS]
            assert found == [request.row, *map(int, expected), found[3], held, n_flush]
            assert held + length <= self.ring_len > found[3] and after >= 1
            request.base_pos = after
            if n_flush:
                written.append(found[2])
                flushed.append((request, n_flush, found[2]))
            appended += [
                (request.row, (found[3] + held + t) % self.ring_len) for t in range(length)
            ]
        assert [int(getattr(step, name)[-1]) for name in FIELDS[1:]] == [0] * 5

        before = self.storage.clone()
        rings = [part.clone() for part in (self.ring.x, self.ring.B, self.ring.dt)]
        y = self.update(run_update, step, inputs, cu_seqlens)
        assert y.shape == inputs[0].shape and y.dtype == inputs[0].dtype and y.is_contiguous()
        tokens = sum(lengths)
        assert bool((y[tokens] == 0).all()), "outputs of padding"
        self.check_memory(before, written, rings, appended, self.appended(*inputs))
        self.follow(chosen, lengths, y.cpu(), appended, *(part[:tokens].cpu() for part in inputs))
        for request, n_flush, block in flushed:
            self.check_flush(request, n_flush, block)
        assert set(written).isdisjoint(self.shared), "a cached block was written"

    def chance(self, p: float) -> bool:
        return bool(torch.rand(1, generator=self.g) < p)

    def check_memory(
        self,
        before: torch.Tensor,
        written: list[int],
        rings: list[torch.Tensor],
        appended: list[tuple[int, int]],
        expected: Appended,
    ) -> None:
        changed = bits(self.storage) != bits(before)
        own = torch.zeros(len(before), dtype=torch.bool)
        own.as_strided(self.state.shape, self.state.stride(), 2)[written] = True
        assert not bool((changed & ~own).any()), "a block of no request was written"
        for part, old, (source, share) in zip(
            (self.ring.x, self.ring.B, self.ring.dt), rings, expected, strict=True
        ):
            for token, (row, place) in enumerate(appended):
                if source is not None:
                    error = (part[row, :, place].double() - source[token].double()).abs()
                    assert bool((error <= share * source[token].abs()).all()), "the ring is wrong"
                old[row, :, place] = part[row, :, place]
            assert torch.equal(bits(part), bits(old)), "the ring changed elsewhere"

    def follow(
        self,
        chosen: list[Request],
        lengths: list[int],
        y: torch.Tensor,
        appended: list[tuple[int, int]],
        *tokens: torch.Tensor,
    ) -> None:
        """Take the recurrence on; some of the tokens are accepted."""
        first, (x, dt, B, C) = 0, tokens
        A, D = -self.A_log.cpu().double().exp(), self.D.cpu().double()
        for request, length in zip(chosen, lengths, strict=True):
            span = slice(first, first + length)
            first += length
            steps = F.softplus(dt[span].double() + self.dt_bias.cpu().double())
            expected, passed = mamba2(request.now, x[span], steps, A, B[span], C[span], D)
            self.outputs.append(y[span].double())
            self.expected.append(expected)
            request.drafts = list(zip(x[span], steps, B[span], strict=True))
            request.accepted = (
                int(torch.randint(1, length + 1, (1,), generator=self.g)) if length else 5
            )
            if length:
                request.now = passed[request.accepted - 1]

    def check_flush(self, request: Request, n_flush: int, block: int) -> None:
        folded, request.history = request.history[:n_flush], request.history[n_flush:]
        expected = self.fold(request.base, folded)
        found = read_states(self.state, torch.tensor([block], device=self.device))[0].cpu().double()
        error, largest = (found - expected).abs(), expected.abs().amax((1, 2), keepdim=True)
        if self.case.state in ROUNDING:
            tiny = 2.0**-25 if self.case.state == torch.float16 else 0.0
            assert bool(
                (error <= ROUNDING[self.case.state] * found.abs() + ELEMENT * largest + tiny).all()
            )
            # What was lost is lost: a checkpoint of few bits is compared flush by flush.
            request.base = found
            drafts = request.drafts[: request.accepted]
            request.now = self.fold(found, request.history + drafts)
            return
        double = self.case.state == self.case.dtype == torch.float64
        assert bool((error <= (1e-12 if double else ELEMENT) * largest).all()), float(
            (error / largest).max()
        )
        norms = [part.flatten(1).norm(dim=1) for part in (error, expected)]
        assert bool((norms[0] <= (1e-12 if double else FROBENIUS) * norms[1]).all()), norms
        request.base = expected

    def fold(self, state: torch.Tensor, tokens: list[tuple[torch.Tensor, ...]]) -> torch.Tensor:
        if not tokens:
            return state
        x, steps, B = (torch.stack(part) for part in zip(*tokens, strict=True))
        A = -self.A_log.cpu().double().exp()
        return mamba2(state, x, steps, A, B, torch.zeros_like(B), self.D)[1][-1]

    def finish(self) -> None:
        outputs, expected = torch.cat(self.outputs), torch.cat(self.expected)
        scale = expected.abs().amax((0, 2))[:, None]
        single = self.case.dtype == torch.float64 and self.case.state != torch.float64
        share = OUTPUTS[torch.float32 if single else self.case.dtype]
        worst = float(((outputs - expected).abs() / scale).max())
        assert worst <= share, worst


def check_run(
    case: Shape,
    run_commit: Callable[..., RecomputeStep],
    run_update: Update,
    device: torch.device = CPU,
    kind: type[Run] = Run,
) -> None:
    run = kind(case, device)
    for _ in range(case.steps):
        run.step(run_commit, run_update)
    run.finish()


SHORT_BLOCKS = BASE.but(starts=(8, 8), block_size=4, groups=2, head_dim=17, size=33, gap=5)


SAME_BLOCK = BASE.but(
    starts=(8, 8),
    max_query_len=6,
    block_size=8,
    head_dim=8,
    size=16,
    dtype=torch.bfloat16,
    lanes=64,
)


IN_PLACE = BASE.but(
    starts=(5, 3),
    max_query_len=2,
    block_size=None,
    dtype=torch.bfloat16,
    together=False,
    extreme=True,
)


LONG_STEPS = BASE.but(
    starts=(1, 20, 33),
    max_query_len=10,
    block_size=16,
    per_group=3,
    dtype=torch.bfloat16,
    state=torch.bfloat16,
)


EDGES = (SHORT_BLOCKS, SHORT_BLOCKS.but(extreme=True, seed=1), SAME_BLOCK, IN_PLACE, LONG_STEPS)


DOUBLE = BASE.but(starts=(8, 8), groups=2, dtype=torch.float64, state=torch.float64)


def follows_the_recurrence(
    test: Callable[[Shape], None],
    drawn: SearchStrategy[Shape],
    edges: Iterable[Shape],
    max_examples: int,
) -> Callable[[], None]:
    """Return a test of the edges, each a part of the rule by itself, and of drawn cases."""
    for edge in edges:
        test = example(edge)(test)
    return settings(max_examples=max_examples)(given(drawn)(test))


def check_null(update: Update, kind: type[Run] = Run, base: Shape = BASE) -> None:
    """A row without a block to read or to write does neither, whatever else its step says."""
    run = kind(base.but(dtype=torch.bfloat16))
    block, count, row = run.table[0, 1:2].long(), torch.tensor([3]), torch.tensor([1])
    tokens = [part[:4] for part in run.inputs(4)]
    run.A_log += 5
    memory = [
        run.storage,
        *(part.view(torch.int16) for part in (run.ring.x, run.ring.B, run.ring.dt)),
    ]
    before = [part.clone() for part in memory]
    for src, dst in ((block, block * 0), (block * 0, block)):
        step = RecomputeStep(row, src, dst, count, count, count, 4)
        y = run.update(update, step, tokens, torch.tensor([0, 4]))
        assert bool((y == 0).all())
        assert all(torch.equal(part, old) for part, old in zip(memory, before, strict=True))


def check_kept(update: Update, kind: type[Run] = Run, base: Shape = BASE) -> None:
    """Neutral tokens leave every bit of a state, also where its halves meet."""
    run = kind(base)
    source, target = run.table[0, :2].long().split(1)
    bits = 0x3F808000 + 0xFFFF * torch.arange(run.state[0, 0].numel())
    run.state[source] = split_state(bits.int().view(torch.float32).view(1, *run.state.shape[2:]))
    for part in (run.ring.x, run.ring.B, run.ring.dt):
        part.zero_()
    tokens = [part[:4] for part in run.inputs(4)]
    count = torch.tensor([3])
    step = RecomputeStep(torch.tensor([1]), source, target, count, count, count, 4)
    run.update(update, step, tokens, torch.tensor([0, 4]))
    assert torch.equal(run.state[target], run.state[source])
    assert kind is not Run or torch.equal(run.ring.x[1, :, 6:10].movedim(1, 0), tokens[0])
    # And what little they add is all there.
    run.state[source], run.ring.x[1, :, 5], run.ring.B[1, :, 5], run.ring.dt[1, :, 5] = (
        0,
        1,
        1 + 2**-9 + 2**-20,
        1,
    )
    run.update(update, step, tokens, torch.tensor([0, 4]))
    assert bool((read_states(run.state, target) == 1 + 2**-9 + 2**-20).all())


def ring_and_step(run: Run) -> dict[str, Any]:
    """Their parts by name."""
    found = {f"ring.{name}": getattr(run.ring, name) for name in ("x", "B", "dt")}
    return (
        found
        | {f"step.{name}": torch.ones(2, dtype=torch.int64) for name in FIELDS}
        | {"step.max_query_len": 4}
    )


def flattened(update: Update) -> Callable[..., None]:
    """An update that takes ring and step by their parts."""

    def call(**named: Any) -> None:
        for name, kind in (("ring", RecomputeRing), ("step", RecomputeStep)):
            parts = {
                part.removeprefix(f"{name}."): named.pop(part)
                for part in [*named]
                if part.startswith(f"{name}.")
            }
            named[name] = kind(**parts)
        update(**named)

    return call

"""Recurrences over padded rows and in chunks, against definitions and transformers.

Tolerances are shares of max|ref| (relative error of single elements is unbounded under
cancellation); of the delta rule's outputs, of what they add up, since a token with `beta` near 1
cancels what the state held for its key. In float32: a few tokens 1e-5, chunks 2e-5 (some hundred
roundings of 6e-8 in another order); in float64 1e-12, some thousand. Inputs in bfloat16 are exact
in float32, so they change nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.strategies import DrawFn

from hybrid_kv.kernels.common.ragged import WantedStates
from hybrid_kv.kernels.gated_delta import gated_delta_chunk, gated_delta_update
from hybrid_kv.kernels.gated_delta import reference as delta_reference
from hybrid_kv.kernels.selective_scan import selective_scan, selective_scan_update
from hybrid_kv.kernels.ssd import chunk_scan, host, reference, selective_state_update
from tests.kernels import definitions
from tests.kernels.harness import assert_close, defined, strided_states, wanted_states

Operands = tuple[torch.Tensor, ...]

FEW, CHUNKED, DOUBLE = 1e-5, 2e-5, 1e-12
DTYPES = [(torch.float32,) * 2, (torch.float64,) * 2, (torch.float32, torch.bfloat16)]


def mamba2_operands(
    shape: tuple[int, int],
    sizes: Sequence[int],
    strength: float,
    dtype: torch.dtype,
    g: torch.Generator,
) -> tuple[Operands, torch.Tensor]:
    (groups, head_dim, size), heads = sizes, 2 * sizes[0]
    x, dt = (
        torch.randn(*shape, heads, head_dim, generator=g),
        2 * torch.rand(*shape, heads, generator=g),
    )
    A, D = -0.01 - strength * torch.rand(heads, generator=g), torch.randn(heads, generator=g)
    B, C = (torch.randn(*shape, groups, size, generator=g) for _ in "BC")
    state = torch.randn(shape[0], heads, head_dim, size, generator=g)
    return tuple(part.to(dtype) for part in (x, dt, A, B, C, D)), state.to(dtype)


def mamba1_operands(
    shape: tuple[int, int],
    sizes: Sequence[int],
    strength: float,
    dtype: torch.dtype,
    g: torch.Generator,
) -> tuple[Operands, torch.Tensor]:
    channels, size, _ = sizes
    x, dt = (
        torch.randn(*shape, channels, generator=g),
        2 * torch.rand(*shape, channels, generator=g),
    )
    A, D = -strength * torch.rand(channels, size, generator=g), torch.randn(channels, generator=g)
    B, C = (torch.randn(*shape, size, generator=g) for _ in "BC")
    state = torch.randn(shape[0], channels, size, generator=g)
    return tuple(part.to(dtype) for part in (x, dt, A, B, C, D)), state.to(dtype)


def delta_operands(
    shape: tuple[int, int],
    sizes: Sequence[int],
    strength: float,
    dtype: torch.dtype,
    g: torch.Generator,
    per_channel: bool = False,
) -> tuple[Operands, torch.Tensor]:
    """Return unit keys, scaled unit queries, beta of 0 … 2, log decays of 0 … -strength."""
    heads, k_size, v_size = sizes
    q, k = (
        F.normalize(torch.randn(*shape, heads, k_size, generator=g, dtype=dtype), dim=-1)
        for _ in "qk"
    )
    v = torch.randn(*shape, heads, v_size, generator=g, dtype=dtype)
    decays = (*shape, heads, k_size) if per_channel else (*shape, heads)
    decay = -strength * torch.rand(decays, generator=g, dtype=dtype) ** 3
    beta = 2 * torch.rand(*shape, heads, generator=g, dtype=dtype)
    state = torch.randn(shape[0], heads, v_size, k_size, generator=g, dtype=dtype)
    return (q * k_size**-0.5, k, v, decay, beta), state


def channel_operands(*arguments: Any) -> tuple[Operands, torch.Tensor]:
    return delta_operands(*arguments, per_channel=True)


@dataclass(frozen=True)
class Recurrence:
    """An operation over a few tokens, and over many.

    Attributes:
        definition: of one row.
        operands: makes them, and a state, all of one type; what has tokens has three dimensions or
            more.
        narrow: of the operands, those that may come in another type.
        padding: of the operands, those that may hold anything finite behind a row.
        still: the operands that are zero for a token that leaves the state alone, its time step or
            decay first.
        cancels: the operand that reads the state, where outputs may be small beside what they add
            up.
        chunk: tokens of a chunk for a requested size.
        context: in which it runs.
    """

    few: Callable
    many: Callable
    definition: Callable
    operands: Callable
    narrow: tuple[int, ...]
    padding: tuple[int, ...]
    still: tuple[int, ...]
    cancels: int | None = None
    chunk: Callable = lambda size: size
    context: Callable = nullcontext

    def rows(
        self, lengths: Sequence[int], operands: Operands, state: torch.Tensor
    ) -> list[tuple[torch.Tensor, list[torch.Tensor]]]:
        """Outputs of each row, and the state after each of its tokens."""
        return [
            defined(
                self.definition,
                state[row],
                *(part[row, :length] if part.dim() > 2 else part for part in operands),
            )
            for row, length in enumerate(lengths)
        ]

    def terms(self, operands: Operands, states: Sequence[torch.Tensor]) -> float:
        """The largest product that outputs add up, where they may cancel."""
        if self.cancels is None:
            return 1e-3
        return float(operands[self.cancels].abs().max()) * max(
            float(state.abs().max()) for state in states
        )

    def scan(
        self,
        operands: Operands,
        state: torch.Tensor,
        chunk_size: int,
        rows: torch.Tensor,
        offsets: torch.Tensor,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        with self.context():
            return self.many(operands, state, chunk_size, rows, offsets)


def in_the_loop() -> AbstractContextManager[object]:
    return patch.object(host, "MAX_THREADS", torch.get_num_threads())


def scan_mamba2(
    operands: Operands,
    state: torch.Tensor,
    chunk_size: int,
    rows: torch.Tensor,
    offsets: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor]:
    return chunk_scan(*operands, state, chunk_size, rows, offsets)


def scan_mamba1(
    operands: Operands,
    state: torch.Tensor,
    chunk_size: int,
    rows: torch.Tensor,
    offsets: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor]:
    return selective_scan(*operands, state, chunk_size, rows, offsets)


def scan_delta(
    operands: Operands,
    state: torch.Tensor,
    chunk_size: int,
    rows: torch.Tensor,
    offsets: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor]:
    return gated_delta_chunk(*operands, state, chunk_size, rows, offsets)


MAMBA1 = (selective_scan_update, scan_mamba1, definitions.mamba1, mamba1_operands)
MAMBA2 = (
    selective_state_update,
    scan_mamba2,
    definitions.mamba2,
    mamba2_operands,
    (),
    (0, 3, 4),
    (1,),
)
DELTA = (gated_delta_update, scan_delta, definitions.gated_delta)
RECURRENCES = {
    "mamba2": Recurrence(*MAMBA2, context=host.in_chunks),
    "mamba2, compiled loop": Recurrence(*MAMBA2, context=in_the_loop),
    "mamba1": Recurrence(*MAMBA1, (0, 3, 4), (0, 3, 4), (1,)),
    "gated delta": Recurrence(*DELTA, delta_operands, (0, 1, 2), (2,), (3, 4), cancels=0),
    "gated delta by channel": Recurrence(
        *DELTA,
        channel_operands,
        (0, 1, 2),
        (2,),
        (3, 4),
        cancels=0,
        chunk=lambda size: min(size, 8),
    ),
}
each = pytest.mark.parametrize("one", RECURRENCES.values(), ids=RECURRENCES)


@st.composite
def problems(
    draw: DrawFn, one: Recurrence, most: int = 20
) -> tuple[list[int], Operands, torch.Tensor]:
    """Return row lengths, operands with any values after the tokens, and a state with gaps."""
    lengths = draw(st.lists(st.integers(1, most), min_size=1, max_size=3))
    sizes = [draw(st.integers(1, 4)) for _ in range(3)]
    dtype, narrow = draw(st.sampled_from(DTYPES if one.narrow else DTYPES[:2]))
    g = torch.Generator().manual_seed(draw(st.integers(0, 2**31)))
    shape, strength = (len(lengths), max(lengths)), draw(st.sampled_from([0.1, 4.0, 100.0]))
    operands, state = one.operands(shape, sizes, strength, dtype, g)
    behind = torch.arange(shape[1]) >= torch.tensor(lengths)[:, None]
    for place in one.padding:
        operands[place][behind] = 1e6
    operands = tuple(
        part.to(narrow) if place in one.narrow else part for place, part in enumerate(operands)
    )
    return lengths, operands, strided_states(state)


@each
@given(data=st.data(), chunk_size=st.integers(1, 23))
def test_chunks_of_any_size_equal_the_definition_with_the_state_at_any_offset(
    one: Recurrence, data: st.DataObject, chunk_size: int
) -> None:
    lengths, operands, state = data.draw(problems(one))
    wanted, rows, offsets = wanted_states(data.draw, lengths, most=6)
    before = [part.clone() for part in (*operands, state)]
    module = reference if one.many is scan_mamba2 else delta_reference
    with patch.object(module, "WantedStates", wraps=WantedStates) as cut:
        y, states = one.scan(operands, state, chunk_size, rows, offsets)
    assert all(torch.equal(part, old) for part, old in zip((*operands, state), before, strict=True))
    if cut.called:  # other chunks change no value, only how long it takes
        assert cut.call_args.args[2] in definitions.chunks(max(lengths), one.chunk(chunk_size))
    assert y.dtype == states.dtype == state.dtype and states.shape == (
        len(wanted),
        *state.shape[1:],
    )
    share, loops = (
        CHUNKED if state.dtype == torch.float32 else DOUBLE,
        one.rows(lengths, operands, state),
    )
    for row, length in enumerate(lengths):
        assert_close(
            y[row, :length], loops[row][0], share, one.terms(operands, [state[row], *loops[row][1]])
        )
    for (row, offset), got in zip(wanted, states, strict=True):
        assert_close(got, loops[row][1][offset - 1], share)


@each
@given(data=st.data())
def test_a_few_tokens_equal_the_definition_with_the_state_after_each(
    one: Recurrence, data: st.DataObject
) -> None:
    lengths, operands, state = data.draw(problems(one, most=6))
    before = [part.clone() for part in (*operands, state)]
    y, states = one.few(state, *operands)
    assert all(torch.equal(part, old) for part, old in zip((*operands, state), before, strict=True))
    assert y.dtype == states.dtype == state.dtype and states.shape == (
        *y.shape[:2],
        *state.shape[1:],
    )
    share = FEW if state.dtype == torch.float32 else DOUBLE
    for row, (expected, passed) in enumerate(one.rows(lengths, operands, state)):
        assert_close(
            y[row, : lengths[row]], expected, share, one.terms(operands, [state[row], *passed])
        )
        assert_close(states[row, : lengths[row]], torch.stack(passed), share)


@each
def test_a_token_without_a_step_leaves_the_state_alone_bit_for_bit(one: Recurrence) -> None:
    operands, state = one.operands(
        (2, 6), (2, 3, 4), 1.0, torch.float32, torch.Generator().manual_seed(0)
    )
    for place in one.still:
        operands[place].zero_()
    assert torch.equal(
        one.scan(operands, state, 4, torch.arange(2), torch.tensor([6, 5]))[1], state
    )
    states = one.few(state, *operands)[1]
    assert torch.equal(states, state.unsqueeze(1).expand_as(states))


@each
@pytest.mark.parametrize("chunk_size", [16, 64, 128])
def test_tokens_behind_a_strong_decay_keep_their_digits(one: Recurrence, chunk_size: int) -> None:
    """Half of a chunk decays by 400 and more: small differences of large sums keep their digits."""
    operands, state = one.operands(
        (1, 128), (2, 8, 8), 0.02, torch.float32, torch.Generator().manual_seed(0)
    )
    strong, decays = torch.arange(128) % chunk_size < chunk_size // 2, operands[one.still[0]]
    if one.cancels is None:
        operands[2].fill_(-10.0)
        decays[:, strong], decays[:, ~strong] = 4.0, 0.001 * decays[:, ~strong]
    else:
        decays[:, strong] -= 800 / chunk_size
    rows, offsets = torch.zeros(3, dtype=torch.int64), torch.tensor([100, 128, 7])
    y, states = one.scan(operands, state, chunk_size, rows, offsets)
    ((expected, passed),) = one.rows([128], operands, state)
    assert_close(y[0], expected, 2e-6)
    assert_close(states, torch.stack([passed[n - 1] for n in offsets.tolist()]), 2e-6)


@given(data=st.data(), chunk_size=st.integers(1, 12))
def test_the_size_of_chunks_changes_no_bit_of_a_state_of_mamba1(
    data: st.DataObject, chunk_size: int
) -> None:
    lengths, operands, state = data.draw(problems(one := RECURRENCES["mamba1"]))
    row, offsets = torch.arange(len(lengths)), torch.tensor(lengths)
    expected = one.few(state, *operands)[1][row, offsets - 1]
    assert torch.equal(one.scan(operands, state, chunk_size, row, offsets)[1], expected)


@pytest.mark.parametrize("max_threads", [0, torch.get_num_threads(), 999])
def test_the_compiled_loop_runs_on_few_cores_of_a_cpu(max_threads: int) -> None:
    with patch.object(host, "MAX_THREADS", max_threads):
        assert host.scan_loop(torch.empty(1, dtype=torch.bfloat16)) is None
        assert host.scan_loop(torch.empty(1, device="meta")) is None
        with host.in_chunks():
            assert host.scan_loop(torch.empty(1)) is None
        assert (host.scan_loop(torch.empty(1)) is None) == (max_threads == 0)


def test_the_compiled_loop_reads_nothing_behind_the_states_that_are_wanted() -> None:
    if loop := host.scan_loop(torch.empty(1)):
        x, one = np.ones((1, 1, 1, 1), dtype=np.float32), np.ones(2, dtype=np.int64)
        wanted = np.zeros((2, 1, 1, 1), dtype=np.float32)
        # Behind the one offset and the ends of the one row others lie, which are of no row.
        loop(
            x,
            x[0],
            x[0, 0, 0],
            x,
            x,
            x[0, 0, 0],
            x,
            np.arange(3)[:2],
            one[:1],
            x.copy(),
            wanted[:1],
        )
        assert wanted[0] and not wanted[1]


def test_jamba_of_transformers_computes_the_same() -> None:
    jamba = pytest.importorskip("transformers.models.jamba.modeling_jamba")
    operands, state = mamba1_operands(
        (2, 30), (6, 4, 0), 4.0, torch.float32, torch.Generator().manual_seed(0)
    )
    x, dt, A, B, C, D = operands
    y, states = selective_scan(*operands, state.zero_(), 8, torch.arange(2), torch.full((2,), 30))
    expected, expected_state = jamba.mamba_selective_scan(
        x.mT, dt.mT, A, B.mT, C.mT, D, return_last_state=True
    )
    assert_close(y, expected.mT, FEW)
    assert_close(states, expected_state, FEW)


@pytest.mark.parametrize(
    ("length", "per_channel"), [(1, False), (5, False), (150, False), (5, True), (150, True)]
)
def test_delta_nets_of_transformers_compute_the_same(length: int, per_channel: bool) -> None:
    """They want unscaled queries, and states as [K, V]."""
    if per_channel:
        kimi = pytest.importorskip("transformers.models.kimi_linear.modeling_kimi_linear")
        others = kimi.chunk_kimi_delta_attention, kimi.recurrent_kimi_delta_attention
    else:
        qwen = pytest.importorskip("transformers.models.qwen3_next.modeling_qwen3_next")
        others = qwen.torch_chunk_gated_delta_rule, qwen.torch_recurrent_gated_delta_rule
    g, row = torch.Generator().manual_seed(1), torch.arange(2)
    (q, *rest), state = delta_operands((2, length), (3, 16, 8), 3.0, torch.float32, g, per_channel)
    ours, states = gated_delta_update(state, q, *rest)
    chunked, last = gated_delta_chunk(q, *rest, state, 32, row, torch.full_like(row, length))
    for theirs in others:
        expected, expected_state = theirs(
            q * 16**0.5, *rest, initial_state=state.mT.clone(), output_final_state=True
        )
        for got, got_state in ((ours, states[:, -1]), (chunked, last)):
            assert_close(got, expected, CHUNKED)
            assert_close(got_state, expected_state.mT, CHUNKED)

"""Many steps in scheme `recompute` against the recurrence over accepted tokens in float64.

Tolerances are shares of the largest value of the head. Outputs: 1e-5 in float32 arithmetic; 6e-3
with bfloat16 inputs, whose products take operands of 8 bits and whose results are rounded to as
many. Checkpoints that are carried on as float32: 5e-6 in the Frobenius norm, 5e-5 at most, after
any number of flushes. Checkpoints of fewer bits: what one flush makes of the stored one, within
half a unit in the last place.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from dataclasses import replace
from random import Random
from typing import Any
from unittest.mock import patch

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from bench._shapes import MODELS, NANO
from bench.static.counts import mean_traffic
from bench.static.state_bytes import slots_bytes, step_bytes
from hybrid_kv.kernels.recompute import (
    RecomputeCursors,
    RecomputeRing,
    RecomputeStep,
    commit,
    commit_reference,
    join_state,
    read_states,
    recompute_flush,
    recompute_flush_reference,
    recompute_update,
    recompute_update_reference,
    split_state,
    write_states,
)
from hybrid_kv.kernels.recompute import launch as module
from tests.kernels.harness import (
    Shape,
    compiled,
    multiply_bfloat16,
    rejections,
)
from tests.kernels.interpreter import count_bytes, interpreted, share_memory_with_the_interpreter
from tests.support.recompute import (
    BASE,
    CPU,
    DOUBLE,
    EDGES,
    FIELDS,
    LONG_STEPS,
    PLANES,
    Run,
    Update,
    cases,
    check_kept,
    check_null,
    check_run,
    flattened,
    follows_the_recurrence,
    ring_and_step,
    rounding_of_the_hardware,
)

CURSORS = ("base_pos", "ring_start", "n_hist", "prev_t")


# ---- planes ----


def patterns() -> torch.Tensor:
    """Return every upper half of a float32, with lower halves around its rounding points.

    Denormals, infinities and NaN are among them.
    """
    high = torch.arange(2**16)[:, None]
    low = torch.tensor([0, 1, 2, 0x5555, 0x7FFE, 0x7FFF, 0x8000, 0x8001, 0xAAAA, 0xFFFE, 0xFFFF])
    bits = (high << 16) + low
    return torch.where(bits < 2**31, bits, bits - 2**32).int()


def test_planes_lose_nothing() -> None:
    bits = patterns()
    planes = split_state(bits.view(torch.float32).unsqueeze(0))
    assert planes.dtype == torch.int16 and planes.shape == (2, 1, *bits.shape)
    assert torch.equal(join_state(planes).view(torch.int32)[0], bits)


def test_planes_of_states_of_one_element_lose_nothing() -> None:
    state = torch.randn(3, 2, 1, 1).as_strided((3, 2, 1, 1), (2, 1, 9, 0))
    assert torch.equal(join_state(split_state(state)), state)


def test_the_upper_plane_is_the_state_rounded_half_away() -> None:
    bits = patterns()
    values = bits.view(torch.float32)
    upper = split_state(values.unsqueeze(0))[0, 0]
    magnitude = (bits.long() & 0x7FFFFFFF) + 0x8000 >> 16
    expected = torch.where(bits < 0, magnitude - 2**15, magnitude)
    assert torch.equal(upper.long()[~values.isnan()], expected[~values.isnan()])


@pytest.mark.parametrize("state", [PLANES, torch.float64, torch.bfloat16])
def test_states_are_written_and_read_in_either_form(state: torch.dtype | str) -> None:
    shape = (2, 2, 3, 5) if state == PLANES else (2, 3, 5)
    dtype = torch.int16 if state == PLANES else state
    pool = torch.full((6, *shape, 2), 7, dtype=dtype)[..., 0]
    values = torch.randn(
        4, 2, 3, 5, generator=torch.Generator().manual_seed(0), dtype=torch.float64
    )
    blocks = torch.tensor([3, 0, 5, 0])
    write_states(pool, blocks, values)
    stored = values.to(torch.float32 if state == PLANES else state)
    assert torch.equal(read_states(pool, blocks[[0, 2]]), stored[[0, 2]])
    assert bool((pool[[0, 1, 2, 4]] == 7).all()), "the null block or another was written"


# ---- runs ----


def check(case: Shape, every: int = 4) -> None:
    """The interpreter is slow and the kernel's memory is the reference's, so they take turns."""
    run, saturated = Run(case), 0 if case.together else 10**9
    patches = {
        "warp_size": lambda: case.lanes,
        "SATURATED": saturated,
        "is_interpreter": lambda: False,
    }
    with rounding_of_the_hardware(), multiply_bfloat16(), patch.multiple(module, **patches):
        for index in range(case.steps):
            run.step(
                commit, recompute_update_reference if (index + 1) % every else recompute_update
            )
    run.finish()


def check_reference(case: Shape) -> None:
    check_run(case.but(steps=16), commit_reference, recompute_update_reference)


def check_kernels(case: Shape) -> None:
    interpreted(check, case)


test_the_reference_follows_the_recurrence = follows_the_recurrence(
    check_reference,
    cases(
        [torch.float64, torch.float32, torch.bfloat16],
        [PLANES, torch.float64, torch.bfloat16, torch.float16],
    ),
    [*EDGES, DOUBLE, LONG_STEPS.but(state=torch.float16)],
    max_examples=6,
)
test_the_kernels_follow_the_recurrence = follows_the_recurrence(
    check_kernels,
    cases(
        [torch.float32, torch.float16, torch.bfloat16, torch.bfloat16],
        [PLANES, torch.bfloat16, torch.float16],
    ),
    EDGES,
    max_examples=2,
)


def test_the_kernels_follow_the_recurrence_at_the_size_of_a_model() -> None:
    """One group of Nemotron-3-Nano, with the usual ring: it wraps, and boundaries pass."""
    of_a_model = {"per_group": 8, "head_dim": 64, "size": 128, "dtype": torch.bfloat16}
    interpreted(check, BASE.but(starts=(16,), steps=18, slack=25, block_size=16, **of_a_model), 3)


# ---- commit and flush by themselves ----


def check_commit(seed: int, block_size: int | None, indices: torch.dtype, most: int = 5) -> None:
    """Many steps, absent requests, rows between the tables': every tensor is the same."""
    g = torch.Generator().manual_seed(seed)
    num_rows, ring_len = 40, 17
    ours, theirs = (RecomputeCursors.allocate(num_rows, ring_len, most, CPU) for _ in range(2))
    starts, addresses = torch.randint(0, 30, (num_rows,), generator=g), {}
    for cursors in (ours, theirs):
        cursors.restart(torch.arange(num_rows), starts)
    for _ in range(40):
        num_reqs = int(torch.randint(1, num_rows + 1, (1,), generator=g))
        rows = torch.randperm(num_rows, generator=g)[:num_reqs]
        rows[torch.rand(num_reqs, generator=g) < 0.2] = -1
        lengths = torch.randint(0, most + 1, (num_reqs,), generator=g)
        cu_seqlens = torch.cat([torch.zeros(1, dtype=torch.int64), lengths.cumsum(0)])
        accepted = torch.randint(1, most + 1, (num_reqs,), generator=g)
        table = torch.randint(0, 2**31 - 1, (num_reqs, 60), generator=g)
        arguments = [part.to(indices) for part in (rows, accepted, cu_seqlens, table)]
        arguments[3] = arguments[3][:, :50]
        expected = commit_reference(theirs, *arguments, block_size)
        step = commit(ours, *arguments, block_size)
        for name in FIELDS:
            assert torch.equal(getattr(step, name), getattr(expected, name)), name
        assert step.max_query_len == expected.max_query_len == most
        # A captured graph of as many requests reads it there.
        assert addresses.setdefault(num_reqs, step.src.data_ptr()) == step.src.data_ptr()
        for name in CURSORS:
            assert torch.equal(getattr(ours, name), getattr(theirs, name)), name


@pytest.mark.parametrize(
    ("block_size", "indices"), [(None, torch.int64), (5, torch.int64), (8, torch.int32)]
)
def test_commit_equals_its_reference(block_size: int | None, indices: torch.dtype) -> None:
    interpreted(check_commit, 7, block_size, indices)


def test_commit_equals_its_reference_in_blocks_of_a_token() -> None:
    interpreted(check_commit, 7, 1, torch.int64, 1)


@given(st.integers(1, 8), st.integers(0, 20), st.booleans(), st.randoms(use_true_random=False))
def test_a_step_never_reaches_the_history_that_it_reads(
    max_query_len: int, slack: int, boundaries: bool, random: Random
) -> None:
    """The rule promises that a step never reaches its history, nor flushes earlier than it must."""
    ring_len = 3 * max_query_len - 1 + slack
    cursors = RecomputeCursors.allocate(1, ring_len, max_query_len, CPU)
    row, table = torch.zeros(1, dtype=torch.int64), torch.ones(1, 200, dtype=torch.int64)
    cursors.restart(row, row + 1)
    block_size = max(max_query_len, random.randint(1, 12)) if boundaries else None
    length = accepted = 0
    for _ in range(60):
        before = int(cursors.n_hist[0]) + min(accepted, length)
        base = int(cursors.base_pos[0])
        length = random.choice([1, max_query_len])
        cu_seqlens = torch.tensor([0, length])
        step = commit_reference(
            cursors, row, torch.tensor([accepted]), cu_seqlens, table, block_size
        )
        held, flush = int(step.n_hist[0]), int(step.n_flush[0])
        assert held == before <= ring_len - max_query_len
        assert held + length <= ring_len
        at_boundary = block_size is not None and (base + held) // block_size > base // block_size
        if at_boundary:
            assert (base + flush) % block_size == 0 and held - flush < max_query_len
        elif flush:
            assert flush == held and held + length + max_query_len > ring_len
        else:
            assert held + length + max_query_len <= ring_len
        accepted = random.choice([1, length])


def finalized(device: torch.device = CPU) -> tuple[Run, RecomputeStep]:
    """A run whose requests have just had a boundary accepted, and the step of their leaving."""
    run = Run(
        BASE.but(starts=(15, 13), max_query_len=6, block_size=16, dtype=torch.bfloat16), device
    )
    order = torch.arange(2)
    cu_seqlens = torch.tensor([0, 6, 12], device=device)
    for tokens in (cu_seqlens, torch.zeros_like(cu_seqlens)):
        rows = torch.tensor([request.row for request in run.requests], device=device)
        table = run.table[order].to(device)
        step = commit_reference(
            run.cursors, rows, torch.tensor([6, 2], device=device), tokens, table, 16
        )
        if len(run.outputs) == 0:
            x, dt, B, C = (part[:12] for part in run.inputs(12))
            args = (x, dt, run.dt_bias, run.A_log, B, C, run.D, tokens)
            run.outputs.append(recompute_update_reference(run.state, run.ring, step, *args))
    return run, step


def check_finalize(flush: Callable[..., None]) -> None:
    run, step = finalized()
    # 15 + 6 tokens pass the boundary at 16; 13 + 2 do not, and a request that leaves needs no more
    # than boundaries.
    assert step.n_flush.tolist() == [1, 0] and step.n_hist.tolist() == [6, 2]
    before, rings = (
        run.state.clone(),
        [part.clone() for part in (run.ring.x, run.ring.B, run.ring.dt)],
    )
    with rounding_of_the_hardware() if flush is recompute_flush else contextlib.nullcontext():
        flush(run.state, run.ring, step, run.A_log)
    block = int(step.dst[0])
    changed = [b for b in range(len(before)) if not torch.equal(run.state[b], before[b])]
    assert changed == [block] == [int(run.table[0, 0])]
    for part, old in zip((run.ring.x, run.ring.B, run.ring.dt), rings, strict=True):
        assert torch.equal(part.nan_to_num(7.0), old.nan_to_num(7.0))
    place = [(int(step.ring_start[0]) + i) % run.ring_len for i in range(1)]
    row = run.requests[0].row
    token = (
        run.ring.x[row, :, place[0]],
        run.ring.dt[row, :, place[0]],
        run.ring.B[row, :, place[0]],
    )
    run.requests[0].history = [tuple(part.double() for part in token)]
    run.check_flush(run.requests[0], 1, block)


@pytest.mark.parametrize("flush", [recompute_flush, recompute_flush_reference])
def test_a_request_that_leaves_is_flushed_to_its_last_boundary(flush: Callable[..., None]) -> None:
    interpreted(check_finalize, flush)


@pytest.mark.parametrize("update", [recompute_update, recompute_update_reference])
def test_a_row_of_padding_reads_and_writes_nothing(update: Update) -> None:
    interpreted(check_null, update)


@pytest.mark.parametrize("update", [recompute_update, recompute_update_reference])
def test_a_state_keeps_every_bit(update: Update) -> None:
    interpreted(check_kept, update)


def test_a_new_owner_of_a_row_starts_anew() -> None:
    """Whatever the last one left there, and however many tokens it had accepted."""
    cursors = RecomputeCursors.allocate(3, 11, 4, CPU)
    rows, table = torch.tensor([2]), torch.tensor([[5, 6, 7]])
    cursors.restart(rows, torch.tensor([3]))
    for accepted in (1, 4, 2):
        commit_reference(cursors, rows, torch.tensor([accepted]), torch.tensor([0, 4]), table, 8)
    cursors.restart(rows, torch.tensor([16]))
    step = commit_reference(cursors, rows, torch.tensor([4]), torch.tensor([0, 4]), table, 8)
    assert [int(getattr(step, name)) for name in FIELDS] == [2, 6, 6, 0, 0, 0]
    assert [getattr(cursors, name).tolist() for name in CURSORS] == [
        [0, 0, 16],
        [0, 0, 0],
        [0, 0, 0],
        [0, 0, 4],
    ]


# ---- memory ----


def check_far(update: Update) -> None:
    """Check blocks and rows 2^31 elements and more into memory that is never committed."""
    share_memory_with_the_interpreter()
    num_rows = 2**31 // (3 * 11) + 2
    near_run = Run(BASE.but(block_size=16, per_group=1))
    stride = 2**30 + 8
    far = torch.empty(3 * stride, dtype=torch.int16).as_strided(
        (3, 2, 1, 3, 5), (stride, 15, 15, 5, 1)
    )
    source = int(near_run.table[0, 0])
    far[1:] = near_run.state[source]
    far_ring = RecomputeRing(
        torch.empty(num_rows, 1, 11, 3),
        torch.empty(num_rows, 1, 11, 5),
        torch.empty(num_rows, 1, 11),
    )
    x, dt, B, C = (part[:4] for part in near_run.inputs(4))
    args = (x, dt, near_run.dt_bias, near_run.A_log, B, C, near_run.D, torch.tensor([0, 4]))
    row, last, zero = torch.tensor([1]), torch.tensor([num_rows - 1]), torch.tensor([0])
    for held, flush in ((0, 0), (4, 3)):
        counts = (zero, torch.tensor([held]), torch.tensor([flush]), 4)
        near_step = RecomputeStep(row, torch.tensor([source]), torch.tensor([source]), *counts)
        far_step = RecomputeStep(last, torch.tensor([2]), torch.tensor([2]), *counts)
        near_y = update(near_run.state, near_run.ring, near_step, *args)
        far_y = update(far, far_ring, far_step, *args)
        assert torch.equal(near_y, far_y)
    assert torch.equal(far[2], near_run.state[source]) and not torch.equal(far[1], far[2])
    for part, other in (
        (far_ring.x, near_run.ring.x),
        (far_ring.B, near_run.ring.B),
        (far_ring.dt, near_run.ring.dt),
    ):
        assert torch.equal(part[-1, :, :8], other[1, :, :8])


def test_offsets_pass_int32() -> None:
    interpreted(check_far, recompute_update)


GROUP = (2, 64, 128, 1)  # two heads of Nemotron-3-Nano that share B and C


def measure_rows(
    state: torch.dtype | str, length: int, histories: Sequence[tuple[int, int]], dtype: torch.dtype
) -> tuple[list[dict[str, int]], dict[str, int]]:
    """Distinct bytes of each row of one launch; (n_hist, n_flush) each, in place or not."""
    case = BASE.but(
        starts=(1,) * len(histories),
        max_query_len=6,
        slack=21,
        block_size=None,
        state=state,
        dtype=dtype,
    )
    run = Run(case.but(head_dim=64, size=128))
    for part in (run.ring.x, run.ring.B, run.ring.dt):
        part.fill_(0.1)
    rows = torch.arange(len(histories))
    blocks = run.table[:-1, 0].long()
    held, flush = torch.tensor(histories).T.contiguous()
    step = RecomputeStep(rows, blocks, blocks, rows, held, flush, 6)
    cu_seqlens = torch.arange(len(rows) + 1) * length
    x, dt, B, C = (part[:-1] for part in run.inputs(length * len(rows)))
    tensors = {"D": run.D, "dt_bias": run.dt_bias, "A_log": run.A_log}
    for row in rows.tolist():
        span = slice(row * length, (row + 1) * length)
        tensors |= {f"state {row}": run.state[blocks[row]]}
        tensors |= {f"ring {name} {row}": getattr(run.ring, name)[row] for name in ("x", "B", "dt")}
        tensors |= {
            f"inputs {name} {row}": part[span]
            for name, part in (("x", x), ("dt", dt), ("B", B), ("C", C))
        }
    args = (run.state, run.ring, step, x, dt, run.dt_bias, run.A_log, B, C, run.D, cu_seqlens)
    with rounding_of_the_hardware(), patch.object(module, "SATURATED", 0):
        counted, y, launches = count_bytes(tensors, recompute_update, *args)
    assert launches == 1 and y[0] == 0 and y[1] == y[3]
    found = [{"state": 0, "ring": 0, "inputs": 0, "outputs": y[1] // len(rows)} for _ in histories]
    for name, (loaded, stored, *_) in counted.items():
        if " " in name:
            found[int(name.split()[-1])][name.split()[0]] += loaded + stored
    return found, {name: counts[0] for name, counts in counted.items() if " " not in name}


HISTORIES = ((0, 0), (1, 0), (17, 0), (32, 0), (32, 32), (20, 3))


COUNTED = [(PLANES, 4, torch.bfloat16), (PLANES, 6, torch.bfloat16)]
COUNTED += [(torch.bfloat16, 4, torch.bfloat16), (PLANES, 4, torch.float32)]


@pytest.mark.parametrize(("state", "length", "activations"), COUNTED)
def test_counted_bytes_are_those_of_the_model(
    state: torch.dtype | str, length: int, activations: torch.dtype
) -> None:
    """A step without a flush reads half of a float32 state; a flush reads and writes it once."""
    counted, parameters = interpreted(measure_rows, state, length, HISTORIES, activations)
    dtype = torch.float32 if state == PLANES else state
    for found, (n_hist, n_flush) in zip(counted, HISTORIES, strict=True):
        assert found == step_bytes(GROUP, dtype, length, n_hist, n_flush > 0, activations)
    assert set(parameters.values()) == {2 * 4}


@pytest.mark.parametrize(("drafts", "at_least"), [(3, 6.4), (5, 8.3)])
def test_a_fifth_of_the_bytes_of_slots(drafts: int, at_least: float) -> None:
    """Nemotron-3-Nano, float32 states, three of four drafts accepted, flushes by the rule."""
    tokens, inner = 1 + drafts, 8 * 64
    inputs, outputs = tokens * 2 * (inner + 8 + 2 * 128), tokens * 2 * inner
    slots = {
        "state": (1 + tokens) * inner * 128 * 4,
        "ring": 0,
        "inputs": inputs,
        "outputs": outputs,
    }
    assert slots_bytes((8, 64, 128, 1), torch.float32, tokens) == slots
    found = mean_traffic(MODELS[NANO].state, torch.float32, drafts)
    assert found.slots == 8 * sum(slots.values()) and found.ratio > at_least > 5, found


@pytest.mark.parametrize(
    ("num_reqs", "lanes", "heads"), [(1023, 32, 1), (1024, 32, 8), (1025, 32, 8), (1024, 64, 1)]
)
def test_heads_share_a_program_where_enough_programs_are_left(
    num_reqs: int, lanes: int, heads: int
) -> None:
    sizes = (8, 36, 64), (1, 36, 128), 4, num_reqs, torch.int16, torch.bfloat16, True, lanes
    found = module.launch_constexprs(*sizes)
    assert (found["HEADS_PER_PROGRAM"], found["HISTORY"], found["TOKENS"]) == (
        heads,
        32,
        lanes // 4,
    )


# The configuration of a large batch.
test_compiles_without_spills_to_128_bit_accesses = compiled(
    "recompute", lambda case: case.shape == "Nemotron-3-Nano, K=3, 256 rows", least=lambda *_: 2
)


# ---- what is rejected ----


def arguments() -> dict[str, Any]:
    """Return the arguments of `recompute_update` as `flattened` names their parts."""
    run = Run(BASE.but(starts=(3, 4), groups=2, per_group=1, dtype=torch.bfloat16))
    x, dt, B, C = run.inputs(2)
    layer = {
        "x": x,
        "dt": dt,
        "dt_bias": run.dt_bias,
        "A_log": run.A_log,
        "B": B,
        "C": C,
        "D": run.D,
    }
    return (
        ring_and_step(run) | layer | {"ssm_state": run.state, "cu_seqlens": torch.tensor([0, 1, 2])}
    )


test_rejects_what_the_kernel_would_misread = rejections(
    arguments,
    flattened(recompute_update),
    special=[
        (
            "ssm_state",
            lambda t: t[:, 0],
            r"has shape \(\d+, 2, 3, 5\); it must be \(\d+, 2, 2, 3, 5\)",
        ),
        (
            "ssm_state",
            lambda t: read_states(t, torch.arange(len(t))),
            "ssm_state is torch.float32; it must be one of",
        ),
        ("ring.B", lambda t: t[:, :0], "0 groups of ring.B do not divide 2 heads"),
        (
            "ring.B",
            lambda t: torch.cat([t, t[:, :1]], 1),
            "3 groups of ring.B do not divide 2 heads",
        ),
        ("ring.x", lambda t: t[0], "ring.x has shape .* it must have 4 dimensions"),
        (
            "ring.dt",
            lambda t: t.bfloat16(),
            "ring.dt is torch.bfloat16; it must be one of torch.float32",
        ),
        ("step.max_query_len", lambda n: n + 1, "a ring of 11 tokens is too short for steps of 5"),
        ("x", lambda t: t.float(), "x is torch.float32; it must be one of torch.bfloat16"),
        ("step.n_flush", lambda t: t[:1], r"step.n_flush has shape \(1,\); it must be \(2,\)"),
        ("B", lambda t: t[:, :1], "must be"),
    ],
    allowed=["ssm_state, short", "step.rows, flat"],
)


def commit_arguments() -> dict[str, Any]:
    two, table = torch.ones(2, dtype=torch.int64), torch.ones(2, 3, dtype=torch.int32)
    ends = torch.tensor([0, 4, 8])
    batch = {
        "rows": two,
        "num_gained_tokens": two,
        "cu_seqlens": ends,
        "block_table": table,
        "block_size": 8,
    }
    return {"cursors": RecomputeCursors.allocate(2, 11, 4, CPU)} | batch


test_commit_rejects_what_the_kernel_would_misread = rejections(
    commit_arguments,
    commit,
    special=[
        ("cursors", lambda c: replace(c, prev_t=c.prev_t.int()), "cursors.prev_t is torch.int32"),
        ("block_size", lambda _: 3, "block_size=3 is shorter than a step of 4 tokens"),
        ("block_table", lambda t: t[0], "block_table has shape .* it must have 2 dimensions"),
    ],
    allowed=["rows, flat"],
)


def test_the_reference_of_commit_rejects_blocks_shorter_than_a_step() -> None:
    with pytest.raises(ValueError, match="block_size=3 is shorter than a step of 4 tokens"):
        commit_reference(**commit_arguments() | {"block_size": 3})


def test_a_ring_that_is_too_short_is_refused() -> None:
    with pytest.raises(ValueError, match="ring_len=10 is too short for steps of 4 tokens; use 11"):
        RecomputeCursors.allocate(1, 10, 4, CPU)


def test_rings_have_one_type_and_time_steps_a_wide_one() -> None:
    ring = RecomputeRing.allocate(2, 11, (4, 3), (2, 5), torch.bfloat16, CPU)
    assert (ring.x.shape, ring.B.shape, ring.dt.shape) == ((2, 4, 11, 3), (2, 2, 11, 5), (2, 4, 11))
    assert (ring.x.dtype, ring.B.dtype, ring.dt.dtype) == (
        torch.bfloat16,
        torch.bfloat16,
        torch.float32,
    )
    assert ring.ring_len == 11 and ring.nbytes == 2 * 11 * (4 * 3 * 2 + 2 * 5 * 2 + 4 * 4)
    assert (
        RecomputeRing.allocate(2, 11, (4, 3), (2, 5), torch.float64, CPU).dt.dtype == torch.float64
    )


@pytest.mark.gpu
@pytest.mark.parametrize("together", [True, False])
@pytest.mark.parametrize("state", [PLANES, torch.bfloat16])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_on_a_gpu(together: bool, state: torch.dtype | str, dtype: torch.dtype) -> None:
    sizes = {"block_size": 16, "groups": 8, "per_group": 8, "head_dim": 64, "size": 128, "gap": 16}
    case = BASE.but(starts=(16, 16, 5), steps=40, slack=25, state=state, dtype=dtype, **sizes)
    with patch.object(module, "SATURATED", 0 if together else 10**9):
        check_run(case, commit, recompute_update, torch.device("cuda"))

"""The block each row reads its state from, the blocks it writes, and what is copied afterwards."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import numpy.typing as npt
import pytest
import torch
from hypothesis import assume, given
from hypothesis import strategies as st
from hypothesis.strategies import DrawFn

from hybrid_kv.attention.mamba import (
    BoundaryCopies,
    MambaMetadata,
    MambaMetadataBuilder,
    boundary_copies,
    due_copies,
    postprocess_mamba,
)
from hybrid_kv.attention.rollback import RecomputeSpec
from hybrid_kv.cache.block_pool import NULL_BLOCK
from hybrid_kv.cache.spec import MambaSpec, SlotsSpec, window_and_states
from hybrid_kv.engine.state_cursor import StateCursor
from hybrid_kv.kernels.common.integers import cdiv
from hybrid_kv.kernels.common.upload import now
from hybrid_kv.kernels.recompute import default_ring_len
from hybrid_kv.kernels.ssd import CHUNK_BYTES
from tests.support.batches import common

Ints = npt.NDArray[np.int64]
Step = tuple[MambaSpec, list[tuple[int, int]], list[tuple[int, int]], list[int], list[int], int]

CPU = torch.device("cpu")
MAX_MODEL_LEN = 40
MODES = ("none", "align", "all")


def spec(mode: str = "all", k: int = 0, block_size: int = 4, kernel: int = 4) -> MambaSpec:
    return MambaSpec(
        block_size,
        window_and_states(((kernel - 1 + k, 1), torch.int64), ((1,), torch.int32)),
        mamba_cache_mode=mode,
        rollback=SlotsSpec(k),
    )


def ints(*values: int) -> Ints:
    return np.array(values, dtype=np.int64)


def due(subject: MambaSpec, computed: Ints, lengths: Ints, accepted: Ints) -> BoundaryCopies:
    state_block_idx = StateCursor(0, subject).next_state_block_idx(computed, lengths)
    copies = BoundaryCopies(
        *map(torch.from_numpy, boundary_copies(subject, computed, lengths, state_block_idx))
    )
    return due_copies(copies, torch.from_numpy(accepted - 1))


def table_of(rows: int, width: int, padding: int = 0) -> torch.Tensor:
    """Row i has the ids 1000 * (i + 1) + logical block; padding rows hold the null block."""
    table = 1000 * (torch.arange(rows)[:, None] + 1) + torch.arange(width)
    return torch.cat([table, torch.full((padding, width), NULL_BLOCK)]).int()


def build(
    subject: MambaSpec,
    builder: MambaMetadataBuilder,
    rows: list[tuple[int, int]],
    num_decodes: int,
    prev: Sequence[int],
    accepted: Sequence[int],
    padding: int = 0,
) -> MambaMetadata:
    """`rows`: tokens computed before and new ones, of each."""
    computed, lens = map(list, zip(*rows, strict=True))
    width = subject.block_table_width(MAX_MODEL_LEN)
    batch = common(computed, lens, num_decodes, padding)
    table = table_of(len(lens), width, padding)
    prev, accepted = ints(*prev, *[0] * padding), ints(*accepted, *[1] * padding)
    state_block_idx = StateCursor(0, subject).next_state_block_idx(
        batch.num_computed_tokens, batch.query_lens
    )
    return now(CPU, builder.build(batch, table, state_block_idx, prev, accepted - 1))


@st.composite
def steps(draw: DrawFn) -> Step:
    """A step of any mode: decodes with drafts, prefills, and padding if there are no prefills."""
    mode, k = draw(st.sampled_from(MODES)), draw(st.integers(0, 3))
    subject = spec(mode, k, draw(st.integers(1 + k, 7)))
    decodes = draw(
        st.lists(
            st.integers(1, MAX_MODEL_LEN - 1 - k).flatmap(
                lambda n: st.tuples(st.just(n), st.integers(1, 1 + k))
            ),
            max_size=3,
        )
    )
    prefills = draw(
        st.lists(
            st.integers(0, MAX_MODEL_LEN - 1).flatmap(
                lambda n: st.tuples(st.just(n), st.integers(1, MAX_MODEL_LEN - n))
            ),
            max_size=3,
        )
    )
    assume(decodes or prefills)
    logical_blocks = 1 if mode == "none" else cdiv(MAX_MODEL_LEN, subject.block_size)
    rows = len(decodes) + len(prefills)
    prev = draw(st.lists(st.integers(0, logical_blocks - 1), min_size=rows, max_size=rows))
    accepted = draw(st.lists(st.integers(1, 1 + k), min_size=rows, max_size=rows))
    padding = 0 if prefills else draw(st.integers(0, 3))
    return subject, decodes, prefills, prev, accepted, padding


@given(steps(), st.booleans())
def test_every_row_reads_and_writes_its_own_logical_blocks(step: Step, launches: bool) -> None:
    subject, decodes, prefills, prev, accepted, padding = step
    batch = [*decodes, *prefills]
    builder = MambaMetadataBuilder(subject, 6, CPU, launches)
    for buffer in (builder.blocks, builder.window_rows):
        buffer.fill_(-7)  # what a longer step left there
    metadata = build(subject, builder, batch, len(decodes), prev, accepted, padding)
    assert (metadata.spans is not None) == (launches and bool(prefills))
    k, none = subject.num_speculative_blocks, subject.mamba_cache_mode == "none"
    windows, sources, states, boundaries = [], [], [], []
    for i, (n, q) in enumerate(batch):
        block = 1000 * (i + 1)
        state_block_idx = 0 if none else (n + q - 1) // subject.block_size
        written = q if i < len(decodes) else 1
        windows.append(block + prev[i])
        sources.append(block + prev[i] + accepted[i] - 1)
        states.append(
            [block + state_block_idx + j if j < written else NULL_BLOCK for j in range(1 + k)]
        )
        if i >= len(decodes) and subject.mamba_cache_mode == "all":
            boundaries += [
                (i - len(decodes), end - n, block + end // subject.block_size - 1)
                for end in range(n + 1, n + q)
                if end % subject.block_size == 0
            ]
    assert metadata.window_indices.tolist() == windows + [NULL_BLOCK] * padding
    assert metadata.source_indices.tolist() == sources + [NULL_BLOCK] * padding
    assert metadata.state_indices.tolist() == states + [[NULL_BLOCK] * (1 + k)] * padding
    assert metadata.window_rows.tolist() == [count - 1 for count in accepted] + [0] * padding
    assert metadata.num_decodes == len(decodes) + padding
    assert metadata.num_decode_tokens == sum(q for _, q in decodes) + padding
    check_decodes(metadata, subject, [q for _, q in decodes] + [1] * padding)
    check_prefills(metadata, prefills, states[len(decodes) :], boundaries)


def check_decodes(metadata: MambaMetadata, subject: MambaSpec, lengths: list[int]) -> None:
    if not lengths:
        assert metadata.decode_rows is None
        return
    assert metadata.decode_rows.lengths.tolist() == lengths
    assert metadata.cu_seqlens.tolist() == np.cumsum([0, *lengths]).tolist()
    # Kernels read the first logical block alone, and take the number of logical blocks for that
    # of tokens.
    first_blocks = metadata.state_indices[: len(lengths), 0]
    assert metadata.window_targets[:, 0].tolist() == first_blocks.tolist()
    assert metadata.window_targets.shape == (len(lengths), 1 + subject.num_speculative_tokens)


def check_prefills(
    metadata: MambaMetadata,
    prefills: list[tuple[int, int]],
    states: list[list[int]],
    boundaries: list[tuple[int, int, int]],
) -> None:
    """`boundaries` are (row, offset, block) of the states inside of the prefills."""
    if not prefills:
        assert metadata.prefill_rows is metadata.has_initial_state is None
        assert metadata.boundaries is None
        return
    assert metadata.prefill_rows.lengths.tolist() == [q for _, q in prefills]
    assert metadata.has_initial_state.tolist() == [n > 0 for n, _ in prefills]
    ends = [(row, q, states[row][0]) for row, (_, q) in enumerate(prefills)]
    left = sorted(boundaries + ends)
    assert sorted(rows_of(metadata.prefill_states)) == left
    if metadata.spans is not None:
        starts = np.cumsum([0, *(q for _, q in prefills)]).tolist()
        cuts = [0, *(starts[row] + offset for row, offset, _ in left)]
        assert metadata.spans.cu_spans.tolist() == cuts
        assert metadata.spans.span_blocks.tolist() == [block for _, _, block in left]
        assert metadata.spans.cu_seqlens.tolist() == starts
        assert metadata.spans.chunk_size == CHUNK_BYTES // torch.int64.itemsize
    if boundaries:
        assert rows_of(metadata.boundaries) == boundaries
    else:
        assert metadata.boundaries is None


def rows_of(columns: Iterable[torch.Tensor]) -> list[tuple[int, ...]]:
    return list(zip(*(column.tolist() for column in columns), strict=True))


def test_a_recomputed_row_reads_its_checkpoint_whatever_was_accepted() -> None:
    subject = replace(spec("all", 2), rollback=RecomputeSpec(2, default_ring_len(3)))
    builder = MambaMetadataBuilder(subject, 6, CPU, launches=False)
    metadata = build(subject, builder, [(9, 3), (5, 1)], 2, [1, 0], [3, 1])
    assert metadata.source_indices.tolist() == metadata.window_indices.tolist() == [1001, 2000]
    assert metadata.window_targets.tolist() == [[1002] * 3, [2001] * 3]


@given(
    st.integers(1, 4),
    st.integers(0, 3),
    st.integers(1, 8),
    st.lists(st.tuples(*[st.integers(0, 7)] * 2), min_size=1),
)
def test_windows_are_where_accepted_drafts_left_them(
    size: int, more: int, num_blocks: int, places: list[tuple[int, int]]
) -> None:
    conv_state = torch.arange(num_blocks * (size + more) * 2.0).view(num_blocks, size + more, 2)
    blocks, firsts = (
        [place[i] % most for place in places] for i, most in enumerate((num_blocks, more + 1))
    )
    held = SimpleNamespace(
        window_indices=torch.tensor(blocks), window_rows=torch.tensor(firsts), plans={}
    )
    # The second time from what the first one has noted, which is of no use to a state with other
    # channels.
    for state in (conv_state, conv_state, conv_state.flatten(1)[:, : size + more, None]):
        expected = [
            state[block, first : first + size] for block, first in zip(blocks, firsts, strict=True)
        ]
        assert torch.equal(MambaMetadata.windows(held, state, size), torch.stack(expected))


def test_metadata_is_built_again_when_something_changes_and_only_then() -> None:
    subject = spec(k=1, block_size=4)
    builder = MambaMetadataBuilder(subject, 4, CPU, launches=False)
    table = table_of(2, subject.block_table_width(MAX_MODEL_LEN))

    def built(
        computed: Sequence[int] = (8, 9),
        lens: Sequence[int] = (1, 1),
        prev: Sequence[int] = (1, 2),
        accepted: Sequence[int] = (1, 1),
        num_gathers: int | None = 1,
        num_decodes: int = 2,
    ) -> MambaMetadata:
        batch = common(list(computed), list(lens), num_decodes)
        state_block_idx = StateCursor(0, subject).next_state_block_idx(
            batch.num_computed_tokens, batch.query_lens
        )
        before = ints(*prev), ints(*accepted) - 1
        return now(
            CPU, builder.build(batch, table, state_block_idx, *before, num_gathers=num_gathers)
        )

    first = built()
    assert built() is first
    # Further on in the same block nothing of it differs.
    assert built(computed=(9, 10)) is first
    changes = (
        {"computed": (8, 12)},
        {"lens": (2, 1)},
        {"prev": (2, 2)},
        {"accepted": (2, 1)},
        {"num_gathers": 2},
        {"num_gathers": None},
        {"num_decodes": 1},
    )
    for change in changes:
        assert built() is built()
        other = built(**change)
        # The buffers are shared: what was built before is no more.
        assert other is not first and built() is not first, change
        first = built()
        assert first.source_indices.tolist() == [1001, 2002] and first.state_indices.tolist() == [
            [1002, 0],
            [2002, 0],
        ]
    table[0, 2] = 77
    assert built(num_gathers=2).state_indices.tolist() == [[77, 0], [2002, 0]]


@pytest.mark.parametrize("mode", MODES)
@given(data=st.data())
def test_exactly_the_accepted_boundary_states_are_copied_home(
    mode: str, data: st.DataObject
) -> None:
    """A state on a boundary is copied to the boundary's block.

    Token j leaves its state in logical block `current state block + j`.
    """
    k = data.draw(st.integers(0, 4))
    block_size = data.draw(st.integers(1 + k, 7))
    rows = data.draw(
        st.lists(st.tuples(st.integers(1, 40), st.integers(0, k), st.integers(0, k)), max_size=5)
    )
    computed = ints(*(n for n, _, _ in rows))
    lengths = ints(*(1 + drafts for _, drafts, _ in rows))
    accepted = ints(*(1 + min(drafts, good) for _, drafts, good in rows))
    copies = due(spec(mode, k, block_size), computed, lengths, accepted)
    expected = []
    for i, (n, q, a) in enumerate(
        zip(computed.tolist(), lengths.tolist(), accepted.tolist(), strict=True)
    ):
        state_block_idx = (n + q - 1) // block_size
        for j in range(a):
            home = (n + j + 1) // block_size - 1
            if (n + j + 1) % block_size == 0 and state_block_idx + j != home:
                expected.append((i, state_block_idx, j, home))
    got = zip(*(part.tolist() for part in copies), strict=True)
    # The block of a boundary whose draft is rejected is copied to itself.
    real = [(i, block, j, home) for i, block, j, home in got if block + j != home]
    assert real == ([] if mode == "none" else expected)


@pytest.mark.parametrize("mode", ["align", "all"])
@given(data=st.data())
def test_home_gets_the_shifted_window_and_the_state_and_nothing_else_changes(
    mode: str, data: st.DataObject
) -> None:
    k, kernel = data.draw(st.integers(1, 3)), data.draw(st.integers(2, 4))
    subject = spec(mode, k, data.draw(st.integers(1 + k, 5)), kernel)
    rows = data.draw(
        st.lists(
            st.tuples(st.integers(1, 12), st.integers(0, k), st.integers(0, k)),
            min_size=1,
            max_size=3,
        )
    )
    computed = ints(*(n for n, _, _ in rows))
    lengths = ints(*(1 + drafts for _, drafts, _ in rows))
    accepted = ints(*(1 + min(drafts, good) for _, drafts, good in rows))
    width = subject.block_table_width(17)
    order = np.random.default_rng(data.draw(st.integers(0, 99))).permutation(
        np.arange(1, 1 + len(rows) * width)
    )
    table = torch.from_numpy(order).view(len(rows), width).int()
    num_blocks = 1 + table.numel()
    layers = [
        (
            torch.arange(num_blocks * (kernel - 1 + k)).view(num_blocks, -1, 1) + 10_000 * layer,
            torch.arange(num_blocks)[:, None] + 10_000 * layer,
        )
        for layer in (1, 2)
    ]
    expected = [(window.clone(), state.clone()) for window, state in layers]
    for i, (n, q, a) in enumerate(
        zip(computed.tolist(), lengths.tolist(), accepted.tolist(), strict=True)
    ):
        state_block_idx = (n + q - 1) // subject.block_size
        for j in range(a):
            home = (n + j + 1) // subject.block_size - 1
            if (n + j + 1) % subject.block_size == 0 and state_block_idx + j != home:
                for (window, state), (old_window, old_state) in zip(expected, layers, strict=True):
                    window[table[i, home], : kernel - 1] = old_window[
                        table[i, state_block_idx], j : j + kernel - 1
                    ]
                    state[table[i, home]] = old_state[table[i, state_block_idx + j]]
    postprocess_mamba(
        due(subject, computed, lengths, accepted), table, layers, subject, copies_states=True
    )
    for (window, state), (right_window, right_state) in zip(layers, expected, strict=True):
        assert torch.equal(window, right_window)
        assert torch.equal(state, right_state)

"""Block tables, kept up to date step by step, against tables made from lists each time."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule

from hybrid_kv.cache.block_pool import NULL_BLOCK, BlockIds
from hybrid_kv.cache.block_table import BlockTables, LaunchedBlockTables
from hybrid_kv.kernels.slot_mapping import PAD_SLOT
from tests.kernels.definitions import kernel_blocks, slot
from tests.kernels.interpreter import interpreted

ROWS, WIDTHS, BPK = 5, [7, 3, 12], [1, 34, 4]
CPU = torch.device("cpu")
UNTOUCHED = -7


def make(
    rows: int = ROWS,
    widths: Sequence[int] = WIDTHS,
    bpk: Sequence[int] = BPK,
    tokens: int = 64,
    kind: type[BlockTables] = BlockTables,
    **options: Any,
) -> BlockTables:
    return kind([16 * n for n in bpk], [16] * len(bpk), rows, tokens, widths, CPU, **options)


def ids_of(*values: int) -> BlockIds:
    return np.array(values, dtype=np.int32)


def stage(
    tables: BlockTables, row: int, new: Sequence[Sequence[int]], overwrite: bool = False
) -> None:
    """`new`: per group the ids."""
    flat = ids_of(*(block for ids in new for block in ids))
    tables.append_block_ids(row, flat, array("i", [len(ids) for ids in new]), overwrite)


def update(
    tables: BlockTables,
    batch: Sequence[tuple[int, int, int]],
    padded: int | None = None,
    num_tokens_padded: int | None = None,
) -> tuple[list[torch.Tensor], torch.Tensor]:
    """`batch`: row, first position and number of tokens of each request."""
    rows, firsts, lens = (np.array(part, dtype=np.int64) for part in zip(*batch, strict=True))
    positions = np.concatenate(
        [np.arange(first, first + n) for first, n in zip(firsts, lens, strict=True)]
    )
    count = len(positions) if num_tokens_padded is None else num_tokens_padded
    return tables.update(rows, lens, torch.from_numpy(positions), padded or len(batch), count)


@dataclass(frozen=True)
class Shape:
    """Block sizes of each group: `bpk` kernel blocks a manager block, `kernel` tokens each."""

    widths: tuple[int, ...]
    bpk: tuple[int, ...]
    kernel: tuple[int, ...]
    slot_groups: tuple[int, ...]
    rows: int
    cp: tuple[int, int, int]


SHAPES = (
    Shape((7, 3, 12), (1, 34, 4), (16, 16, 4), (0, 1, 2), 5, (1, 0, 1)),
    # three Mamba groups in one stack
    Shape((9, 9, 9, 70), (1, 1, 1, 8), (8, 8, 8, 1), (3,), 6, (1, 0, 1)),
    Shape((70, 70), (2, 2), (4, 4), (0, 1), 4, (1, 0, 1)),
    Shape((4, 4, 6), (2, 2, 2), (6, 6, 6), (0, 1, 2), 4, (2, 1, 3)),
    Shape((20, 5), (3, 1), (5, 15), (0, 1), 3, (3, 0, 1)),
)


class Steps(RuleBasedStateMachine):
    """Requests come, grow, end, are preempted and resume, and run in any order and company."""

    @initialize(shape=st.sampled_from(SHAPES))
    def begin(self, shape: Shape) -> None:
        self.shape = shape
        sizes = [b * k for b, k in zip(shape.bpk, shape.kernel, strict=True)]
        tokens = 600
        cp = dict(zip(("cp_size", "cp_rank", "cp_interleave"), shape.cp, strict=True))
        self.tables = BlockTables(
            sizes,
            shape.kernel,
            shape.rows,
            tokens,
            shape.widths,
            CPU,
            slot_groups=shape.slot_groups,
            **cp,
        )
        self.held = {}  # row -> per group the ids
        self.staged = set()
        self.next_id = 1
        self.last_seen = None  # what readers saw in the step before, and its number of gathers

    def new_ids(self, data: st.DataObject, held: list[list[int]], most: int) -> list[list[int]]:
        new = []
        for blocks, width in zip(held, self.shape.widths, strict=True):
            count = data.draw(st.integers(0, min(most, width - len(blocks))))
            new.append(list(range(self.next_id, self.next_id + count)))
            self.next_id += count
        return new

    def stage(self, row: int, held: list[list[int]], new: list[list[int]], overwrite: bool) -> None:
        self.held[row] = [old + more for old, more in zip(held, new, strict=True)]
        self.staged.add(row)
        stage(self.tables, row, new, overwrite)

    @precondition(lambda self: len(set(self.held) | self.staged) < self.shape.rows)
    @rule(data=st.data(), most=st.sampled_from([1, 3, 70]))
    def start(self, data: st.DataObject, most: int) -> None:
        """A new request, or one that resumes: in any row that is free."""
        free = sorted(set(range(self.shape.rows)) - set(self.held) - self.staged)
        nothing = [[] for _ in self.shape.widths]
        self.stage(
            data.draw(st.sampled_from(free)),
            nothing,
            self.new_ids(data, nothing, most),
            overwrite=True,
        )

    @precondition(lambda self: set(self.held) - self.staged)
    @rule(data=st.data(), most=st.sampled_from([1, 1, 4, 40]))
    def grow(self, data: st.DataObject, most: int) -> None:
        row = data.draw(st.sampled_from(sorted(set(self.held) - self.staged)))
        self.stage(row, self.held[row], self.new_ids(data, self.held[row], most), overwrite=False)

    @precondition(lambda self: set(self.held) - self.staged)
    @rule(data=st.data())
    def replace(self, data: st.DataObject) -> None:
        """A request ends or is preempted, and before the next step another one has its row."""
        row = data.draw(st.sampled_from(sorted(set(self.held) - self.staged)))
        nothing = [[] for _ in self.shape.widths]
        self.stage(row, nothing, self.new_ids(data, nothing, 4), overwrite=True)

    @precondition(lambda self: set(self.held) - self.staged)
    @rule(data=st.data())
    def end(self, data: st.DataObject) -> None:
        del self.held[data.draw(st.sampled_from(sorted(set(self.held) - self.staged)))]

    @rule()
    def forget(self) -> None:
        self.tables.forget()
        for table in self.tables.input_tables:
            table.fill_(UNTOUCHED)

    @precondition(lambda self: self.held)
    @rule(data=st.data(), repeats=st.integers(1, 3))
    def step(self, data: st.DataObject, repeats: int) -> None:
        order = data.draw(st.permutations(sorted(self.held)))[
            : data.draw(st.integers(1, len(self.held)))
        ]
        padded = data.draw(st.integers(len(order), self.shape.rows))
        for _ in range(repeats):
            self.run(data, order, padded)

    def run(self, data: st.DataObject, order: list[int], padded: int) -> None:
        reach = max(
            w * b * k
            for w, b, k in zip(self.shape.widths, self.shape.bpk, self.shape.kernel, strict=True)
        )
        lens = data.draw(st.sampled_from([(1,), (1, 3), (64,), (1, 40)]))
        batch = [
            (
                row,
                data.draw(st.integers(0, reach * self.shape.cp[0] + 3)),
                data.draw(st.sampled_from(lens)),
            )
            for row in order
        ]
        num_tokens = sum(n for *_, n in batch)
        num_tokens_padded = num_tokens + data.draw(st.sampled_from([0, 1, 200]))
        tables, slots = update(self.tables, batch, padded, num_tokens_padded)
        self.staged.clear()
        seen = []
        for group, (table, width, bpk) in enumerate(
            zip(tables, self.shape.widths, self.shape.bpk, strict=True)
        ):
            assert table.shape == (padded, width * bpk)
            for position, row in enumerate(order):
                expected = kernel_blocks(self.held[row][group], bpk, bpk)
                assert table[position, : len(expected)].tolist() == expected, (group, row)
                seen.append(expected)
            assert not table[len(order) :].any()
        for group in range(len(self.shape.widths)):
            expected = [PAD_SLOT] * num_tokens_padded
            if group in self.shape.slot_groups:
                tokens = [
                    (row, position)
                    for row, first, n in batch
                    for position in range(first, first + n)
                ]
                width, size = (
                    self.shape.widths[group],
                    self.shape.bpk[group] * self.shape.kernel[group],
                )
                for i, (row, position) in enumerate(tokens):
                    blocks = (self.held[row][group] + [None] * width)[:width]
                    block_idx = position // (size * self.shape.cp[0])
                    known = block_idx >= width or blocks[block_idx] is not None
                    # A position without a block has the slot of what lies there, which no reader
                    # may use.
                    expected[i] = (
                        slot(blocks, position, size, *self.shape.cp)
                        if known
                        else int(slots[group, i])
                    )
            assert slots[group].tolist() == expected, group
        for row, groups in self.held.items():
            assert self.tables.num_blocks[row].tolist() == [len(ids) for ids in groups]
            for group, ids in enumerate(groups):
                assert self.tables.tables[group][row, : len(ids)].tolist() == ids
        if self.last_seen is not None and (padded, seen) != self.last_seen[0]:
            assert self.tables.num_gathers != self.last_seen[1]
        self.last_seen = (padded, seen), self.tables.num_gathers


TestSteps = Steps.TestCase
TestSteps.settings = settings(
    max_examples=settings.default.max_examples * 3 // 2, stateful_step_count=25
)


# ---- what does not change costs nothing ----


def written(
    tables: BlockTables, batch: Sequence[tuple[int, int, int]], padded: int | None = None
) -> tuple[list[int], int]:
    """How many entries of each input table, and how many slots, an update writes."""
    for table in (*tables.input_tables, tables.slot_mappings):
        table.fill_(UNTOUCHED)
    update(tables, batch, padded)
    *inputs, slots = (
        int((table != UNTOUCHED).sum()) for table in (*tables.input_tables, tables.slot_mappings)
    )
    return inputs, slots


def test_a_step_writes_what_changed() -> None:
    tables = make(rows=8, widths=[20, 20], bpk=[1, 4])
    for row in range(8):
        stage(tables, row, [[10 * row + i for i in range(1, 9)]] * 2, overwrite=True)
    decodes = [(row, 5, 1) for row in range(6)]
    assert written(tables, decodes) == ([6 * 8, 6 * 8 * 4], 2 * 6)
    assert written(tables, decodes) == ([0, 0], 12)
    for row in (1, 4):
        stage(tables, row, [[99], [98]])
    assert written(tables, decodes) == ([2, 2 * 4], 12), "one new block each"
    stage(tables, 2, [[97, 96], []])
    stage(tables, 7, [[95], [94]])
    assert written(tables, decodes) == ([2, 0], 12), "row 7 is not in the batch"
    assert written(tables, [decodes[1], decodes[0], *decodes[2:]]) == ([8 + 9, 4 * (8 + 9)], 12), (
        "two rows swapped"
    )
    stage(tables, 5, [[93], [92]], overwrite=True)
    assert written(tables, [decodes[1], decodes[0], *decodes[2:]]) == ([1, 4], 12), "a new owner"
    assert written(tables, [decodes[1], *decodes[2:5]], 6) == (
        [10 + 8 + 9 + 2 * 20, 4 * (8 + 8 + 9 + 2 * 20)],
        8,
    ), "a request ends: three move up, and two positions become padding"
    assert written(tables, [decodes[1], *decodes[2:5]], 6) == ([0, 0], 8)


@pytest.mark.parametrize("kind", [BlockTables, LaunchedBlockTables])
def test_num_gathers_changes_when_an_input_table_may_and_only_then(kind: type[BlockTables]) -> None:
    interpreted(check_gathers, kind)


def check_gathers(kind: type[BlockTables]) -> None:
    tables = make(kind=kind)
    for row in (0, 1):
        stage(tables, row, [[10 + row], [20 + row], [30 + row]], overwrite=True)

    def gathered(rows: list[int], padded: int) -> tuple[int, list[list[int]]]:
        found, _ = update(tables, [(row, 0, 1) for row in rows], padded)
        return tables.num_gathers, [table[:, 0].tolist() for table in found]

    both = [[10, 11], [20 * 34, 21 * 34], [30 * 4, 31 * 4]]
    assert gathered([0, 1], 2) == (1, both)
    assert gathered([0, 1], 2) == (1, both)
    assert gathered([1, 0], 2) == (2, [part[::-1] for part in both])
    assert gathered([1], 2) == (3, [[part[1], NULL_BLOCK] for part in both])
    assert gathered([1], 1) == (4, [part[1:] for part in both])
    stage(tables, 1, [[12], [], []])
    assert gathered([1], 1)[0] == 5
    assert tables.input_tables[0][0, :2].tolist() == [11, 12]
    stage(tables, 1, [[13], [23], [33]], overwrite=True)
    assert gathered([1], 1) == (6, [[13], [23 * 34], [33 * 4]])


@pytest.mark.parametrize("kind", [BlockTables, LaunchedBlockTables])
def test_host_and_launch_take_the_same_step(kind: type[BlockTables]) -> None:
    interpreted(check_a_step, kind)


def check_a_step(kind: type[BlockTables]) -> None:
    tables = make(kind=kind)
    for row in (0, 1, 2, 3, 4, 0, 1):  # more than are staged at once
        stage(tables, row, [[10 + row], [20 + row], [30 + row]], overwrite=True)
    found, slots = update(tables, [(1, 3, 2), (0, 5, 1)], 3)
    assert [table[:, 0].tolist() for table in found] == [
        [11, 10, 0],
        [21 * 34, 20 * 34, 0],
        [31 * 4, 30 * 4, 0],
    ]
    assert slots[0, :3].tolist() == [11 * 16 + 3, 11 * 16 + 4, 10 * 16 + 5]


# ---- one thing at a time ----


def test_input_tables_keep_their_address() -> None:
    tables = make()
    before = [table.data_ptr() for table in (*tables.input_tables, tables.slot_mappings)]
    stage(tables, 1, [[3], [4], [5]], overwrite=True)
    gathered, slots = update(tables, [(1, 0, 1)], 2, 2)
    assert [table.data_ptr() for table in (*gathered, slots)] == before


def test_a_full_staging_buffer_is_written_early() -> None:
    tables = make(rows=2, widths=[4], bpk=[2])
    for _ in range(3):  # 3 x 2 x 4 ids for a buffer of 8
        for row in range(2):
            stage(tables, row, [[10 * row + i for i in range(1, 5)]], overwrite=True)
    update(tables, [(0, 0, 1)])
    assert tables.tables[0].tolist() == [[1, 2, 3, 4], [11, 12, 13, 14]]


def test_a_row_beyond_the_staging_buffer_is_written_early() -> None:
    tables = make(rows=1, widths=[9, 9], bpk=[1, 1])
    for block in range(1, 10):  # one row a call, for room for one
        stage(tables, 0, [[block], [block + 10]])
    (first, second), _ = update(tables, [(0, 0, 1)])
    assert tables.tables[0].tolist() == first.tolist() == [list(range(1, 10))]
    assert tables.tables[1].tolist() == second.tolist() == [list(range(11, 20))]


def test_too_many_blocks_for_the_row_raise() -> None:
    tables = make(rows=2, widths=[2, 3], bpk=[1, 2])
    stage(tables, 0, [[1, 2], [3]], overwrite=True)
    update(tables, [(0, 0, 1)])
    stage(tables, 1, [[5, 4], [6, 7, 8]], overwrite=True)
    stage(tables, 0, [[9], [10, 11, 12, 13]])
    with pytest.raises(IndexError, match="group 0 row 0: 3 blocks exceed the width 2"):
        update(tables, [(0, 0, 1)])
    assert tables.num_blocks.tolist() == [[2, 1], [0, 0]]  # a rejected step leaves nothing behind
    assert tables.tables[0].tolist() == [[1, 2], [0, 0]]
    assert update(tables, [(0, 0, 1)])[0][1].tolist() == [[6, 7, 0, 0, 0, 0]]


@pytest.mark.gpu
def test_tables_on_a_gpu_follow_those_of_the_host() -> None:
    here = make()
    there = BlockTables(
        [16 * n for n in BPK], [16] * len(BPK), ROWS, 64, WIDTHS, torch.device("cuda")
    )
    for step in range(3):
        for tables in (here, there):
            stage(tables, step, [[5 + step], [6, 7 + step], [8]], overwrite=True)
        rows, lens = np.arange(step + 1), np.full(step + 1, 2)
        positions = torch.arange(2 * (step + 1)) % 2
        found, wanted = (tables.update(rows, lens, positions, ROWS, 20) for tables in (there, here))
        for got, expected in zip(
            (*found[0], found[1], *there.tables), (*wanted[0], wanted[1], *here.tables), strict=True
        ):
            assert torch.equal(got.cpu(), expected)


def test_impossible_shapes_are_rejected() -> None:
    with pytest.raises(ValueError, match="does not divide"):
        BlockTables([24], [16], 1, 1, [1], CPU)
    with pytest.raises(ValueError, match="one entry per group"):
        BlockTables([16], [16], 1, 1, [1, 2], CPU)
    assert BlockTables([16], [16], 1, 1, [1], torch.device("meta")).tables[0].is_meta

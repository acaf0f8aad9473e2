"""Block tables against plain lists."""

from array import array

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from hybrid_kv.cache.block_pool import NULL_BLOCK
from hybrid_kv.cache.block_table import BlockTables
from hybrid_kv.kernels.kernel_blocks import expand_list
from hybrid_kv.kernels.slot_mapping import PAD_SLOT

ROWS, WIDTHS, BPK = 5, [7, 3, 12], [1, 34, 4]
CPU = torch.device("cpu")


def make(rows=ROWS, widths=WIDTHS, bpk=BPK, tokens=64, **cp):
    return BlockTables([16 * n for n in bpk], [16] * len(bpk), rows, tokens, widths, CPU, **cp)


def ids_of(*values):
    return np.array(values, dtype=np.int32)


def stage(tables, row, new, overwrite=False):
    """`new`: per group the ids."""
    flat = ids_of(*(block for ids in new for block in ids))
    tables.append_block_ids(row, flat, array("i", [len(ids) for ids in new]), overwrite)


@settings(max_examples=150, deadline=None)
@given(st.data())
def test_random_steps_match_lists(data):
    tables = make()
    model = {}  # row -> per group the ids
    next_id = 1
    for _ in range(data.draw(st.integers(1, 8))):
        batch = data.draw(st.permutations(range(ROWS)))[: data.draw(st.integers(1, ROWS))]
        for row in batch:
            fresh = row not in model or data.draw(st.booleans())
            held = [[] for _ in WIDTHS] if fresh else model[row]
            new = []
            for group, width in enumerate(WIDTHS):
                count = data.draw(st.integers(0, min(4, width - len(held[group]))))
                new.append(list(range(next_id, next_id + count)))
                next_id += count
            model[row] = [old + more for old, more in zip(held, new, strict=True)]
            stage(tables, row, new, overwrite=fresh)
        tables.apply_staged_writes()
        # The step's batch is any order of any running rows: rows swap places between steps.
        order = data.draw(st.permutations(sorted(model)))[: data.draw(st.integers(1, len(model)))]
        padded = data.draw(st.integers(len(order), ROWS))
        gathered = tables.gather_block_tables(np.array(order, dtype=np.int64), padded, WIDTHS)
        for group, table in enumerate(gathered):
            assert table.shape == (padded, WIDTHS[group] * BPK[group])
            for position, row in enumerate(order):
                expected = expand_list(model[row][group], BPK[group])
                assert table[position, : len(expected)].tolist() == expected, (group, row)
            assert not table[len(order) :].any()
    for row, groups in model.items():
        assert tables.num_blocks[row].tolist() == [len(ids) for ids in groups]


def test_vllm_38831_each_group_has_kernel_blocks_of_its_own_size():
    """A kernel of 16-token blocks must find a 544-token manager block as 34 of them, and slots must not move."""
    tables = make(widths=[2, 2, 2], bpk=[1, 34, 4])
    stage(tables, 0, [[3, 5], [3, 5], [3, 5]])
    tables.apply_staged_writes()
    gathered = tables.gather_block_tables(np.array([0]), 1, [2, 2, 2])
    assert [table.shape[1] for table in gathered] == [2, 68, 8]
    assert gathered[0][0].tolist() == [3, 5]
    assert gathered[1][0].tolist() == [*range(3 * 34, 4 * 34), *range(5 * 34, 6 * 34)]
    assert gathered[2][0].tolist() == [12, 13, 14, 15, 20, 21, 22, 23]
    positions = torch.tensor([0, 15, 16])
    slots = tables.compute_slot_mappings(torch.zeros(3, dtype=torch.int64), positions, 3, [0, 1, 2])
    for group, table in enumerate(gathered):
        # Through the kernel's blocks and through the manager's a token has one slot.
        through_kernel_blocks = table[0].long()[positions // 16] * 16 + positions % 16
        assert slots[group].tolist() == through_kernel_blocks.tolist()


def test_tables_are_gathered_again_when_something_changes_and_only_then():
    tables = make()
    for row in (0, 1):
        stage(tables, row, [[10 + row], [20 + row], [30 + row]], overwrite=True)

    def gathered(rows, padded, columns=(1, 1, 1)):
        tables.apply_staged_writes()
        found = tables.gather_block_tables(np.array(rows, dtype=np.int64), padded, columns)
        return tables.num_gathers, [table[:, 0].tolist() for table in found]

    both = [[10, 11], [20 * 34, 21 * 34], [30 * 4, 31 * 4]]
    assert gathered([0, 1], 2) == (1, both)
    assert gathered([0, 1], 2) == (1, both)
    assert gathered([1, 0], 2) == (2, [part[::-1] for part in both])
    assert gathered([1], 2) == (3, [[part[1], NULL_BLOCK] for part in both])
    assert gathered([1], 1) == (4, [part[1:] for part in both])
    assert gathered([1], 1, (2, 1, 1))[0] == 5
    stage(tables, 1, [[12], [], []])
    assert gathered([1], 1, (2, 1, 1))[0] == 6
    assert tables.input_tables[0][0, :2].tolist() == [11, 12]
    stage(tables, 1, [[13], [23], [33]], overwrite=True)
    assert gathered([1], 1, (2, 1, 1)) == (7, [[13], [23 * 34], [33 * 4]])


def test_input_tables_keep_their_address():
    tables = make()
    before = [table.data_ptr() for table in (*tables.input_tables, tables.slot_mappings)]
    stage(tables, 1, [[3], [4], [5]], overwrite=True)
    tables.apply_staged_writes()
    gathered = tables.gather_block_tables(np.array([1]), 2, WIDTHS)
    slots = tables.compute_slot_mappings(torch.tensor([1]), torch.tensor([0]), 2, [0])
    assert [table.data_ptr() for table in (*gathered, slots)] == before


def test_a_full_staging_buffer_is_written_early():
    tables = make(rows=2, widths=[4], bpk=[2])
    for _ in range(3):  # 3 x 2 x 4 ids for a buffer of 8
        for row in range(2):
            stage(tables, row, [[10 * row + i for i in range(1, 5)]], overwrite=True)
    tables.apply_staged_writes()
    assert tables.tables[0].tolist() == [[1, 2, 3, 4], [11, 12, 13, 14]]


def test_a_row_beyond_the_staging_buffer_is_written_early():
    tables = make(rows=1, widths=[9, 9], bpk=[1, 1])
    for block in range(1, 10):  # one row a call, for room for one
        stage(tables, 0, [[block], [block + 10]])
    tables.apply_staged_writes()
    assert tables.tables[0].tolist() == [list(range(1, 10))]
    assert tables.tables[1].tolist() == [list(range(11, 20))]


def test_a_row_staged_twice_raises():
    tables = make()
    stage(tables, 2, [[1], [], []], overwrite=True)
    stage(tables, 2, [[2], [], []])
    with pytest.raises(ValueError, match="staged twice"):
        tables.apply_staged_writes()


def test_too_many_blocks_for_the_row_raise():
    tables = make(rows=2, widths=[2, 3], bpk=[1, 2])
    stage(tables, 0, [[1, 2], [3]])
    tables.apply_staged_writes()
    stage(tables, 1, [[5], [6]], overwrite=True)
    stage(tables, 0, [[9], []])
    with pytest.raises(IndexError, match="group 0 row 0: 3 blocks exceed the width 2"):
        tables.apply_staged_writes()
    assert tables.num_blocks.tolist() == [[2, 1], [0, 0]]  # a refused step leaves nothing behind
    assert tables.tables[0].tolist() == [[1, 2], [0, 0]]


def test_ids_that_do_not_match_the_counts_raise():
    tables = make()
    tables.append_block_ids(0, ids_of(1), array("i", [2, 0, 0]))
    with pytest.raises(ValueError, match="1 block ids were staged for 2 columns"):
        tables.apply_staged_writes()


def test_slots_left_by_a_longer_step_become_pad():
    """vllm!36580."""
    tables = make()
    stage(tables, 0, [[3, 4], [1], [2]])
    tables.apply_staged_writes()
    tables.compute_slot_mappings(torch.zeros(20, dtype=torch.int64), torch.arange(20), 20, [0, 2])
    slots = tables.compute_slot_mappings(torch.zeros(3, dtype=torch.int64), torch.arange(17, 20), 8, [0, 2])
    assert slots[0].tolist() == [4 * 16 + 1, 4 * 16 + 2, 4 * 16 + 3] + [PAD_SLOT] * 5
    assert slots[2].tolist() == [2 * 64 + 17, 2 * 64 + 18, 2 * 64 + 19] + [PAD_SLOT] * 5
    assert slots[1].tolist() == [PAD_SLOT] * 8


def test_impossible_shapes_are_refused():
    with pytest.raises(ValueError, match="does not divide"):
        BlockTables([24], [16], 1, 1, [1], CPU)
    with pytest.raises(ValueError, match="one entry per group"):
        BlockTables([16], [16], 1, 1, [1, 2], CPU)

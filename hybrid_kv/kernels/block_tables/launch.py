"""Block tables of all groups in one launch per step.

Contract. `update_block_tables` does what `HostTables` does in three calls: it appends staged
manager block ids to the persistent tables, brings the batch's rows into the input tables as kernel
blocks, and maps the step's tokens to slots. One kernel, grid (groups, batch rows + staged requests
+ 1). The host computes no index, copies nothing back and waits for nothing: each program finds its
row's staged ids itself. No program reads a table entry that this launch writes (new ids come from
the staging buffer), and each has its own counters, so programs need no order among themselves.

An input row remembers which request's blocks it holds and how many. As long as a request keeps its
place in the batch only its new blocks are written, so a decode step writes a few bytes whatever the
context length.

Shapes considered. (a) One launch per group and stage (vLLM 0.32: write, gather, expansion and
slots, the expansion over the full width of every row each step): at 256 rows and a million tokens
of context 67 MB per step and group. (b) A host prefix sum over the staged counts: a few
microseconds of Python per step, and one more buffer to move. (c) A program looks for its row in the
list of staged rows, a vector compare of `max_num_reqs` elements from L2, and sums the counts before
it. This is (c).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from hybrid_kv.kernels.block_tables.tables import DeviceTables, StagedBlocks, StepBatch
from hybrid_kv.kernels.common.integers import next_power_of_2
from hybrid_kv.kernels.common.launch import check, jit
from hybrid_kv.kernels.slot_mapping import PAD_SLOT

if TYPE_CHECKING:
    import triton.language as tl

BLOCK = 512
# Differ from step to step: specialised on, they would compile the kernel again.
_COUNTS = ("num_staged", "num_reqs", "num_reqs_padded", "num_tokens", "num_tokens_padded")


def _block_tables(
    geometry: tl.tensor,
    tables: tl.tensor,
    input_tables: tl.tensor,
    num_blocks: tl.tensor,
    row_keys: tl.tensor,
    held_keys: tl.tensor,
    held_blocks: tl.tensor,
    slot_mappings: tl.tensor,
    slot_stride: tl.tensor,
    staged_ids: tl.tensor,
    staged_rows: tl.tensor,
    staged_counts: tl.tensor,
    staged_overwrite: tl.tensor,
    num_staged: tl.tensor,
    rows: tl.tensor,
    query_start_loc: tl.tensor,
    positions: tl.tensor,
    num_reqs: tl.tensor,
    num_reqs_padded: tl.tensor,
    num_tokens: tl.tensor,
    num_tokens_padded: tl.tensor,
    max_num_reqs: tl.tensor,
    NUM_GROUPS: tl.constexpr,
    ROWS: tl.constexpr,  # max_num_reqs, raised to a power of two
    BLOCKS_PER_KV_BLOCK: tl.constexpr,  # of all groups in which it is not 1; 0: they differ
    BLOCK_SIZE: tl.constexpr,  # of all groups with slots; 0: they differ
    CP_SIZE: tl.constexpr,
    CP_RANK: tl.constexpr,
    CP_INTERLEAVE: tl.constexpr,
    PAD: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    """Update a row of a group.

    Programs of axis 1, in order: batch rows, padding rows, staged requests, the slots of padding.
    """
    group = tl.program_id(0).to(tl.int64)
    index = tl.program_id(1)
    # No row starts on a vector boundary. With a hint Triton gives neighbours to neighbouring
    # threads; without one it gives each thread four of them, and sorts them through shared memory
    # on the way out.
    lanes = tl.max_contiguous(tl.arange(0, BLOCK), 1)
    slots = slot_mappings + group * slot_stride
    if index == num_reqs_padded + num_staged:
        for first in range(num_tokens, num_tokens_padded, BLOCK):
            tl.store(slots + first + lanes, PAD, mask=first + lanes < num_tokens_padded)
        return

    table_start = tl.load(geometry + group * 6)
    input_start = tl.load(geometry + group * 6 + 1)
    width = tl.load(geometry + group * 6 + 2).to(tl.int32)
    bpk = tl.load(geometry + group * 6 + 3).to(tl.int32)
    stride = tl.load(geometry + group * 6 + 4).to(tl.int32)
    block_size = tl.load(geometry + group * 6 + 5).to(tl.int32)
    position_cell = group * max_num_reqs + index
    out = input_tables + input_start + index.to(tl.int64) * (width * bpk)
    if (index >= num_reqs) & (index < num_reqs_padded):
        held_key = tl.load(held_keys + position_cell)
        tl.debug_barrier()
        if held_key >= 0:  # else it is a row of null blocks already
            for first in range(0, width * bpk, BLOCK):
                tl.store(out + first + lanes, 0, mask=first + lanes < width * bpk)
            tl.store(held_keys + position_cell, -1)
        return

    # A staged request that is in the batch is left to the program of its batch row.
    others = tl.arange(0, ROWS)
    in_batch = index < num_reqs
    row = tl.load(rows + index, mask=in_batch, other=-1)
    staged_row = tl.load(
        staged_rows + (index - num_reqs_padded), mask=index >= num_reqs_padded, other=-1
    )
    row = tl.where(in_batch, row, staged_row.to(tl.int64))
    batch_rows = tl.load(rows + others, mask=others < num_reqs, other=-1)
    if (index >= num_reqs_padded) & (tl.max((batch_rows == row).to(tl.int32), 0) > 0):
        return

    # What is staged for this row and group.
    candidates = tl.load(staged_rows + others, mask=others < num_staged, other=-1)
    entry = tl.max(tl.where(candidates == row, others, -1), 0)
    is_staged = entry >= 0
    cell = entry * NUM_GROUPS + group
    count = tl.load(staged_counts + cell, mask=is_staged, other=0)
    overwrite = tl.load(staged_overwrite + entry, mask=is_staged, other=0) != 0
    before = tl.zeros([BLOCK], dtype=tl.int32)
    for first in range(0, cell.to(tl.int32), BLOCK):
        before += tl.load(staged_counts + first + lanes, mask=first + lanes < cell, other=0)
    new_ids = staged_ids + tl.sum(before, 0)

    old = tl.load(num_blocks + row * NUM_GROUPS + group).to(tl.int32)
    old = tl.where(overwrite, 0, old)
    end = old + count
    key = tl.load(row_keys + group * max_num_reqs + row)
    key = tl.where(overwrite, key + max_num_reqs, key)
    held_key = tl.load(held_keys + position_cell, mask=in_batch, other=-1)
    held = tl.load(held_blocks + position_cell, mask=in_batch, other=0)
    held = tl.where(held_key == key, held, 0)
    # Every warp loads the counters and one of them stores them: none may be late.
    tl.debug_barrier()
    table = tables + table_start + row * width
    if is_staged:
        tl.store(num_blocks + row * NUM_GROUPS + group, end.to(tl.int64))
        tl.store(row_keys + group * max_num_reqs + row, key)
        for first in range(0, count, BLOCK):
            new = first + lanes
            tl.store(
                table + old + new,
                tl.load(new_ids + new, mask=new < count, other=0),
                mask=new < count,
            )

    if in_batch:
        tl.store(held_keys + position_cell, key)
        tl.store(held_blocks + position_cell, end)
        for first in range(held * bpk, end * bpk, BLOCK):
            kernel_column = first + lanes
            valid = kernel_column < end * bpk
            # A constant divisor costs three instructions, a loaded one twenty.
            column = kernel_column // (BLOCKS_PER_KV_BLOCK if BLOCKS_PER_KV_BLOCK else bpk)
            column = tl.where(bpk == 1, kernel_column, column)
            is_new = column >= old
            new_block = tl.load(new_ids + (column - old), mask=valid & is_new, other=0)
            block = tl.where(
                is_new, new_block, tl.load(table + column, mask=valid & (is_new == 0), other=0)
            )
            tl.store(
                out + kernel_column, block * stride + (kernel_column - column * bpk), mask=valid
            )

        if block_size > 0:
            end_token = tl.load(query_start_loc + index + 1)
            for first in range(tl.load(query_start_loc + index), end_token, BLOCK):
                token = first + lanes
                valid = token < end_token
                position = tl.load(positions + token, mask=valid, other=0).to(tl.int32)
                virtual = (BLOCK_SIZE if BLOCK_SIZE else block_size) * CP_SIZE
                column = position // virtual
                offset = position - column * virtual
                inside = column < width
                is_new = (column >= old) & (column < end)
                new_block = tl.load(new_ids + (column - old), mask=valid & is_new, other=0)
                held_block = tl.load(table + column, mask=valid & inside & (is_new == 0), other=0)
                block = tl.where(is_new, new_block, held_block)
                if CP_SIZE > 1:
                    inside = inside & (offset // CP_INTERLEAVE % CP_SIZE == CP_RANK)
                    offset = (
                        offset // (CP_INTERLEAVE * CP_SIZE) * CP_INTERLEAVE + offset % CP_INTERLEAVE
                    )
                slot = tl.where(inside, block.to(tl.int64) * block_size + offset, PAD)
                tl.store(slots + token, slot, mask=valid)


def check_update(tables: DeviceTables, staged: StagedBlocks, batch: StepBatch) -> None:
    """Check that `update_block_tables` may be launched with these.

    Raises:
        ValueError: a tensor has another shape, dtype or device, or gaps; or more rows or tokens
            than fit.
    """
    device = tables.flat_tables.device
    num_staged = staged.rows.numel()
    num_reqs = batch.rows.numel()
    num_tokens = batch.positions.numel()
    check("staged.ids", staged.ids, (staged.ids.numel(),), (torch.int32,), device)
    check(
        "staged.rows", staged.rows, (min(num_staged, tables.max_num_reqs),), (torch.int32,), device
    )
    check("staged.counts", staged.counts, (num_staged, len(tables.layouts)), (torch.int32,), device)
    check(
        "staged.overwrite", staged.overwrite.view(torch.int8), (num_staged,), (torch.int8,), device
    )
    check("batch.rows", batch.rows, (min(num_reqs, batch.num_reqs_padded),), (torch.int64,), device)
    check("batch.query_start_loc", batch.query_start_loc, (num_reqs + 1,), (torch.int32,), device)
    check(
        "batch.positions",
        batch.positions,
        (min(num_tokens, batch.num_tokens_padded),),
        (torch.int64,),
        device,
    )
    if (
        batch.num_reqs_padded > tables.max_num_reqs
        or batch.num_tokens_padded > tables.slot_mappings.shape[1]
    ):
        raise ValueError(
            f"{batch.num_reqs_padded} rows and {batch.num_tokens_padded} tokens exceed the tables' "
            f"{tables.max_num_reqs} and {tables.slot_mappings.shape[1]}"
        )


def update_block_tables(tables: DeviceTables, staged: StagedBlocks, batch: StepBatch) -> None:
    """Append staged ids, bring the batch into the input tables, map tokens to slots: one launch.

    The caller guarantees that no row becomes longer than its group's width and that `counts` sum to
    the number of ids; to check it here the host would have to wait. A batch of no rows only
    appends.

    Raises:
        ValueError: see `check_update`.
    """
    check_update(tables, staged, batch)
    num_groups = len(tables.layouts)
    num_staged = staged.rows.numel()
    num_reqs = batch.rows.numel()
    num_tokens = batch.positions.numel()
    cp_size, cp_rank, cp_interleave = tables.cp
    jit(_block_tables, _COUNTS)[num_groups, batch.num_reqs_padded + num_staged + 1](
        *(tables.geometry, tables.flat_tables, tables.flat_input_tables, tables.num_blocks),
        *(tables.row_keys, tables.held_keys, tables.held_blocks),
        *(tables.slot_mappings, tables.slot_mappings.stride(0)),
        *(staged.ids, staged.rows, staged.counts, staged.overwrite.view(torch.int8), num_staged),
        *(batch.rows, batch.query_start_loc, batch.positions),
        *(
            num_reqs,
            batch.num_reqs_padded,
            num_tokens,
            batch.num_tokens_padded,
            tables.max_num_reqs,
        ),
        NUM_GROUPS=num_groups,
        ROWS=next_power_of_2(tables.max_num_reqs),
        BLOCKS_PER_KV_BLOCK=tables.common_blocks_per_kv_block,
        BLOCK_SIZE=tables.common_block_size,
        CP_SIZE=cp_size,
        CP_RANK=cp_rank,
        CP_INTERLEAVE=cp_interleave,
        PAD=PAD_SLOT,
        BLOCK=BLOCK,
        num_warps=4,
        num_stages=1,
    )

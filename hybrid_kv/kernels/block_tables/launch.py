"""Block tables of all groups in one launch per step.

Contract. `update_block_tables` does what `cache.block_table.BlockTables` does in three calls: it appends staged manager
block ids to the persistent tables, brings the batch's rows into the input tables as kernel blocks, and maps the step's
tokens to slots. One kernel, grid (groups, batch rows + staged requests + 1). The host computes no index, copies nothing
back and waits for nothing: each program finds its row's staged ids itself. No program reads a table entry that this
launch writes (new ids come from the staging buffer), and each has its own counters, so programs need no order among
themselves. `update_block_tables_reference` is the same in plain torch.

An input row remembers which request's blocks it holds and how many. As long as a request keeps its place in the batch
only its new blocks are written, so a decode step writes a few bytes whatever the context length.

Shapes considered. (a) One launch per group and stage (vLLM 0.32: write, gather, expansion and slots, the expansion over
the full width of every row each step): at 256 rows and a million tokens of context 67 MB per step and group. (b) A host
prefix sum over the staged counts: a few microseconds of Python per step, and one more buffer to move. (c) A program
looks for its row in the list of staged rows, a vector compare of `max_num_reqs` elements from L2, and sums the counts
before it. This is (c).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from hybrid_kv.kernels.common.integers import next_power_of_2
from hybrid_kv.kernels.common.launch import AotCase, check, jit
from hybrid_kv.kernels.kernel_blocks import gather_kernel_blocks
from hybrid_kv.kernels.slot_mapping import PAD_SLOT, slot_mapping

if TYPE_CHECKING:
    import triton.language as tl

BLOCK = 512
NUM_WARPS = 4
_COUNTS = ("num_staged", "num_reqs", "num_reqs_padded", "num_tokens", "num_tokens_padded")


@dataclass(frozen=True)
class TableLayout:
    """The table of one group.

    Attributes:
        width: manager blocks of a row.
        block_size: tokens of a manager block.
        blocks_per_kv_block: kernel blocks of a manager block.
        kernel_block_stride: kernel blocks from one manager block to the next; more than `blocks_per_kv_block` where
            pages of other layers lie between. Slots do not know it: they count tokens of manager blocks.
        has_slots: attention; a Mamba group has no token slots.
    """

    width: int
    block_size: int
    blocks_per_kv_block: int
    kernel_block_stride: int
    has_slots: bool = True

    def __post_init__(self) -> None:
        if min(self.width, self.block_size, self.blocks_per_kv_block) < 1:
            raise ValueError(f"{self}: widths and sizes must be at least 1")
        if self.kernel_block_stride < self.blocks_per_kv_block:
            raise ValueError(f"{self}: manager blocks overlap; the stride must be at least blocks_per_kv_block")


class DeviceTables:
    """The persistent tensors of all groups; a captured graph reads them, so they keep their address.

    Args:
        layouts: one per group.
        max_num_reqs: rows of every table.
        max_num_batched_tokens: length of the slot mappings, padding included.
        cp_size, cp_rank, cp_interleave: context parallelism, see `kernels.slot_mapping`.

    Attributes:
        tables: per group [max_num_reqs, width] int32, manager blocks; views of one buffer.
        input_tables: per group [max_num_reqs, width * blocks_per_kv_block] int32, kernel blocks in batch order; views
            of one buffer. Columns beyond a row's own blocks hold stale ids.
        num_blocks: [max_num_reqs, num_groups] int64, manager blocks in each row of each table.
        slot_mappings: [num_groups, max_num_batched_tokens] int64.
    """

    def __init__(
        self,
        layouts: Sequence[TableLayout],
        max_num_reqs: int,
        max_num_batched_tokens: int,
        device: torch.device,
        cp_size: int = 1,
        cp_rank: int = 0,
        cp_interleave: int = 1,
    ) -> None:
        self.layouts = list(layouts)
        self.max_num_reqs = max_num_reqs
        self.cp = (cp_size, cp_rank, cp_interleave)
        num_groups = len(self.layouts)
        sizes = [max_num_reqs * layout.width for layout in self.layouts]
        input_sizes = [size * layout.blocks_per_kv_block for size, layout in zip(sizes, self.layouts, strict=True)]
        self.flat_tables = torch.zeros(sum(sizes), dtype=torch.int32, device=device)
        self.flat_input_tables = torch.zeros(sum(input_sizes), dtype=torch.int32, device=device)
        self.tables = [part.view(max_num_reqs, -1) for part in self.flat_tables.split(sizes)]
        self.input_tables = [part.view(max_num_reqs, -1) for part in self.flat_input_tables.split(input_sizes)]
        self.num_blocks = torch.zeros(max_num_reqs, num_groups, dtype=torch.int64, device=device)
        self.slot_mappings = torch.full(
            (num_groups, max_num_batched_tokens), PAD_SLOT, dtype=torch.int64, device=device
        )
        # [num_groups, 6] int64: what a program must know of its group. A block size of 0: no slots.
        fields = [
            [
                sum(sizes[:group]),
                sum(input_sizes[:group]),
                layout.width,
                layout.blocks_per_kv_block,
                layout.kernel_block_stride,
                layout.block_size if layout.has_slots else 0,
            ]
            for group, layout in enumerate(self.layouts)
        ]
        self.geometry = torch.tensor(fields, dtype=torch.int64, device=device)
        # [num_groups, max_num_reqs] each, one cell per program, so that no two programs share one. A row's key changes
        # when another request moves in: `row + max_num_reqs * (how many did)`.
        self.row_keys = torch.arange(max_num_reqs, device=device).repeat(num_groups, 1)
        self.held_keys = torch.full((num_groups, max_num_reqs), -1, dtype=torch.int64, device=device)
        self.held_blocks = torch.zeros(num_groups, max_num_reqs, dtype=torch.int32, device=device)
        # What the kernel divides by, if the groups agree; else 0.
        expanding = {layout.blocks_per_kv_block for layout in self.layouts} - {1} or {1}
        with_slots = {layout.block_size for layout in self.layouts if layout.has_slots} or {1}
        self.common_blocks_per_kv_block = expanding.pop() if len(expanding) == 1 else 0
        self.common_block_size = with_slots.pop() if len(with_slots) == 1 else 0


@dataclass(frozen=True)
class StagedBlocks:
    """New manager block ids of some requests, each row at most once, as `BlockTables.append_block_ids` stages them.

    Attributes:
        ids: [sum(counts)] int32, request by request, group by group.
        rows: [num_staged] int32, the row of each request.
        counts: [num_staged, num_groups] int32.
        overwrite: [num_staged] int8 or bool, the request is new in its row: it starts at column 0.
    """

    ids: torch.Tensor
    rows: torch.Tensor
    counts: torch.Tensor
    overwrite: torch.Tensor


@dataclass(frozen=True)
class StepBatch:
    """The rows of a step, without repetition and in batch order, and their tokens.

    Attributes:
        rows: [num_reqs] int64, row of each batch position.
        query_start_loc: [num_reqs + 1] int32, first token of each batch position, and the number of tokens.
        positions: [num_tokens] int64, of each token in its request.
        num_reqs_padded: batch positions up to here become rows of null blocks.
        num_tokens_padded: tokens up to here become `PAD_SLOT`, in all groups.
    """

    rows: torch.Tensor
    query_start_loc: torch.Tensor
    positions: torch.Tensor
    num_reqs_padded: int
    num_tokens_padded: int


def update_block_tables_reference(tables: DeviceTables, staged: StagedBlocks, batch: StepBatch) -> None:
    """`update_block_tables` in plain torch.

    Raises:
        IndexError: a row would become longer than its group's width.
    """
    first = 0
    for row, counts, overwrite in zip(staged.rows.tolist(), staged.counts.tolist(), staged.overwrite, strict=True):
        for group, count in enumerate(counts):
            start = 0 if overwrite else int(tables.num_blocks[row, group])
            if start + count > tables.layouts[group].width:
                raise IndexError(f"group {group} row {row}: {start + count} blocks exceed its width")
            tables.tables[group][row, start : start + count] = staged.ids[first : first + count]
            tables.num_blocks[row, group] = start + count
            first += count

    num_reqs, num_tokens = len(batch.rows), len(batch.positions)
    token_rows = batch.rows.repeat_interleave(batch.query_start_loc.diff())
    for group, layout in enumerate(tables.layouts):
        table, out, bpk = tables.tables[group], tables.input_tables[group], layout.blocks_per_kv_block
        offsets = torch.arange(bpk, dtype=torch.int32, device=table.device)
        gather_kernel_blocks(table, batch.rows, layout.width, offsets, out[:num_reqs])
        if layout.kernel_block_stride != bpk:
            out[:num_reqs] += out[:num_reqs] // bpk * (layout.kernel_block_stride - bpk)
        out[num_reqs : batch.num_reqs_padded] = 0
        if layout.has_slots:
            slots = slot_mapping(table, token_rows, batch.positions, layout.block_size, *tables.cp)
            tables.slot_mappings[group, :num_tokens] = slots
    tables.slot_mappings[:, num_tokens : batch.num_tokens_padded] = PAD_SLOT


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
    """Programs of axis 1, in order: batch rows, padding rows, staged requests, the slots of padding."""
    group = tl.program_id(0).to(tl.int64)
    index = tl.program_id(1)
    # No row starts on a vector boundary. Told so, Triton gives neighbours to neighbouring threads; otherwise it gives
    # each thread four of them, and sorts them through shared memory on the way out.
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
    staged_row = tl.load(staged_rows + (index - num_reqs_padded), mask=index >= num_reqs_padded, other=-1)
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
            tl.store(table + old + new, tl.load(new_ids + new, mask=new < count, other=0), mask=new < count)

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
            block = tl.where(is_new, new_block, tl.load(table + column, mask=valid & (is_new == 0), other=0))
            tl.store(out + kernel_column, block * stride + (kernel_column - column * bpk), mask=valid)

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
                    offset = offset // (CP_INTERLEAVE * CP_SIZE) * CP_INTERLEAVE + offset % CP_INTERLEAVE
                slot = tl.where(inside, block.to(tl.int64) * block_size + offset, PAD)
                tl.store(slots + token, slot, mask=valid)


def _kernel() -> Any:
    # Counts change from step to step: specialised on, each new divisibility would compile the kernel again.
    return jit(_block_tables, _COUNTS)


def update_block_tables(tables: DeviceTables, staged: StagedBlocks, batch: StepBatch) -> None:
    """Append staged ids, bring the batch into the input tables, map tokens to slots: one launch.

    The caller guarantees that no row becomes longer than its group's width and that `counts` sum to the number of ids;
    to check it here the host would have to wait. A batch of no rows only appends.

    Raises:
        ValueError: a tensor of another shape, dtype or device, or with gaps.
    """
    num_groups, device = len(tables.layouts), tables.flat_tables.device
    num_staged, num_reqs, num_tokens = staged.rows.numel(), batch.rows.numel(), batch.positions.numel()
    overwrite = staged.overwrite.view(torch.int8)
    check("staged.ids", staged.ids, (staged.ids.numel(),), (torch.int32,), device)
    check("staged.rows", staged.rows, (min(num_staged, tables.max_num_reqs),), (torch.int32,), device)
    check("staged.counts", staged.counts, (num_staged, num_groups), (torch.int32,), device)
    check("staged.overwrite", overwrite, (num_staged,), (torch.int8,), device)
    check("batch.rows", batch.rows, (min(num_reqs, batch.num_reqs_padded),), (torch.int64,), device)
    check("batch.query_start_loc", batch.query_start_loc, (num_reqs + 1,), (torch.int32,), device)
    check("batch.positions", batch.positions, (min(num_tokens, batch.num_tokens_padded),), (torch.int64,), device)
    if batch.num_reqs_padded > tables.max_num_reqs or batch.num_tokens_padded > tables.slot_mappings.shape[1]:
        raise ValueError(
            f"{batch.num_reqs_padded} rows and {batch.num_tokens_padded} tokens exceed the tables' "
            f"{tables.max_num_reqs} and {tables.slot_mappings.shape[1]}"
        )
    cp_size, cp_rank, cp_interleave = tables.cp
    _kernel()[num_groups, batch.num_reqs_padded + num_staged + 1](
        tables.geometry,
        tables.flat_tables,
        tables.flat_input_tables,
        tables.num_blocks,
        tables.row_keys,
        tables.held_keys,
        tables.held_blocks,
        tables.slot_mappings,
        tables.slot_mappings.stride(0),
        staged.ids,
        staged.rows,
        staged.counts,
        overwrite,
        num_staged,
        batch.rows,
        batch.query_start_loc,
        batch.positions,
        num_reqs,
        batch.num_reqs_padded,
        num_tokens,
        batch.num_tokens_padded,
        tables.max_num_reqs,
        NUM_GROUPS=num_groups,
        ROWS=next_power_of_2(tables.max_num_reqs),
        BLOCKS_PER_KV_BLOCK=tables.common_blocks_per_kv_block,
        BLOCK_SIZE=tables.common_block_size,
        CP_SIZE=cp_size,
        CP_RANK=cp_rank,
        CP_INTERLEAVE=cp_interleave,
        PAD=PAD_SLOT,
        BLOCK=BLOCK,
        num_warps=NUM_WARPS,
    )


def aot_cases() -> list[AotCase]:
    """A model whose attention groups agree, and one where every size has to be loaded, under context parallelism."""
    int64 = ("geometry", "num_blocks", "row_keys", "held_keys", "slot_mappings", "rows", "positions")
    types = dict.fromkeys(_kernel().arg_names, "*i32") | dict.fromkeys(int64, "*i64") | {"staged_overwrite": "*i8"}
    types |= dict.fromkeys((*_COUNTS, "slot_stride", "max_num_reqs"), "i32")
    shapes = {
        "Nemotron-3-Nano, 256 rows": (5, 131, 2096, 1),
        "two block sizes, 256 rows, cp 2": (4, 0, 0, 2),
    }
    return [
        AotCase(
            kernel="block_tables.update_block_tables",
            shape=shape,
            dtype="int32",
            fn=_kernel(),
            signature=types,
            constexprs={
                "NUM_GROUPS": num_groups,
                "ROWS": 256,
                "BLOCKS_PER_KV_BLOCK": bpk,
                "BLOCK_SIZE": block_size,
                "CP_SIZE": cp_size,
                "CP_RANK": 0,
                "CP_INTERLEAVE": 1,
                "PAD": PAD_SLOT,
                "BLOCK": BLOCK,
            },
            num_warps=NUM_WARPS,
            num_stages=1,
            divisible=("slot_stride", "max_num_reqs"),
        )
        for shape, (num_groups, bpk, block_size, cp_size) in shapes.items()
    ]

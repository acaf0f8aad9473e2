"""The tensors of all groups' block tables, and a step's changes.

They are shared by every way to update them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

import torch

from hybrid_kv.kernels.slot_mapping import PAD_SLOT

# A key that no row has; not -1, which says that null blocks are there already.
_UNKNOWN = torch.iinfo(torch.int64).max


@dataclass(frozen=True)
class TableLayout:
    """The table of one group.

    Attributes:
        width: manager blocks of a row.
        block_size: tokens of a manager block.
        blocks_per_kv_block: kernel blocks of a manager block.
        kernel_block_stride: kernel blocks from one manager block to the next; more than
            `blocks_per_kv_block` where pages of other layers lie between. Slots do not know it:
            they count tokens of manager blocks.
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
            raise ValueError(
                f"{self}: manager blocks overlap; the stride must be at least blocks_per_kv_block"
            )


class Tables:
    """The persistent tensors of all groups; a captured graph reads them, so their addresses stay.

    Args:
        layouts: one per group.
        max_num_reqs: rows of every table.
        max_num_batched_tokens: length of the slot mappings, padding included.
        cp_size, cp_rank, cp_interleave: context parallelism, see `kernels.slot_mapping`.

    Attributes:
        tables: per group [max_num_reqs, width] int32, manager blocks; views of one buffer.
        input_tables: per group [max_num_reqs, width * blocks_per_kv_block] int32, kernel blocks in
            batch order; views of one buffer. Columns beyond a row's own blocks hold stale ids.
        num_blocks: [max_num_reqs, num_groups] int64, manager blocks in each row of each table.
        slot_mappings: [num_groups, max_num_batched_tokens] int64.
        geometry: [num_groups, 6] int64: where a group's table and input table begin, width, kernel
            blocks of a block, stride, and block size (0: no slots).
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
        sizes = [max_num_reqs * layout.width for layout in self.layouts]
        input_sizes = [
            size * layout.blocks_per_kv_block
            for size, layout in zip(sizes, self.layouts, strict=True)
        ]
        self.starts = list(accumulate(sizes[:-1], initial=0))  # of each group, in `flat_tables`
        self.input_starts = list(accumulate(input_sizes[:-1], initial=0))
        fields = [
            [
                start,
                input_start,
                layout.width,
                layout.blocks_per_kv_block,
                layout.kernel_block_stride,
                layout.block_size if layout.has_slots else 0,
            ]
            for start, input_start, layout in zip(
                self.starts, self.input_starts, self.layouts, strict=True
            )
        ]
        self.geometry = torch.tensor(fields, dtype=torch.int64, device=device)
        self.flat_tables = torch.zeros(sum(sizes), dtype=torch.int32, device=device)
        self.flat_input_tables = torch.zeros(sum(input_sizes), dtype=torch.int32, device=device)
        self.tables = [flat.view(max_num_reqs, -1) for flat in self.flat_tables.split(sizes)]
        self.input_tables = [
            flat.view(max_num_reqs, -1) for flat in self.flat_input_tables.split(input_sizes)
        ]
        self.num_blocks = torch.zeros(
            max_num_reqs, len(self.layouts), dtype=torch.int64, device=device
        )
        self.slot_mappings = torch.full(
            (len(self.layouts), max_num_batched_tokens), PAD_SLOT, dtype=torch.int64, device=device
        )


class DeviceTables(Tables):
    """Tables that one launch updates, and its memory of the rows that they hold.

    Attributes:
        row_keys, held_keys, held_blocks: [num_groups, max_num_reqs] each, one cell per program, so
            that no two programs share one. The key of each row changes when another request moves
            in: `row + max_num_reqs * (how many did)`. Of each batch position: the key of whom it
            holds (-1: null blocks) and how many blocks.
    """

    def __init__(
        self,
        layouts: Sequence[TableLayout],
        max_num_reqs: int,
        max_num_batched_tokens: int,
        device: torch.device,
        *context_parallelism: int,
    ) -> None:
        super().__init__(
            layouts, max_num_reqs, max_num_batched_tokens, device, *context_parallelism
        )
        num_groups = len(self.layouts)
        self.row_keys = torch.arange(max_num_reqs, device=device).repeat(num_groups, 1)
        self.held_keys = torch.full(
            (num_groups, max_num_reqs), -1, dtype=torch.int64, device=device
        )
        self.held_blocks = torch.zeros(num_groups, max_num_reqs, dtype=torch.int32, device=device)
        # What the kernel divides by, if the groups agree; else 0.
        expanding = {layout.blocks_per_kv_block for layout in self.layouts} - {1} or {1}
        with_slots = {layout.block_size for layout in self.layouts if layout.has_slots} or {1}
        self.common_blocks_per_kv_block = expanding.pop() if len(expanding) == 1 else 0
        self.common_block_size = with_slots.pop() if len(with_slots) == 1 else 0

    def forget(self) -> None:
        """Forget what the input tables hold: the next update writes all that its batch reads."""
        self.held_keys.fill_(_UNKNOWN)


@dataclass(frozen=True)
class StagedBlocks:
    """New manager block ids of some requests, as `BlockTables.append_block_ids` stages them.

    Each row occurs at most once.

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
        query_start_loc: [num_reqs + 1] int32, first token of each batch position, and the number of
            tokens.
        positions: [num_tokens] int64, of each token in its request.
        num_reqs_padded: batch positions up to here become rows of null blocks.
        num_tokens_padded: tokens up to here become `PAD_SLOT`, in all groups.
    """

    rows: torch.Tensor
    query_start_loc: torch.Tensor
    positions: torch.Tensor
    num_reqs_padded: int
    num_tokens_padded: int

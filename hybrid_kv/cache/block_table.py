"""Block tables of all groups: staged on the host, written and expanded on the device.

Contract. A request owns one *row* (its index in the persistent tables) while it runs. `append_block_ids` only stages:
it copies a request's new ids into one buffer and notes row and counts, nothing else, so its cost is that of the ids
themselves. Once per step `apply_staged_writes` moves the buffers to the device, which knows how many blocks each row
holds and finds the target of every id itself, for all groups in one indexed write; the host computes no index.
`gather_block_tables` then brings the rows of the step's batch into the input tables, where manager blocks become kernel
blocks. Everything that a captured graph reads keeps its address.

Shapes considered. (a) Expand on the host while appending (vllm!38831): costs `blocks_per_kv_block` times the ids, per
append. (b) Keep the table expanded: the write expands, the gather and the table are that much wider. (c) Keep
it in manager blocks and expand while gathering: the table is narrow, slots come from it without a division by two block
sizes, and nothing is stored twice. This is (c).
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import torch

from hybrid_kv.cache.block_pool import NULL_BLOCK, BlockIds
from hybrid_kv.kernels.block_tables import DeviceTables, StagedBlocks, StepBatch, TableLayout, update_block_tables
from hybrid_kv.kernels.kernel_blocks import gather_kernel_blocks
from hybrid_kv.kernels.slot_mapping import PAD_SLOT, slot_mapping


class BlockTables:
    """One table per group.

    Args:
        block_sizes: manager block size of each group, in tokens.
        kernel_block_sizes: kernel block size of each group; divides the manager block size.
        max_num_reqs: rows.
        max_num_batched_tokens: length of the slot mappings.
        max_num_blocks_per_group: width of each group's rows in manager blocks, speculative blocks included.
        device: where the persistent tables live.
        cp_size, cp_rank, cp_interleave: context parallelism, see `kernels.slot_mapping`.
    """

    def __init__(
        self,
        block_sizes: Sequence[int],
        kernel_block_sizes: Sequence[int],
        max_num_reqs: int,
        max_num_batched_tokens: int,
        max_num_blocks_per_group: Sequence[int],
        device: torch.device,
        cp_size: int = 1,
        cp_rank: int = 0,
        cp_interleave: int = 1,
    ) -> None:
        if not len(block_sizes) == len(kernel_block_sizes) == len(max_num_blocks_per_group):
            raise ValueError("block_sizes, kernel_block_sizes and max_num_blocks_per_group need one entry per group")
        for block_size, kernel_block_size in zip(block_sizes, kernel_block_sizes, strict=True):
            if block_size % kernel_block_size:
                raise ValueError(f"kernel block size {kernel_block_size} does not divide block size {block_size}")
        self.block_sizes = list(block_sizes)
        self.blocks_per_kv_block = [b // k for b, k in zip(block_sizes, kernel_block_sizes, strict=True)]
        self.widths = list(max_num_blocks_per_group)
        self.num_groups = len(block_sizes)
        self.max_num_reqs = max_num_reqs
        self.device = device
        self.cp = (cp_size, cp_rank, cp_interleave)
        # [max_num_reqs, num_groups]: manager blocks in each row of each table.
        self.num_blocks = torch.zeros(max_num_reqs, self.num_groups, dtype=torch.int64, device=device)

        # All tables are slices of one buffer, so that one indexed write serves every group.
        sizes = [max_num_reqs * width for width in self.widths]
        self._flat = torch.zeros(sum(sizes), dtype=torch.int32, device=device)
        self.tables = [part.view(max_num_reqs, -1) for part in self._flat.split(sizes)]
        self._group_start = torch.tensor([sum(sizes[:group]) for group in range(self.num_groups)], device=device)
        self._widths = torch.tensor(self.widths, device=device)
        self._offsets = [torch.arange(n, dtype=torch.int32, device=device) for n in self.blocks_per_kv_block]
        self.input_tables = [
            torch.zeros(max_num_reqs, width * n, dtype=torch.int32, device=device)
            for width, n in zip(self.widths, self.blocks_per_kv_block, strict=True)
        ]
        self.slot_mappings = torch.full(
            (self.num_groups, max_num_batched_tokens), PAD_SLOT, dtype=torch.int64, device=device
        )

        # The staging buffers: ids, and of each staged request its row, its counts, and whether it starts anew. They are
        # written one element at a time, which costs a memoryview a third of what it costs an array.
        pinned = device.type == "cuda"
        self._staged_ids = torch.zeros(max(1, len(self._flat)), dtype=torch.int32, pin_memory=pinned)
        self._staged_rows = torch.zeros(max_num_reqs, dtype=torch.int32, pin_memory=pinned)
        self._staged_counts = torch.zeros(max_num_reqs, self.num_groups, dtype=torch.int32, pin_memory=pinned)
        self._staged_overwrite = torch.zeros(max_num_reqs, dtype=torch.bool, pin_memory=pinned)
        self._staged_requests = (self._staged_rows, self._staged_counts, self._staged_overwrite)
        self._ids_view = memoryview(self._staged_ids.numpy())
        self._rows_view = memoryview(self._staged_rows.numpy())
        self._counts_view = memoryview(self._staged_counts.view(-1).numpy())
        self._overwrite_view = memoryview(self._staged_overwrite.numpy())
        self._num_ids = 0
        self._num_staged = 0
        self._gathered: tuple[object, ...] = ()  # what the input tables hold, until a row changes
        self.num_gathers = 0

    def append_block_ids(self, row: int, block_ids: BlockIds, counts: array[int], overwrite: bool = False) -> None:
        """Stage new manager block ids of one request; at most once per row between two `apply_staged_writes`.

        Args:
            row: the request's row.
            block_ids: [sum(counts)] int32, group by group.
            counts: [num_groups] of type code `i`, how many of the ids each group gets.
            overwrite: the request is new in this row (or was preempted): start at column 0.
        """
        begin, index = self._num_ids, self._num_staged
        end = begin + len(block_ids)
        if end > len(self._ids_view) or index == self.max_num_reqs:
            self.apply_staged_writes()
            begin, index, end = 0, 0, len(block_ids)
        cell = index * self.num_groups
        self._ids_view[begin:end] = block_ids
        self._counts_view[cell : cell + self.num_groups] = counts
        self._rows_view[index] = row
        self._overwrite_view[index] = overwrite
        self._num_ids, self._num_staged = end, index + 1

    def apply_staged_writes(self) -> None:
        """Bring all staged ids into the persistent tables.

        Raises (on a CPU; a GPU would have to be waited for):
            IndexError: a row would become longer than its group's width.
            ValueError: a row was staged twice, or ids do not match the counts. Nothing is written in either case.
        """
        staged, num_ids = self._num_staged, self._num_ids
        if not staged:
            return
        self._num_ids = self._num_staged = 0
        self._gathered = ()
        rows = self._staged_rows[:staged].to(self.device).long()
        counts = self._staged_counts[:staged].to(self.device).long()
        overwrite = self._staged_overwrite[:staged].to(self.device)
        ids = self._staged_ids[:num_ids].to(self.device)
        start = self.num_blocks.index_select(0, rows).masked_fill(overwrite[:, None], 0)
        end = start + counts
        if self.device.type == "cpu":
            self._check(rows, counts, end, num_ids)
        self.num_blocks[rows] = end
        lengths = counts.view(-1)
        first = (self._group_start + rows[:, None] * self._widths + start).view(-1)
        offset = first - (lengths.cumsum(0) - lengths)
        cells = offset.repeat_interleave(lengths, output_size=num_ids) + torch.arange(num_ids, device=self.device)
        self._flat[cells] = ids

    def _check(self, rows: torch.Tensor, counts: torch.Tensor, end: torch.Tensor, num_ids: int) -> None:
        if bool((end > self._widths).any()):
            i, group = (end > self._widths).nonzero()[0].tolist()
            raise IndexError(
                f"group {group} row {int(rows[i])}: {int(end[i, group])} blocks exceed the width {self.widths[group]}"
            )
        if len(set(known := rows.tolist())) != len(known):
            raise ValueError(f"a row was staged twice in one step: {sorted(known)}")
        if int(counts.sum()) != num_ids:
            raise ValueError(f"{num_ids} block ids were staged for {int(counts.sum())} columns")

    def update(
        self,
        rows: npt.NDArray[np.int64],
        query_lens: npt.NDArray[np.int64],
        positions: torch.Tensor,
        num_reqs_padded: int,
        num_tokens_padded: int,
        num_columns: Sequence[int],
        groups: Sequence[int],
    ) -> tuple[list[torch.Tensor], torch.Tensor]:
        """All of a step: staged ids applied, what `gather_block_tables` gives, and what `compute_slot_mappings` gives.

        Args:
            rows, query_lens: [num_reqs], row and number of tokens of each batch position.
            positions: [num_tokens] int64, of each token in its request.
            num_columns: manager blocks of the longest row, per group.
            groups: those that have slots.
        """
        self.apply_staged_writes()
        tables = self.gather_block_tables(rows, num_reqs_padded, num_columns)
        token_rows = torch.from_numpy(np.repeat(rows, query_lens)).to(self.device)
        return tables, self.compute_slot_mappings(token_rows, positions, num_tokens_padded, groups)

    def gather_block_tables(
        self, rows: npt.NDArray[np.int64], num_reqs_padded: int, num_columns: Sequence[int]
    ) -> list[torch.Tensor]:
        """The batch's tables in kernel blocks, one `[num_reqs_padded, width * blocks_per_kv_block]` view per group.

        Padding rows point at the null block. Columns beyond `num_columns`, and beyond a row's own blocks, hold stale
        ids: a reader is bounded by the row's number of tokens.

        Args:
            num_columns: manager blocks of the longest row, per group.
        """
        wanted = rows.tobytes(), num_reqs_padded, *num_columns
        if wanted != self._gathered:
            self._gather(rows, num_reqs_padded, num_columns)
            self._gathered = wanted
            self.num_gathers += 1
        return [out[:num_reqs_padded] for out in self.input_tables]

    def _gather(self, rows: npt.NDArray[np.int64], num_reqs_padded: int, num_columns: Sequence[int]) -> None:
        num_reqs = len(rows)
        device_rows = torch.from_numpy(rows).to(self.device)
        for group, out in enumerate(self.input_tables):
            gather_kernel_blocks(
                self.tables[group], device_rows, num_columns[group], self._offsets[group], out[:num_reqs]
            )
            out[num_reqs:num_reqs_padded] = NULL_BLOCK

    def compute_slot_mappings(
        self, token_rows: torch.Tensor, positions: torch.Tensor, num_tokens_padded: int, groups: Sequence[int]
    ) -> torch.Tensor:
        """Slots of the step's tokens, `[num_groups, num_tokens_padded]` int64; only `groups` are filled in.

        Everything behind the real tokens becomes `PAD_SLOT`, from the real count on: a longer earlier step must not
        leave valid slots under padding (vllm!36580).
        """
        num_tokens = len(positions)
        for group in groups:
            self.slot_mappings[group, :num_tokens] = self.slots_of(group, token_rows, positions)
        if num_tokens < num_tokens_padded:
            self.slot_mappings[:, num_tokens:num_tokens_padded] = PAD_SLOT
        return self.slot_mappings[:, :num_tokens_padded]

    def slots_of(self, group: int, token_rows: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        """[num_tokens] int64, slots of tokens of a group's rows."""
        return slot_mapping(self.tables[group], token_rows, positions, self.block_sizes[group], *self.cp)


class LaunchedBlockTables(BlockTables):
    """The same, but that `update` is one launch (`kernels.block_tables`): nothing is checked, as nobody waits.

    Args:
        slot_groups: the groups that have slots.
    """

    def __init__(
        self,
        block_sizes: Sequence[int],
        kernel_block_sizes: Sequence[int],
        max_num_reqs: int,
        max_num_batched_tokens: int,
        max_num_blocks_per_group: Sequence[int],
        device: torch.device,
        slot_groups: Sequence[int],
    ) -> None:
        super().__init__(
            block_sizes, kernel_block_sizes, max_num_reqs, max_num_batched_tokens, max_num_blocks_per_group, device
        )
        sizes = zip(self.widths, self.block_sizes, self.blocks_per_kv_block, strict=True)
        layouts = [
            TableLayout(width, size, per_block, per_block, group in slot_groups)
            for group, (width, size, per_block) in enumerate(sizes)
        ]
        self._on_device = DeviceTables(layouts, max_num_reqs, max_num_batched_tokens, device)
        self._flat, self.num_blocks = self._on_device.flat_tables, self._on_device.num_blocks
        self.tables, self.input_tables = self._on_device.tables, self._on_device.input_tables
        self.slot_mappings = self._on_device.slot_mappings

    def apply_staged_writes(self) -> None:
        """Bring all staged ids into the persistent tables."""
        if self._num_staged:
            nothing = torch.zeros(1, dtype=torch.int64, device=self.device)
            self._launch(StepBatch(nothing[:0], nothing.int(), nothing[:0], 0, 0))

    def update(
        self,
        rows: npt.NDArray[np.int64],
        query_lens: npt.NDArray[np.int64],
        positions: torch.Tensor,
        num_reqs_padded: int,
        num_tokens_padded: int,
        num_columns: Sequence[int],
        groups: Sequence[int],
    ) -> tuple[list[torch.Tensor], torch.Tensor]:
        """See `BlockTables.update`; every group with slots is mapped."""
        wanted = rows.tobytes(), num_reqs_padded
        if self._num_staged or wanted != self._gathered:
            self._gathered = wanted
            self.num_gathers += 1
        query_start_loc = np.concatenate([[0], np.cumsum(query_lens)]).astype(np.int32)
        moved, starts = (torch.from_numpy(part).to(self.device) for part in (rows, query_start_loc))
        self._launch(StepBatch(moved, starts, positions, num_reqs_padded, num_tokens_padded))
        tables = [table[:num_reqs_padded] for table in self.input_tables]
        return tables, self.slot_mappings[:, :num_tokens_padded]

    def _launch(self, batch: StepBatch) -> None:
        staged, num_ids = self._num_staged, self._num_ids
        self._num_ids = self._num_staged = 0
        parts = (self._staged_ids[:num_ids], *(part[:staged] for part in self._staged_requests))
        update_block_tables(self._on_device, StagedBlocks(*(part.to(self.device) for part in parts)), batch)

"""Block tables of all groups: staged request by request, brought up to date once per step.

Contract. A request owns one *row* (its index in the persistent tables) while it runs.
`append_block_ids` only stages: it copies a request's new ids into one buffer and notes row and
counts, nothing else, so its cost is that of the ids themselves. Once per step `update` appends them
to the tables, brings the rows of the step's batch into the input tables, where manager blocks
become kernel blocks, and maps its tokens to slots. What that costs is what changed: new ids, rows
that are not where they were, tokens. Everything that a captured graph reads keeps its address.

Shapes considered. (a) Expand on the host while appending (vllm!38831): costs `blocks_per_kv_block`
times the ids, per append. (b) Keep the tables expanded: they are that much wider, and slots need a
division by two block sizes. (c) Keep them in manager blocks and expand into the input tables, which
remember whose blocks they hold. This is (c).
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import torch

from hybrid_kv.cache.block_pool import BlockIds
from hybrid_kv.kernels.block_tables import (
    DeviceTables,
    HostTables,
    StagedBlocks,
    StepBatch,
    TableLayout,
    Tables,
    update_block_tables,
)
from hybrid_kv.kernels.common.upload import Staged, fill, now
from hybrid_kv.kernels.slot_mapping import slot_mapping

Ints = npt.NDArray[np.int64]
Int32s = npt.NDArray[np.int32]


def _do_nothing() -> None:
    pass


# On the device: the tables are the host's.
_NOTHING: Staged[None] = (), _do_nothing


class BlockTables:
    """One table per group, in host memory; on another device a copy of it.

    Args:
        block_sizes: manager block size of each group, in tokens.
        kernel_block_sizes: kernel block size of each group; divides the manager block size.
        max_num_reqs: rows.
        max_num_batched_tokens: length of the slot mappings.
        max_num_blocks_per_group: width of each group's rows in manager blocks, speculative blocks
            included.
        device: where the tables are read.
        slot_groups: the groups that have slots; None: all.
        cp_size, cp_rank, cp_interleave: context parallelism, see `kernels.slot_mapping`.

    Attributes:
        tables, input_tables, num_blocks, slot_mappings: see `kernels.block_tables.Tables`.
        num_gathers: another one whenever an input table may have changed.
    """

    def __init__(
        self,
        block_sizes: Sequence[int],
        kernel_block_sizes: Sequence[int],
        max_num_reqs: int,
        max_num_batched_tokens: int,
        max_num_blocks_per_group: Sequence[int],
        device: torch.device,
        slot_groups: Sequence[int] | None = None,
        cp_size: int = 1,
        cp_rank: int = 0,
        cp_interleave: int = 1,
    ) -> None:
        if not len(block_sizes) == len(kernel_block_sizes) == len(max_num_blocks_per_group):
            raise ValueError(
                "block_sizes, kernel_block_sizes and max_num_blocks_per_group need one entry per "
                "group"
            )
        for block_size, kernel_block_size in zip(block_sizes, kernel_block_sizes, strict=True):
            if block_size % kernel_block_size:
                raise ValueError(
                    f"kernel block size {kernel_block_size} does not divide block size {block_size}"
                )
        self.block_sizes = list(block_sizes)
        self.blocks_per_kv_block = [
            b // k for b, k in zip(block_sizes, kernel_block_sizes, strict=True)
        ]
        self.widths = list(max_num_blocks_per_group)
        self.num_groups = len(block_sizes)
        self.max_num_reqs = max_num_reqs
        self.device = device
        self.cp = (cp_size, cp_rank, cp_interleave)
        sizes = zip(self.widths, self.block_sizes, self.blocks_per_kv_block, strict=True)
        layouts = [
            TableLayout(
                width, size, per_block, per_block, slot_groups is None or group in slot_groups
            )
            for group, (width, size, per_block) in enumerate(sizes)
        ]
        read = self._allocate(layouts, max_num_batched_tokens)
        self.tables = read.tables
        self.input_tables = read.input_tables
        self.num_blocks = read.num_blocks
        self.slot_mappings = read.slot_mappings

        # The staging buffers: ids, and of each staged request its row, its counts, and whether it
        # starts anew. They are written one element at a time, which costs a memoryview a third of
        # what it costs an array.
        self._staged: tuple[Int32s, Int32s, Int32s, npt.NDArray[np.bool_]] = (
            np.zeros(max_num_reqs * sum(self.widths), dtype=np.int32),
            np.zeros(max_num_reqs, dtype=np.int32),
            np.zeros((max_num_reqs, self.num_groups), dtype=np.int32),
            np.zeros(max_num_reqs, dtype=np.bool_),
        )
        ids, rows, counts, overwrite = self._staged
        self._ids_view = memoryview(ids)
        self._rows_view = memoryview(rows)
        self._counts_view = memoryview(counts.reshape(-1))
        self._overwrite_view = memoryview(overwrite)
        self._num_ids = 0
        self._num_staged = 0
        self._views = self.input_tables, self.slot_mappings  # what `update` returned
        self.num_gathers = 0

    def _allocate(self, layouts: Sequence[TableLayout], max_num_batched_tokens: int) -> Tables:
        self._host = HostTables(layouts, self.max_num_reqs, max_num_batched_tokens, *self.cp)
        self._mirror: Tables | None = None
        if self.device.type == "cpu":
            return self._host
        self._mirror = Tables(
            layouts, self.max_num_reqs, max_num_batched_tokens, self.device, *self.cp
        )
        return self._mirror

    def append_block_ids(
        self, row: int, block_ids: BlockIds, counts: array[int], overwrite: bool
    ) -> None:
        """Stage new manager block ids of one request; at most once per row between two updates.

        Args:
            row: the request's row.
            block_ids: [sum(counts)] int32, group by group.
            counts: [num_groups] of type code `i`, how many of the ids each group gets.
            overwrite: the request is new in this row (or was preempted): start at logical block 0.
        """
        begin = self._num_ids
        index = self._num_staged
        end = begin + len(block_ids)
        if end > len(self._ids_view) or index == self.max_num_reqs:
            self._apply_staged()
            begin = 0
            index = 0
            end = len(block_ids)
        cell = index * self.num_groups
        self._ids_view[begin:end] = block_ids
        self._counts_view[cell : cell + self.num_groups] = counts
        self._rows_view[index] = row
        self._overwrite_view[index] = overwrite
        self._num_ids = end
        self._num_staged = index + 1

    def _apply_staged(self) -> None:
        """Bring all staged ids into the tables."""
        staged = self._num_staged
        if staged:
            ids, rows, counts, overwrite = self._staged
            ids = ids[: self._num_ids]
            self._num_ids = self._num_staged = 0
            self._host.append(ids, rows[:staged], counts[:staged], overwrite[:staged])

    def update(
        self,
        rows: Ints,
        query_lens: Ints,
        positions: torch.Tensor,
        num_reqs_padded: int,
        num_tokens_padded: int,
    ) -> tuple[list[torch.Tensor], torch.Tensor]:
        """Bring everything up to date as `stage`, by an upload of its own; return the `views`."""
        now(
            self.device, self.stage(rows, query_lens, positions, num_reqs_padded, num_tokens_padded)
        )
        return self.views(num_reqs_padded, num_tokens_padded)

    def stage(
        self,
        rows: Ints,
        query_lens: Ints,
        positions: torch.Tensor,
        num_reqs_padded: int,
        num_tokens_padded: int,
    ) -> Staged[None]:
        """Bring tables, input tables and slots up to date for a step.

        `tables` hold manager blocks, by row of the engine; `input_tables` hold kernel blocks, by
        position in the batch. Manager block b becomes kernel blocks `b * n + i`, i < n =
        `blocks_per_kv_block`. Slots are computed from manager blocks. Only what is new at a
        position is written.

        Padding rows point at the null block, padding tokens at `PAD_SLOT`. Logical blocks beyond a
        row's own blocks hold stale ids: a reader is bounded by the row's number of tokens.

        Args:
            rows, query_lens: [num_reqs], row and number of tokens (at least 1) of each batch
                position.
            positions: [num_tokens] int64 on the CPU, of each token in its request, consecutive
                within one.

        Raises:
            IndexError: a row would become longer than its group's width.
            ValueError: a row was staged twice, or ids do not match the counts. Nothing is written
                in either case.
        """
        self._apply_staged()
        self.num_gathers += self._host.place(rows, num_reqs_padded)
        self._host.map_slots(rows, query_lens, positions.numpy(), num_tokens_padded)
        if self._mirror is None:
            return _NOTHING
        names = "flat_tables", "flat_input_tables", "num_blocks", "slot_mappings"
        return fill(
            *((getattr(self._mirror, name), getattr(self._host, name).numpy()) for name in names)
        )

    def views(
        self, num_reqs_padded: int, num_tokens_padded: int
    ) -> tuple[list[torch.Tensor], torch.Tensor]:
        """Return the tables and slots that a step of that size reads.

        Returns:
            Per group `[num_reqs_padded, width * blocks_per_kv_block]` kernel blocks, and
            `[num_groups, num_tokens_padded]` slots, of which only groups with slots are filled in.
        """
        tables, slots = self._views
        if len(tables[0]) != num_reqs_padded:
            tables = [table[:num_reqs_padded] for table in self.input_tables]
        if slots.shape[1] != num_tokens_padded:
            slots = self.slot_mappings[:, :num_tokens_padded]
        self._views = tables, slots
        return self._views

    def slots_of(
        self, group: int, token_rows: torch.Tensor, positions: torch.Tensor
    ) -> torch.Tensor:
        """Return the slots [num_tokens] int64 of tokens of a group's rows."""
        return slot_mapping(
            self.tables[group], token_rows, positions, self.block_sizes[group], *self.cp
        )

    def forget(self) -> None:
        """Forget what the input tables hold: the next update writes all that its batch reads."""
        self._host.forget()


class LaunchedBlockTables(BlockTables):
    """Device-side variant: `update` is one kernel launch and performs no checks."""

    def _allocate(self, layouts: Sequence[TableLayout], max_num_batched_tokens: int) -> Tables:
        self._on_device = DeviceTables(
            layouts, self.max_num_reqs, max_num_batched_tokens, self.device, *self.cp
        )
        self._placed: tuple[bytes, int] | None = None  # the batch of the last update
        return self._on_device

    def _apply_staged(self) -> None:
        """Flush a full staging buffer with a separate launch."""
        nothing = np.empty(0, dtype=np.int64)
        now(self.device, self._stage(nothing, np.zeros(1, dtype=np.int32), nothing, 0, 0))

    def stage(
        self,
        rows: Ints,
        query_lens: Ints,
        positions: torch.Tensor,
        num_reqs_padded: int,
        num_tokens_padded: int,
    ) -> Staged[None]:
        """See `BlockTables.stage`."""
        placed = rows.tobytes(), num_reqs_padded
        if self._num_staged or placed != self._placed:
            self._placed = placed
            self.num_gathers += 1
        query_start_loc = np.concatenate([[0], np.cumsum(query_lens)]).astype(np.int32)
        return self._stage(
            rows, query_start_loc, positions.numpy(), num_reqs_padded, num_tokens_padded
        )

    def _stage(
        self, rows: Ints, query_start_loc: Int32s, positions: Ints, *padded: int
    ) -> Staged[None]:
        ids, *requests = self._staged
        staged = ids[: self._num_ids], *(values[: self._num_staged] for values in requests)
        self._num_ids = self._num_staged = 0

        def launch(*moved: torch.Tensor) -> None:
            *blocks, row, start, position = moved
            update_block_tables(
                self._on_device, StagedBlocks(*blocks), StepBatch(row, start, position, *padded)
            )

        return [*staged, rows, query_start_loc, positions], launch

    def forget(self) -> None:
        """See `BlockTables.forget`."""
        self._placed = None
        self._on_device.forget()

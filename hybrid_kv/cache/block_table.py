"""Block tables of all groups: staged on the host, written and expanded on the device.

Contract. A request owns one *row* (its index in the persistent tables) while it runs. `append_step` (all requests of a
step) and `append_block_ids` (one request) only stage: they copy ids into one buffer and note where they go, nothing
else, so their cost is that of the ids themselves. Once per step `apply_staged_writes` moves the whole buffer to the
device in one copy and one indexed write for all groups; `gather_block_tables` then brings the rows of the step's batch
into the input tables, where manager blocks become kernel blocks. Everything that a captured graph reads keeps its
address.

Shapes considered. (a) Expand on the host while appending (vllm!38831): costs `blocks_per_kv_block` times the ids, per
append. (b) Keep the table expanded: the write expands, the gather and the table are that much wider. (c) Keep
it in manager blocks and expand while gathering: the table is narrow, slots come from it without a division by two block
sizes, and nothing is stored twice. This is (c).
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import torch

from hybrid_kv.cache.block_pool import NULL_BLOCK, BlockIds
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
        self.num_blocks = np.zeros((max_num_reqs, self.num_groups), dtype=np.int64)

        # All tables are slices of one buffer, so that one indexed write serves every group.
        sizes = [max_num_reqs * width for width in self.widths]
        self._group_start = np.concatenate([[0], np.cumsum(sizes)]).tolist()
        self._flat = torch.zeros(self._group_start[-1], dtype=torch.int32, device=device)
        self.tables = [
            self._flat[start : start + size].view(max_num_reqs, -1)
            for start, size in zip(self._group_start, sizes, strict=False)
        ]
        self._offsets = [torch.arange(n, dtype=torch.int32, device=device) for n in self.blocks_per_kv_block]
        self.input_tables = [
            torch.zeros(max_num_reqs, width * n, dtype=torch.int32, device=device)
            for width, n in zip(self.widths, self.blocks_per_kv_block, strict=True)
        ]
        self.slot_mappings = torch.full(
            (self.num_groups, max_num_batched_tokens), PAD_SLOT, dtype=torch.int64, device=device
        )

        # The staging buffers: ids, and of each segment its target and length. `append_block_ids` touches single
        # elements, where lists and memoryviews cost a third of an array's own indexing; its segments come last.
        self._max_ids, self._max_segments = max(1, self._group_start[-1]), max_num_reqs * self.num_groups
        self._staged_ids = torch.zeros(self._max_ids, dtype=torch.int32, pin_memory=device.type == "cuda")
        self._ids = memoryview(self._staged_ids.numpy())
        self._targets = np.zeros(self._max_segments, dtype=np.int64)
        self._counts = np.zeros(self._max_segments, dtype=np.int64)
        self._late_targets: list[int] = []
        self._late_counts: list[int] = []
        self._num_blocks_view = memoryview(self.num_blocks.reshape(-1))
        self._num_ids = 0
        self._num_segments = 0
        self._layout = list(zip(self.widths, self._group_start, strict=False))
        self._width_array = np.array(self.widths, dtype=np.int64)
        self._row_start = np.array(self._group_start[:-1]) + np.arange(max_num_reqs)[:, None] * self._width_array

    def append_block_ids(self, row: int, new_block_ids: Sequence[BlockIds], overwrite: bool = False) -> None:
        """Stage new manager block ids of one request, one int32 array per group.

        Between two `apply_staged_writes`, a row may be overwritten only before anything else is staged for it: the
        device write keeps no order.

        Args:
            row: the request's row.
            new_block_ids: one array per group, empty where the group got none.
            overwrite: the request is new in this row (or was preempted): start at column 0.

        Raises:
            IndexError: a row would become longer than the group's width.
        """
        held = self._num_blocks_view
        cell = row * self.num_groups
        for group, ids in enumerate(new_block_ids):
            width, group_start = self._layout[group]
            start = 0 if overwrite else held[cell + group]
            count = len(ids)
            if start + count > width:
                raise IndexError(f"group {group} row {row}: {start + count} blocks exceed the width {width}")
            held[cell + group] = start + count
            if count:
                if self._num_ids + count > self._max_ids:
                    self.apply_staged_writes()
                begin = self._num_ids
                self._num_ids = end = begin + count
                self._ids[begin:end] = ids
                self._late_targets.append(group_start + row * width + start)
                self._late_counts.append(count)

    def append_step(
        self,
        rows: npt.NDArray[np.int64],
        counts: npt.NDArray[np.int64],
        new_block_ids: BlockIds,
        overwrite: npt.NDArray[np.bool_] | None = None,
    ) -> None:
        """Stage the new manager block ids of all requests of a step at once; nothing is staged if it raises.

        Args:
            rows: [n] int64, no row twice.
            counts: [n, num_groups] int64, new blocks of each row in each group.
            new_block_ids: [counts.sum()] int32, row by row and in a row group by group.
            overwrite: [n] bool, rows that start at column 0; None: no row does.

        Raises:
            IndexError: a row would become longer than a group's width.
        """
        start = self.num_blocks.take(rows, axis=0)
        if overwrite is not None:
            start[overwrite] = 0
        end = start + counts
        if np.count_nonzero(end > self._width_array):
            row, group = np.argwhere(end > self._width_array)[0]
            raise IndexError(
                f"group {group} row {rows[row]}: {end[row, group]} blocks exceed the width {self.widths[group]}"
            )
        full = self._num_ids + len(new_block_ids) > self._max_ids or self._num_segments + end.size > self._max_segments
        if full or self._late_counts:
            self.apply_staged_writes()
        self.num_blocks[rows] = end
        begin, segment = self._num_ids, self._num_segments
        self._num_ids, self._num_segments = begin + len(new_block_ids), segment + end.size
        self._ids[begin : self._num_ids] = new_block_ids
        start += self._row_start.take(rows, axis=0)
        self._targets[segment : self._num_segments] = start.reshape(-1)
        self._counts[segment : self._num_segments] = counts.reshape(-1)

    def staged_segments(self) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
        """First cell and length of each staged segment: with the ids, all that the device write reads."""
        targets, counts = self._targets[: self._num_segments], self._counts[: self._num_segments]
        if not self._late_counts:
            return targets, counts
        late = np.array(self._late_targets), np.array(self._late_counts)
        return late if not self._num_segments else (np.append(targets, late[0]), np.append(counts, late[1]))

    def discard_staged_writes(self) -> None:
        """Forget what is staged; `num_blocks` is the caller's to restore."""
        self._num_ids = self._num_segments = 0
        self._late_targets.clear()
        self._late_counts.clear()

    def apply_staged_writes(self) -> None:
        """Bring all staged ids into the persistent tables: one copy to the device, one indexed write."""
        targets, counts = self.staged_segments()
        ids = self._staged_ids[: self._num_ids].to(self.device)
        starts = np.cumsum(counts) - counts
        cells = np.repeat(targets - starts, counts) + np.arange(counts.sum())
        self.discard_staged_writes()
        if len(cells) != len(ids):
            raise ValueError(f"{len(ids)} block ids were staged for {len(cells)} columns")
        if len(cells):
            self._flat[torch.from_numpy(cells).to(self.device)] = ids

    def gather_block_tables(self, rows: npt.NDArray[np.int64], num_reqs_padded: int) -> list[torch.Tensor]:
        """The batch's tables in kernel blocks, one `[num_reqs_padded, width * blocks_per_kv_block]` view per group.

        Padding rows point at the null block. Columns beyond a row's blocks hold stale ids: a reader is bounded by the
        row's number of tokens.
        """
        num_reqs = len(rows)
        device_rows = torch.from_numpy(rows).to(self.device)
        longest = self.num_blocks[rows].max(axis=0, initial=0).tolist()
        for group, out in enumerate(self.input_tables):
            gather_kernel_blocks(self.tables[group], device_rows, longest[group], self._offsets[group], out[:num_reqs])
            out[num_reqs:num_reqs_padded] = NULL_BLOCK
        return [out[:num_reqs_padded] for out in self.input_tables]

    def compute_slot_mappings(
        self, token_rows: torch.Tensor, positions: torch.Tensor, num_tokens_padded: int, groups: Sequence[int]
    ) -> torch.Tensor:
        """Slots of the step's tokens, `[num_groups, num_tokens_padded]` int64; only `groups` are filled in.

        Everything behind the real tokens becomes `PAD_SLOT`, from the real count on: a longer earlier step must not
        leave valid slots under padding (vllm!36580).
        """
        num_tokens = len(positions)
        for group in groups:
            self.slot_mappings[group, :num_tokens] = slot_mapping(
                self.tables[group], token_rows, positions, self.block_sizes[group], *self.cp
            )
        self.slot_mappings[:, num_tokens:num_tokens_padded] = PAD_SLOT
        return self.slot_mappings[:, :num_tokens_padded]

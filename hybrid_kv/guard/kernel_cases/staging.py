"""Block tables as the engine drives them: staged request by request, updated once per step, on a host or a device."""

from __future__ import annotations

from array import array
from collections.abc import Iterator, Sequence
from itertools import pairwise

import numpy as np
import numpy.typing as npt
import torch

from hybrid_kv.cache.block_table import BlockTables, LaunchedBlockTables
from hybrid_kv.guard.kernel_cases.draw import Compared, Draw
from hybrid_kv.guard.kernel_cases.tables import CPU, MAX_REQS, MAX_TOKENS, Requests
from hybrid_kv.kernels.block_tables import (
    DeviceTables,
    StagedBlocks,
    StepBatch,
    TableLayout,
    Tables,
    check_update,
    update_block_tables_reference,
)


class Mirrored(BlockTables):
    """Tables of a host, and their copy, as if that were on a device."""

    def _allocate(self, layouts: Sequence[TableLayout], max_num_batched_tokens: int) -> Tables:
        device, self.device = self.device, torch.device("meta")  # the copy is for any device but the host
        assert super()._allocate(layouts, max_num_batched_tokens).flat_tables.device == self.device
        self.device = device
        self._mirror = Tables(layouts, self.max_num_reqs, max_num_batched_tokens, self.device, *self.cp)
        return self._mirror


class Launched(LaunchedBlockTables):
    """What is launched runs in plain torch."""

    @staticmethod
    def _update_tables(tables: DeviceTables, staged: StagedBlocks, batch: StepBatch) -> None:
        check_update(tables, staged, batch)
        update_block_tables_reference(tables, staged, batch)


class Driven:
    """Tables that are held against `Requests`."""

    def __init__(self, kind: type[BlockTables], requests: Requests) -> None:
        layouts = requests.layouts
        self.name, self.requests = kind.__name__, requests
        self.tables = kind(
            [layout.block_size for layout in layouts],
            [layout.block_size // layout.blocks_per_kv_block for layout in layouts],
            MAX_REQS,
            MAX_TOKENS,
            [layout.width for layout in layouts],
            CPU,
            [group for group, layout in enumerate(layouts) if layout.has_slots],
            *requests.cp,
        )
        # How many blocks of each row and group the tables must have, and will have.
        self._due: npt.NDArray[np.int64] = np.zeros((MAX_REQS, len(layouts)), dtype=np.int64)
        self._written = self._due
        self._num_staged = 0
        self._content: str | None = None  # what readers saw in the last step …
        self._places = ""  # … and whose it was

    def stage(self, staged: StagedBlocks) -> Iterator[Compared]:
        """Nothing is written before the update, but what would no longer fit into the staging buffers; no copy then."""
        inputs = [table.clone() for table in self.tables.input_tables]
        ends = [0, *staged.counts.sum(1).cumsum(0).tolist()]
        parts = zip(pairwise(ends), staged.rows.tolist(), staged.counts, staged.overwrite.tolist(), strict=True)
        for (begin, end), row, sizes, overwrite in parts:
            if self._num_staged == MAX_REQS:
                self._num_staged = 0
                self._written = self._written if isinstance(self.tables, Mirrored) else self._due
            self.tables.append_block_ids(row, staged.ids[begin:end].numpy(), array("i", sizes.tolist()), overwrite)
            self._num_staged += 1
        counts = [[len(blocks) for blocks in groups] for groups in self.requests.blocks]
        self._due = np.array(counts, dtype=np.int64)
        yield f"{self.name}, num_blocks while staging", self.tables.num_blocks, self._written
        for table, old in zip(self.tables.input_tables, inputs, strict=True):
            yield f"{self.name}, input_tables while staging", table, old.numpy()
        yield f"{self.name}, slot_mappings while staging", self.tables.slot_mappings, self.requests.slots

    def update(self, batch: StepBatch) -> Iterator[Compared]:
        """Readers get what the requests have, and another number wherever that has changed."""
        number, is_idle, tables = self.tables.num_gathers, not self._num_staged, self.tables
        lengths = batch.query_start_loc.diff().long().numpy()
        rows, padded = batch.rows.numpy(), batch.num_reqs_padded
        read, slots = tables.update(rows, lengths, batch.positions, padded, batch.num_tokens_padded)
        self._written, self._num_staged = self._due, 0
        yield from self.requests.compare(self.name, tables, batch)
        for got, whole in zip(read, tables.input_tables, strict=True):
            yield f"{self.name}, tables of a step", got, whole[:padded].numpy()
        yield f"{self.name}, slots of a step", slots, self.requests.slots[:, : batch.num_tokens_padded]
        content, places = repr((padded, [self.requests.blocks[row] for row in rows])), repr((padded, rows))
        is_other, is_same = content != self._content, is_idle and places == self._places
        self._content, self._places = content, places
        if padded and (is_other or is_same):
            yield f"{self.name}, num_gathers", torch.tensor(tables.num_gathers != number), np.array(is_other)

    def forget(self) -> None:
        self.tables.forget()
        self._content = None
        for table in self.tables.input_tables:
            table.fill_(-7)


def staged_tables(draw: Draw) -> Iterator[Compared]:
    """Steps of a few requests; now and then more is staged than the buffers hold, or the same batch runs again."""
    requests = Requests(draw, gaps=(0,))
    kinds = [Driven(kind, requests) for kind in (BlockTables, Mirrored, Launched)]
    rows: list[int] | None = None
    for _ in range(3):
        for fills in draw.one_of((False,), (True, False)):
            staged = requests.stage(draw, fills)
            for driven in kinds:
                yield from driven.stage(staged)
        batch = requests.batch(draw, rows)
        rows = draw.one_of(None, batch.rows.tolist())
        for driven in kinds:
            for _ in range(draw.number(1, 2)):
                yield from driven.update(batch)
            if draw.number(0, 3) == 0:
                driven.forget()


CASES = (staged_tables,)

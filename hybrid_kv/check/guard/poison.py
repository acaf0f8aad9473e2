"""Memory that must not be read, filled with what changes every result.

Stale memory often holds the right value by chance: a block that its last owner filled with the same
tokens, a logical block of the block table that an earlier step gathered for another request with
the same prefix.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from hybrid_kv.cache.block_pool import NULL_BLOCK
from hybrid_kv.cache.block_table import BlockTables
from hybrid_kv.engine.llm import LLM
from hybrid_kv.request import ScheduledRequest


def poison(llm: LLM) -> None:
    """Fill the cache, and what rows keep besides, with NaN in every float format, else -1."""
    rows = [kept for memory in llm.runner.row_memory.values() for kept in vars(memory).values()]
    for buffer in (*llm.runner.raw_buffers, *filter(torch.is_tensor, rows)):
        buffer.view(torch.uint8).fill_(255)


def poison_null_block(llm: LLM) -> None:
    """Fill the null block.

    A request misdirected to it would read back its own state, and look correct as long as it is
    alone.
    """
    for buffer in llm.runner.raw_buffers:
        buffer[: len(buffer) // llm.manager.pool.num_blocks].fill_(-1)


def poison_free_blocks(llm: LLM) -> None:
    """Fill the blocks that no request holds and nothing can find.

    They may be another request's in the next step.
    """
    pool = llm.manager.pool
    free = [
        block
        for block in np.flatnonzero(pool.ref_count == 0).tolist()
        if block and pool.key_of(block) is None
    ]
    for buffer in llm.runner.raw_buffers:
        buffer.view(pool.num_blocks, -1)[free] = -1


class StaleBlocks:
    """The logical blocks of the block tables that a step must write before it reads them.

    Before a step they are made null. What may stay is what any implementation may keep from step to
    step: of a row its own blocks, and of a place in the batch the blocks that were gathered there
    for the same request. All else is null, which is poisoned (above); an id that does not exist
    would be no better, as readers may load logical blocks that they mask. Padding rows are left
    alone: null is what they must be.
    """

    def __init__(self, tables: BlockTables) -> None:
        self._tables = tables
        self._owners = [0] * tables.max_num_reqs  # how many requests each row has had
        self._batch: list[tuple[int, int]] = []  # row and owner of each place in the last step
        # By place: row and owner, blocks per group.
        self._gathered: dict[int, tuple[tuple[int, int], list[int]]] = {}

    def poison(self, batch: Sequence[ScheduledRequest]) -> None:
        """Make stale blocks null before a step is staged; `batch` is in batch order."""
        tables = self._tables
        held = self._tables.num_blocks.numpy()
        for place, key in enumerate(self._batch):
            self._gathered[place] = key, held[key[0]].tolist()
        kept = held.copy()
        for item in batch:
            if item.overwrite:
                self._owners[item.request.row] += 1
                kept[item.request.row] = 0
        for group, table in enumerate(tables.tables):
            table.numpy()[np.arange(table.shape[1]) >= kept[:, group, None]] = NULL_BLOCK
        self._batch = [(item.request.row, self._owners[item.request.row]) for item in batch]
        inputs = [table.numpy() for table in tables.input_tables]
        nothing = [0] * len(tables.input_tables)
        for place, key in enumerate(self._batch):
            owner, counts = self._gathered.get(place, (None, nothing))
            kept_there = counts if owner == key else nothing
            for table, count, per_block in zip(
                inputs, kept_there, tables.blocks_per_kv_block, strict=True
            ):
                table[place, count * per_block :] = NULL_BLOCK

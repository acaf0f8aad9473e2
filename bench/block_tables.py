"""A step's block tables: ids staged and applied, the batch gathered as kernel blocks, its tokens mapped to slots.

`step` is what the engine calls; `update_kernel` is the same as one launch, on the same requests.
"""

from __future__ import annotations

from array import array
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from bench._reference import equal
from hybrid_kv.cache.block_table import BlockTables
from hybrid_kv.timing.cases import Case, Cell, grid


@dataclass(frozen=True)
class Layout:
    """The cache groups of a model at 131,072 tokens, mode `all`, K = 3: Mamba groups first, then one of attention."""

    mamba_groups: int
    block_size: int
    width: int
    kernel_block_size: int = 64


LAYOUTS = {"nemotron-3-nano": Layout(4, 2176, 61), "granite-4-h-small": Layout(9, 1024, 128)}
STEPS = {"decode 64": (64, 4, 4, 1), "prefill 4": (4, 4, 512, 2)}  # rows, of them with new blocks, tokens, new blocks
HELD = 8  # blocks of a request before a decode step


class Step:
    """One step's requests, and what their tables and slots must be."""

    def __init__(self, seed: int, model: str, step: str) -> None:
        rng = np.random.default_rng(seed)
        self.layout = layout = LAYOUTS[model]
        self.num_reqs, num_staged, self.tokens_each, self.count = STEPS[step]
        self.is_new = step.startswith("prefill")
        self.groups = layout.mamba_groups + 1
        self.held = 0 if self.is_new else HELD
        self.rows = rng.permutation(64)[: self.num_reqs]
        self.staged = self.rows[:num_staged]
        self.ids = rng.integers(1, 4096, (self.num_reqs, self.groups, self.held + self.count)).astype(np.int32)
        last = (self.held + self.count if self.is_new else self.held) * layout.block_size
        starts = rng.integers(0, last - self.tokens_each, self.num_reqs)
        self.positions = (starts[:, None] + np.arange(self.tokens_each)).reshape(-1)
        self.num_tokens = len(self.positions)
        columns = (self.positions // layout.block_size).reshape(self.num_reqs, -1)
        blocks = np.take_along_axis(self.ids[:, -1], columns, axis=1).reshape(-1)
        self.slots = blocks.astype(np.int64) * layout.block_size + self.positions % layout.block_size

    def expected(self, index: int, group: int) -> npt.NDArray[np.int32]:
        """Kernel blocks of one request in one group."""
        length = self.held + (self.count if self.rows[index] in self.staged else 0)
        ids = self.ids[index, group, :length]
        if group < self.layout.mamba_groups:
            return ids
        bpk = self.layout.block_size // self.layout.kernel_block_size
        return (ids[:, None] * bpk + np.arange(bpk)).reshape(-1)

    def check(self, input_tables: Any, slots: torch.Tensor) -> float:
        """Compare the tables of all groups, and the slots of the attention group."""
        for group, table in enumerate(input_tables):
            for index in range(self.num_reqs):
                wanted = self.expected(index, group)
                equal(f"group {group} row {index}", table[index, : len(wanted)].cpu().numpy(), wanted)
        return equal("slots", slots[: self.num_tokens].cpu(), self.slots)


def step(seed: int, model: str, step: str) -> Case:
    """What the engine does on the CPU."""
    data = Step(seed, model, step)
    layout, last = data.layout, data.groups - 1
    mamba = layout.mamba_groups
    tables = BlockTables(
        [layout.block_size] * data.groups,
        [layout.block_size] * mamba + [layout.kernel_block_size],
        64,
        8192,
        [layout.width + 3] * mamba + [layout.width],
        torch.device("cpu"),
        [last],
    )
    new_ids = [np.ascontiguousarray(data.ids[i, :, data.held :]).reshape(-1) for i in range(len(data.staged))]
    counts = array("i", [data.count] * data.groups)
    positions = torch.from_numpy(data.positions)
    rows, query_lens = data.rows.astype(np.int64), np.full(data.num_reqs, data.tokens_each)
    for group, table in enumerate(tables.tables):
        table[torch.from_numpy(rows), : data.held] = torch.from_numpy(data.ids[:, group, : data.held])

    def reset() -> None:
        tables.num_blocks[:] = data.held

    def run() -> tuple[list[torch.Tensor], torch.Tensor]:
        for row, ids in zip(data.staged.tolist(), new_ids, strict=True):
            tables.append_block_ids(row, ids, counts, data.is_new)
        return tables.update(rows, query_lens, positions, data.num_reqs, data.num_tokens)

    def check() -> float:
        reset()
        for table in (*tables.input_tables, *(table[:, data.held :] for table in tables.tables)):
            table.zero_()
        tables.slot_mappings.zero_()
        tables.forget()
        gathered, slots = run()
        return data.check(gathered, slots[last])

    # A decode step's blocks go behind those of the last call: as many calls as the row has room for.
    return Case(run, check, reset, (layout.width - data.held) // data.count)


def update_kernel(seed: int, model: str, step: str, device: str = "cuda") -> Case:
    """The same step as one launch."""
    from hybrid_kv.kernels.block_tables import (
        DeviceTables,
        StagedBlocks,
        StepBatch,
        TableLayout,
        update_block_tables,
    )

    data = Step(seed, model, step)
    layout = data.layout
    bpk = layout.block_size // layout.kernel_block_size
    mamba = [TableLayout(layout.width + 3, layout.block_size, 1, 1, has_slots=False)] * layout.mamba_groups
    attention = TableLayout(layout.width, layout.block_size, bpk, bpk)
    tables = DeviceTables([*mamba, attention], 64, 8192, torch.device(device))

    def staged(rows: npt.NDArray[np.int64], ids: npt.NDArray[np.int32], overwrite: bool) -> StagedBlocks:
        counts = torch.full((len(rows), data.groups), ids.shape[2], dtype=torch.int32)
        parts = (torch.from_numpy(ids).reshape(-1), torch.from_numpy(rows).int(), counts)
        starts = torch.full((len(rows),), overwrite)
        return StagedBlocks(*(part.to(device) for part in parts), starts.to(device))

    def batch(rows: npt.NDArray[np.int64], tokens_each: int, positions: npt.NDArray[np.int64]) -> StepBatch:
        begins = torch.arange(len(rows) + 1, dtype=torch.int32) * tokens_each
        parts = (torch.from_numpy(rows), begins, torch.from_numpy(positions))
        return StepBatch(*(part.to(device) for part in parts), len(rows), len(positions))

    before = staged(data.rows, np.ascontiguousarray(data.ids[:, :, : data.held]), True)
    new = staged(data.staged, np.ascontiguousarray(data.ids[: len(data.staged), :, data.held :]), data.is_new)
    first = batch(data.rows, 1, np.zeros(data.num_reqs, dtype=np.int64))
    this = batch(data.rows, data.tokens_each, data.positions)

    def reset() -> None:
        # Every row has a new owner, whose first blocks the input tables hold already.
        update_block_tables(tables, before, first)

    def run() -> None:
        update_block_tables(tables, new, this)

    def check() -> float:
        reset()
        run()
        return data.check(tables.input_tables, tables.slot_mappings[-1])

    return Case(run, check, reset, (layout.width - data.held) // data.count)


def cells() -> list[Cell]:
    """Both ways, for two models."""
    values = {"model": tuple(LAYOUTS), "step": tuple(STEPS)}
    quick = [("nemotron-3-nano",)]
    return [
        *grid("block_tables", "step", "cpu", step, values, quick),
        *grid("block_tables", "update_kernel", "gpu", update_kernel, values, quick),
    ]

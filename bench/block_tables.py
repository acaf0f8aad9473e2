"""A step's block tables: ids staged and applied, the batch's rows as kernel blocks, its tokens mapped to slots.

`total` is all of that on a CPU, in two equal groups of 8 kernel blocks per block, beside the real code of vLLM's V1
runner where `--peers` names installs of it (`bench.peers`): host and device part together, as on a CPU both are the
host's. Every subject starts from ids in the form in which its engine holds them (lists in vLLM, arrays here) and ends
with tables in kernel blocks and slots, which are compared with tables made from the ids by numpy.

`step` is the same for two models' groups; `update_kernel` is that as one launch.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import product
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from bench._reference import equal
from bench.harness.cells import Case, Cell, Scalar, grid, seed
from bench.harness.contest import Contest, Rival, models
from bench.peers import Install, installs
from hybrid_kv.cache.block_table import BlockTables
from hybrid_kv.timing.case import ENGINE


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
    held = [np.ascontiguousarray(ids[:, : data.held]).reshape(-1) for ids in data.ids]
    held_counts = array("i", [data.held] * data.groups)
    ones, nothing = np.ones(data.num_reqs, dtype=np.int64), torch.zeros(data.num_reqs, dtype=torch.int64)

    def reset() -> None:
        for row, ids in zip(rows.tolist(), held, strict=True):
            tables.append_block_ids(row, ids, held_counts, True)
        tables.update(rows, ones, nothing, data.num_reqs, data.num_reqs)

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


# ---- a whole step, beside other engines ----

NUM_GROUPS, BLOCK_SIZE, KERNEL_BLOCK_SIZE = 2, 128, 16
MAX_TOKENS = 8192


@dataclass(frozen=True)
class Total:
    """One step, several times over: `appends` of `num_reqs` requests get `blocks` blocks in each group.

    `held`: before the first. 0: new requests, whose last `tokens` tokens run.
    """

    num_reqs: int
    appends: int
    blocks: int
    held: int
    width: int
    tokens: int = 1


TOTALS = {
    "16 of 256 append, width 40": Total(256, 16, 1, 32, 40),
    "256 of 256 append, width 40": Total(256, 256, 1, 32, 40),
    "0 of 256 append, width 40": Total(256, 0, 1, 32, 40),
    "16 of 256 append, width 1024": Total(256, 16, 1, 32, 1024),
    "256 of 256 append, width 1024": Total(256, 256, 1, 32, 1024),
    "0 of 256 append, width 1024": Total(256, 0, 1, 32, 1024),
    "16 of 256 append, 1000 held": Total(256, 16, 1, 1000, 1024),
    "8 prefills x 64 blocks": Total(8, 8, 64, 0, 64, 1024),
    "32 prefills x 256 blocks, width 256": Total(32, 32, 256, 0, 256, 256),
    "32 prefills x 256 blocks, width 1024": Total(32, 32, 256, 0, 1024, 256),
}
STEPS_IN_A_ROW = 8


class Steps:
    """`STEPS_IN_A_ROW` steps, and what tables and slots must be after each."""

    def __init__(self, seed: int, scenario: str) -> None:
        rng = np.random.default_rng(seed)
        self.shape = shape = TOTALS[scenario]
        self.rows = np.sort(rng.permutation(shape.num_reqs)[: shape.appends])
        self.held = rng.integers(1, 1 << 20, (shape.num_reqs, NUM_GROUPS, shape.held)).astype(np.int32)
        size = (STEPS_IN_A_ROW, shape.appends, NUM_GROUPS, shape.blocks)
        self.new = rng.integers(1, 1 << 20, size).astype(np.int32)
        self.positions = []
        for step in range(STEPS_IN_A_ROW):
            ends = self.num_blocks(step) * BLOCK_SIZE - shape.tokens
            if not self.is_new:
                ends -= rng.integers(0, BLOCK_SIZE, shape.num_reqs)
            self.positions.append(torch.from_numpy((ends[:, None] + np.arange(shape.tokens)).reshape(-1)))

    @property
    def is_new(self) -> bool:
        return self.shape.held == 0

    def num_blocks(self, step: int) -> npt.NDArray[np.int64]:
        """[num_reqs], after a step."""
        counts = np.full(self.shape.num_reqs, self.shape.held)
        counts[self.rows] += self.shape.blocks * (1 if self.is_new else step + 1)
        return counts

    def check(self, step: int, tables: Sequence[torch.Tensor], slots: Sequence[torch.Tensor]) -> None:
        new = self.new[step : step + 1] if self.is_new else self.new[: step + 1]
        added = np.concatenate(list(new), axis=2)  # [appends, groups, blocks]
        split, counts = BLOCK_SIZE // KERNEL_BLOCK_SIZE, self.num_blocks(step)
        for group, (table, found) in enumerate(zip(tables, slots, strict=True)):
            ids = np.zeros((self.shape.num_reqs, self.shape.held + added.shape[2]), dtype=np.int64)
            ids[:, : self.shape.held] = self.held[:, group]
            ids[self.rows, self.shape.held :] = added[:, group]
            wanted = (ids[..., None] * split + np.arange(split)).reshape(len(ids), -1)
            wanted = wanted[:, : split * counts.max()]
            is_own = np.arange(wanted.shape[1]) < split * counts[:, None]
            kernel_blocks = table[: len(ids), : wanted.shape[1]].numpy()
            equal(f"group {group}", np.where(is_own, kernel_blocks, 0), np.where(is_own, wanted, 0))
            positions = self.positions[step].numpy().reshape(len(ids), -1)
            blocks = np.take_along_axis(ids, positions // BLOCK_SIZE, axis=1)
            of_tokens = (blocks * BLOCK_SIZE + positions % BLOCK_SIZE).reshape(-1)
            equal(f"slots of group {group}", found[: len(of_tokens)].numpy(), of_tokens)


Found = tuple[Sequence[torch.Tensor], Sequence[torch.Tensor]]


def _engine_step(data: Steps) -> tuple[Callable[[], object], Callable[[int], Found]]:
    shape = data.shape
    tables = BlockTables(
        [BLOCK_SIZE] * NUM_GROUPS,
        [KERNEL_BLOCK_SIZE] * NUM_GROUPS,
        shape.num_reqs,
        MAX_TOKENS,
        [shape.width] * NUM_GROUPS,
        torch.device("cpu"),
    )
    rows, batch = data.rows.tolist(), np.arange(shape.num_reqs)
    held = [np.ascontiguousarray(ids).reshape(-1) for ids in data.held]
    new = [[np.ascontiguousarray(ids).reshape(-1) for ids in step] for step in data.new]
    counts, held_counts = (array("i", [count] * NUM_GROUPS) for count in (shape.blocks, shape.held))
    query_lens, ones = np.full(shape.num_reqs, shape.tokens), np.ones(shape.num_reqs, dtype=np.int64)
    nothing, is_new = torch.zeros(shape.num_reqs, dtype=torch.int64), data.is_new

    def reset() -> None:
        if not is_new:
            for row, ids in enumerate(held):
                tables.append_block_ids(row, ids, held_counts, True)
            tables.update(batch, ones, nothing, len(batch), len(batch))

    def run(step: int) -> Found:
        for row, ids in zip(rows, new[step], strict=True):
            tables.append_block_ids(row, ids, counts, is_new)
        positions = data.positions[step]
        found, slots = tables.update(batch, query_lens, positions, len(batch), len(positions))
        return found, slots  # type: ignore[return-value]  # a tensor of slots, a row for each group

    return reset, run


def _peer_step(data: Steps, install: Install) -> tuple[Callable[[], object], Callable[[int], Found]]:
    from bench.peers.vllm_v1 import V1Tables

    shape = data.shape
    tables = V1Tables(install, NUM_GROUPS, BLOCK_SIZE, KERNEL_BLOCK_SIZE, shape.width, shape.num_reqs, MAX_TOKENS)
    rows, num_reqs = data.rows.tolist(), shape.num_reqs
    held = [tuple(ids.tolist() for ids in request) for request in data.held]
    new = [[tuple(ids.tolist() for ids in request) for request in step] for step in data.new]
    query_start_loc = torch.arange(num_reqs + 1, dtype=torch.int32) * shape.tokens
    bring = tables.add if data.is_new else tables.append

    def reset() -> None:
        if not data.is_new:
            for row, ids in enumerate(held):
                tables.add(ids, row)

    def run(step: int) -> Found:
        for row, ids in zip(rows, new[step], strict=True):
            bring(ids, row)
        return tables.finish(num_reqs, query_start_loc, data.positions[step])

    return reset, run


def total(seed: int, scenario: str, subject: str) -> Case:
    """A whole step; `reset` goes back to the first of `STEPS_IN_A_ROW`."""
    data, step = Steps(seed, scenario), 0
    if subject == ENGINE:
        restore, one = _engine_step(data)
    else:
        (install,) = (install for install in installs() if subject == _name(install))
        restore, one = _peer_step(data, install)

    def reset() -> None:
        nonlocal step
        restore()
        step = 0

    def run() -> Found:
        nonlocal step
        step += 1
        return one(step - 1)

    def check() -> float:
        reset()
        for done in range(STEPS_IN_A_ROW):
            data.check(done, *run())
        return 0.0

    return Case(run, check, reset, STEPS_IN_A_ROW)


def _name(install: Install) -> str:
    return f"vllm {install.version} V1"


def _promise(scenario: str, subject: str) -> float | None:
    """Twice as fast where ids change, and never slower."""
    return None if subject == ENGINE else 2.0 if TOTALS[scenario].appends else 1.0


def table_updates(device: str, model: str, step: str) -> Contest:
    """All groups' block tables of a step in one launch: a few bytes, so only its time says anything."""
    params = {"model": model, "step": step}
    make = partial(update_kernel, seed("block_tables", params), model, step, device)
    return Contest("block_tables", params, {"triton": Rival(make, 0)})


def gpu_contests(quick: bool, device: str) -> Iterator[Contest]:
    """Every kind of step."""
    for model, step in product(models(quick), STEPS):
        yield table_updates(device, model, step)


def cells() -> list[Cell]:
    """Whole steps beside others; a step and a launch for two models."""
    values: dict[str, tuple[Scalar, ...]] = {"model": tuple(LAYOUTS), "step": tuple(STEPS)}
    quick = [("nemotron-3-nano",)]
    subjects = (ENGINE, *(_name(install) for install in installs()))
    totals: dict[str, tuple[Scalar, ...]] = {"scenario": tuple(TOTALS), "subject": subjects}
    return [
        *grid("block_tables", "total", "cpu", total, totals, [("16 of 256 append, width 40",)], _promise),
        *grid("block_tables", "step", "cpu", step, values, quick),
        *grid("block_tables", "update_kernel", "gpu", update_kernel, values, quick),
    ]

"""Block tables of a step: ids staged and applied, rows as kernel blocks, tokens mapped to slots.

`total` is all of that on a CPU, in two equal groups of 8 kernel blocks per block, beside the real
code of vLLM's V1 runner where `--peers` names installs of it (`bench.peers`): host and device part
together, as on a CPU both are the host's. Every subject starts from ids in the form in which its
engine holds them (lists in vLLM, arrays here) and ends with tables in kernel blocks and slots,
which are compared with tables made from the ids by numpy.

`step` is the same for two models' groups; `update_kernel` is that as one launch.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import product

import numpy as np
import numpy.typing as npt
import torch

from bench._reference import equal
from bench.harness.cells import Case, Cell, Scalar, grid, promised, seed
from bench.harness.contest import Contest, Rival, models
from bench.peers import Install, installs
from hybrid_kv.cache.block_table import BlockTables
from hybrid_kv.kernels.block_tables import TableLayout
from hybrid_kv.measure.timing.case import ENGINE

MAX_TOKENS = 8192
STEPS_IN_A_ROW = 8
# By model at 131,072 tokens, mode `all`, K = 3: Mamba groups, block size, width; besides there is a
# group of attention.
LAYOUTS = {"nemotron-3-nano": (4, 2176, 61), "granite-4-h-small": (9, 1024, 128)}
STEPS = {
    "decode 64": (64, 4, 1, 8, 4),
    "prefill 4": (4, 4, 2, 0, 512),
}  # see `Shape`; the last are the tokens


@dataclass(frozen=True)
class Shape:
    """A step, several times over: `appends` of `num_reqs` requests get `blocks` in each group.

    `held`: before the first. 0: new requests, whose last `tokens` tokens run. Mamba groups have no
    slots, kernel blocks as long as their blocks, and room for the states of drafts.
    """

    num_reqs: int
    appends: int
    blocks: int
    held: int
    width: int
    tokens: int = 1
    mamba_groups: int = 0
    attention_groups: int = 2
    block_size: int = 128
    kernel_block_size: int = 16

    @property
    def layouts(self) -> list[TableLayout]:
        """Return the layout of each group."""
        bpk = self.block_size // self.kernel_block_size
        mamba = TableLayout(self.width + 3, self.block_size, 1, 1, has_slots=False)
        attention = TableLayout(self.width, self.block_size, bpk, bpk)
        return [mamba] * self.mamba_groups + [attention] * self.attention_groups


def _shape(model: str, step: str) -> Shape:
    (mamba_groups, block_size, width), (*requests, tokens) = LAYOUTS[model], STEPS[step]
    return Shape(*requests, width, tokens, mamba_groups, 1, block_size, 64)


TOTALS = {
    **{
        f"{n} of 256 append, width {width}": Shape(256, n, 1, 32, width)
        for width in (40, 1024)
        for n in (16, 256, 0)
    },
    "16 of 256 append, 1000 held": Shape(256, 16, 1, 1000, 1024),
    "8 prefills x 64 blocks": Shape(8, 8, 64, 0, 64, 1024),
    "32 prefills x 256 blocks, width 256": Shape(32, 32, 256, 0, 256, 256),
    "32 prefills x 256 blocks, width 1024": Shape(32, 32, 256, 0, 1024, 256),
}


class Steps:
    """`STEPS_IN_A_ROW` steps, and what tables and slots must be after each."""

    def __init__(self, seed: int, shape: Shape) -> None:
        rng = np.random.default_rng(seed)
        self.shape, self.layouts = shape, shape.layouts
        self.rows = np.sort(rng.permutation(shape.num_reqs)[: shape.appends])
        sizes = (
            (shape.num_reqs, len(self.layouts), shape.held),
            (shape.appends, len(self.layouts), shape.blocks),
        )
        self.held = rng.integers(1, 1 << 20, sizes[0]).astype(np.int32)
        self.new = rng.integers(1, 1 << 20, (STEPS_IN_A_ROW, *sizes[1])).astype(np.int32)
        self.positions = []
        for step in range(STEPS_IN_A_ROW):
            ends = self.num_blocks(step) * shape.block_size - shape.tokens
            if not self.is_new:
                ends -= rng.integers(0, shape.block_size, shape.num_reqs)
            self.positions.append(
                torch.from_numpy((ends[:, None] + np.arange(shape.tokens)).reshape(-1))
            )

    @property
    def is_new(self) -> bool:
        return self.shape.held == 0

    def num_blocks(self, step: int) -> npt.NDArray[np.int64]:
        """Return the number of blocks after a step, [num_reqs]."""
        counts = np.full(self.shape.num_reqs, self.shape.held)
        counts[self.rows] += self.shape.blocks * (1 if self.is_new else step + 1)
        return counts

    def check(
        self, step: int, tables: Sequence[torch.Tensor], slots: Sequence[torch.Tensor]
    ) -> float:
        new = self.new[step : step + 1] if self.is_new else self.new[: step + 1]
        added = np.concatenate(list(new), axis=2)  # [appends, groups, blocks]
        size, counts = self.shape.block_size, self.num_blocks(step)
        for group, (layout, table, found) in enumerate(
            zip(self.layouts, tables, slots, strict=True)
        ):
            split = layout.blocks_per_kv_block
            ids = np.zeros((self.shape.num_reqs, self.shape.held + added.shape[2]), dtype=np.int64)
            ids[:, : self.shape.held] = self.held[:, group]
            ids[self.rows, self.shape.held :] = added[:, group]
            wanted = (ids[..., None] * split + np.arange(split)).reshape(len(ids), -1)
            wanted = wanted[:, : split * counts.max()]
            is_own = np.arange(wanted.shape[1]) < split * counts[:, None]
            kernel_blocks = table[: len(ids), : wanted.shape[1]].cpu().numpy()
            equal(f"group {group}", np.where(is_own, kernel_blocks, 0), np.where(is_own, wanted, 0))
            if layout.has_slots:
                positions = self.positions[step].numpy().reshape(len(ids), -1)
                blocks = np.take_along_axis(ids, positions // size, axis=1)
                of_tokens = (blocks * size + positions % size).reshape(-1)
                equal(f"slots of group {group}", found[: len(of_tokens)].cpu().numpy(), of_tokens)
        return 0.0


Found = tuple[Sequence[torch.Tensor], Sequence[torch.Tensor]]


def _engine_step(data: Steps) -> tuple[Callable[[], object], Callable[[int], Found]]:
    shape, layouts = data.shape, data.layouts
    tables = BlockTables(
        [one.block_size for one in layouts],
        [one.block_size // one.blocks_per_kv_block for one in layouts],
        shape.num_reqs,
        MAX_TOKENS,
        [one.width for one in layouts],
        torch.device("cpu"),
        [group for group, one in enumerate(layouts) if one.has_slots],
    )
    rows, batch = data.rows.tolist(), np.arange(shape.num_reqs)
    held = [np.ascontiguousarray(ids).reshape(-1) for ids in data.held]
    new = [[np.ascontiguousarray(ids).reshape(-1) for ids in step] for step in data.new]
    counts, held_counts = (
        array("i", [count] * len(layouts)) for count in (shape.blocks, shape.held)
    )
    query_lens, ones = (
        np.full(shape.num_reqs, shape.tokens),
        np.ones(shape.num_reqs, dtype=np.int64),
    )
    nothing, is_new = torch.zeros(shape.num_reqs, dtype=torch.int64), data.is_new

    def reset() -> None:
        if not is_new:
            for row, ids in enumerate(held):
                tables.append_block_ids(row, ids, held_counts, overwrite=True)
            tables.update(batch, ones, nothing, len(batch), len(batch))

    def run(step: int) -> Found:
        for row, ids in zip(rows, new[step], strict=True):
            tables.append_block_ids(row, ids, counts, is_new)
        positions = data.positions[step]
        found, slots = tables.update(batch, query_lens, positions, len(batch), len(positions))
        return found, slots  # type: ignore[return-value]  # a tensor of slots, a row for each group

    return reset, run


def _peer_step(
    data: Steps, install: Install
) -> tuple[Callable[[], object], Callable[[int], Found]]:
    from bench.peers.vllm_v1 import V1Tables

    shape, num_reqs = data.shape, data.shape.num_reqs
    sizes = shape.attention_groups, shape.block_size, shape.kernel_block_size, shape.width
    tables = V1Tables(install, *sizes, num_reqs, MAX_TOKENS)
    rows = data.rows.tolist()
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


def _case(data: Steps, restore: Callable[[], object], one: Callable[[int], Found]) -> Case:
    """Return the case of a whole step; `reset` goes back to the first of `STEPS_IN_A_ROW`."""
    step = 0

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
        return max(data.check(done, *run()) for done in range(STEPS_IN_A_ROW))

    return Case(run, check, reset, STEPS_IN_A_ROW)


def step(seed: int, model: str, step: str) -> Case:
    """Build the engine's step on the CPU."""
    data = Steps(seed, _shape(model, step))
    return _case(data, *_engine_step(data))


def total(seed: int, scenario: str, subject: str) -> Case:
    """Build the same in two equal groups of attention, by the engine or by others."""
    data = Steps(seed, TOTALS[scenario])
    if subject == ENGINE:
        return _case(data, *_engine_step(data))
    (install,) = (install for install in installs() if subject == _name(install))
    return _case(data, *_peer_step(data, install))


def update_kernel(seed: int, model: str, step: str, device: str = "cuda") -> Case:
    """Build the first of these steps as one launch."""
    from hybrid_kv.kernels.block_tables import (
        DeviceTables,
        StagedBlocks,
        StepBatch,
        update_block_tables,
    )

    data = Steps(seed, _shape(model, step))
    shape, everyone = data.shape, np.arange(data.shape.num_reqs)
    tables = DeviceTables(data.layouts, shape.num_reqs, MAX_TOKENS, torch.device(device))

    def staged(
        rows: npt.NDArray[np.int64], ids: npt.NDArray[np.int32], overwrite: bool
    ) -> StagedBlocks:
        counts = torch.full((len(rows), len(data.layouts)), ids.shape[2], dtype=torch.int32)
        parts = (torch.from_numpy(ids).reshape(-1), torch.from_numpy(rows).int(), counts)
        starts = torch.full((len(rows),), overwrite)
        return StagedBlocks(*(part.to(device) for part in parts), starts.to(device))

    def batch(tokens_each: int, positions: torch.Tensor) -> StepBatch:
        begins = torch.arange(len(everyone) + 1, dtype=torch.int32) * tokens_each
        parts = (torch.from_numpy(everyone), begins, positions)
        return StepBatch(*(part.to(device) for part in parts), len(everyone), len(positions))

    before = staged(everyone, data.held, overwrite=True)
    new = staged(data.rows, data.new[0], overwrite=data.is_new)
    first = batch(1, torch.zeros(len(everyone), dtype=torch.int64))
    this = batch(shape.tokens, data.positions[0])

    def reset() -> None:
        # Every row has a new owner, whose first blocks the input tables hold already.
        update_block_tables(tables, before, first)

    def run() -> None:
        update_block_tables(tables, new, this)

    def check() -> float:
        reset()
        run()
        return data.check(0, tables.input_tables, tables.slot_mappings)

    # A decode step's blocks go behind those of the last call: as many calls as the row has room
    # for.
    return Case(run, check, reset, (shape.width - shape.held) // shape.blocks)


def _name(install: Install) -> str:
    return f"vllm {install.version} V1"


def _promise(scenario: str, subject: str) -> float | None:
    """Return the promise of a rival: twice as fast where ids change, and never slower."""
    return None if subject == ENGINE else 2.0 if TOTALS[scenario].appends else 1.0


def table_updates(device: str, model: str, step: str) -> Contest:
    """Return the contest of all groups' block tables of a step in one launch.

    They are a few bytes, so only its time says anything.
    """
    params = {"model": model, "step": step}
    make = partial(update_kernel, seed("block_tables", params), model, step, device)
    return Contest("block_tables", params, {"triton": Rival(make, 0)})


def gpu_contests(quick: bool, device: str) -> Iterator[Contest]:
    """Yield a contest of every kind of step."""
    for model, step in product(models(quick), STEPS):
        yield table_updates(device, model, step)


def cells() -> list[Cell]:
    """Return the cells of whole steps, with rivals, and of a step and a launch for two models."""
    values: dict[str, tuple[Scalar, ...]] = {"model": tuple(LAYOUTS), "step": tuple(STEPS)}
    quick = [("nemotron-3-nano",)]
    subjects = (ENGINE, *(_name(install) for install in installs()))
    totals: dict[str, tuple[Scalar, ...]] = {"scenario": tuple(TOTALS), "subject": subjects}
    quick_totals = [("16 of 256 append, width 40",)]
    return [
        *promised(_promise, grid("block_tables", "total", "cpu", total, totals, quick_totals)),
        *grid("block_tables", "step", "cpu", step, values, quick),
        *grid("block_tables", "update_kernel", "gpu", update_kernel, values, quick),
    ]

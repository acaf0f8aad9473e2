"""Host cost of bringing block ids to the int32 buffer that the device write reads.

Every subject starts from the ids in the form in which its engine holds them (lists of ints in vLLM,
int32 arrays here) and ends in a preallocated int32 buffer, or, where its engine makes a new one
each step, in that one. The engine path stages ids, rows and counts; targets and kernel blocks are
computed by the device's write and gather. The vLLM models' device kernels are left out likewise.

A case is a whole step of a hybrid with `NUM_GROUPS` groups, `engine` being the runner's loop of
`append_block_ids` over the requests that got blocks, against small models of what vLLM does,
written from its behaviour: `vllm 0.22 V2` expands by list comprehension (vllm!38831), `vllm 0.32
V2` stages unexpanded ids in lists.
"""

from __future__ import annotations

from array import array
from dataclasses import dataclass
from itertools import cycle

import numpy as np
import numpy.typing as npt
import torch

from hybrid_kv.cache.block_table import BlockTables
from hybrid_kv.measure.timing.case import ENGINE, TimedCase, WrongResultError
from hybrid_kv.measure.timing.clock import Interval, ratio
from hybrid_kv.measure.timing.together import time_together

KERNEL_BLOCK_SIZE = 16
NUM_GROUPS = 2
HELD_BLOCKS = 32  # of a decoding request
BLOCKS_PER_KV_BLOCK = 8  # in the guard
ROUNDS = 15
REPEATS = 50  # of a step in a row
SPARE = 8  # times as many rows as requests
STAGINGS = ("vllm 0.22 V2", "vllm 0.32 V2", ENGINE)


@dataclass(frozen=True)
class IdScenario:
    """One step: `num_appends` of `num_reqs` requests get `num_blocks` blocks in each group."""

    num_reqs: int
    num_appends: int
    num_blocks: int
    new_rows: bool


SCENARIOS = {
    "decode, 16 of 256 append 1": IdScenario(256, 16, 1, new_rows=False),
    "decode, 256 of 256 append 1": IdScenario(256, 256, 1, new_rows=False),
    "8 prefills x 64": IdScenario(8, 8, 64, new_rows=True),
    "32 prefills x 256": IdScenario(32, 32, 256, new_rows=True),
    "resume 1 x 8192": IdScenario(1, 1, 8192, new_rows=True),
}
# How many times longer than the engine path a subject must take: in the guard's scenarios a quarter
# to a half of what was measured. Elsewhere the engine path must be the fastest.
REQUIRED = {
    "decode, 16 of 256 append 1": {"vllm 0.22 V2": 4.0, "vllm 0.32 V2": 2.5},
    "32 prefills x 256": {"vllm 0.22 V2": 150.0, "vllm 0.32 V2": 15.0},
}


def required_ratio(scenario: str, subject: str) -> float:
    """Return the ratio of `REQUIRED`, or 1."""
    return REQUIRED.get(scenario, {}).get(subject, 1.0)


def forget_staged(tables: BlockTables) -> None:
    """Empty the staging buffer without the device write, which is not what is timed."""
    tables._num_ids = tables._num_staged = 0


def must_equal(result: npt.NDArray[np.int32], expected: npt.NDArray[np.int32]) -> float:
    """Compare integers, which are right or wrong: return 0.0, or raise `WrongResultError`."""
    if result.shape != expected.shape or (result != expected).any():
        raise WrongResultError("the kernel blocks are not those of the ids")
    return 0.0


class ListStaging:
    """vLLM's V2 runner: per group, Python lists of rows, starts, ends and contents.

    A step makes a new tensor of contents.
    """

    def __init__(self, num_reqs: int, blocks_per_kv_block: int, expands: bool) -> None:
        self.bpk = blocks_per_kv_block if expands else 1
        self.num_blocks = np.zeros((NUM_GROUPS, num_reqs), dtype=np.int32)
        self.staged: list[tuple[list[int], ...]] = [([], [], [], []) for _ in range(NUM_GROUPS)]
        self.buffers = np.zeros((NUM_GROUPS, 3, num_reqs), dtype=np.int32)
        self.contents: list[torch.Tensor] = [torch.empty(0)] * NUM_GROUPS

    def append(self, row: int, new_block_ids: tuple[list[int], ...], overwrite: bool) -> None:
        for group, ids in enumerate(new_block_ids):
            start = 0 if overwrite else self.num_blocks[group, row]
            if self.bpk > 1:
                ids = [block_id * self.bpk + k for block_id in ids for k in range(self.bpk)]
            self.num_blocks[group, row] = start + len(ids)
            if ids:
                rows, starts, ends, contents = self.staged[group]
                rows.append(row)
                starts.append(start)
                contents.extend(ids)
                ends.append(len(contents))

    def finish(self) -> None:
        for group, staged in enumerate(self.staged):
            *segments, contents = staged
            for buffer, values in zip(self.buffers[group], segments, strict=True):
                buffer[: len(values)] = values
            self.contents[group] = torch.tensor(contents, dtype=torch.int32)
            for values in staged:
                values.clear()


@dataclass(frozen=True)
class _Ids:
    """The block ids of a step.

    Attributes:
        rows: of the requests that get blocks.
        blocks: [num_appends, NUM_GROUPS, num_blocks] int32.
        held: blocks of each row before.
        bpk: kernel blocks of a block.
    """

    shape: IdScenario
    rows: list[int]
    blocks: npt.NDArray[np.int32]
    held: int
    bpk: int

    @classmethod
    def draw(cls, seed: int, shape: IdScenario, bpk: int) -> _Ids:
        """Draw rows and ids."""
        rng = np.random.default_rng(seed)
        rows = rng.permutation(shape.num_reqs)[: shape.num_appends]
        size = (shape.num_appends, NUM_GROUPS, shape.num_blocks)
        blocks = rng.integers(1, 1 << 20, size).astype(np.int32)
        return cls(shape, rows.tolist(), blocks, 0 if shape.new_rows else HELD_BLOCKS, bpk)

    @property
    def kernel_blocks(self) -> npt.NDArray[np.int32]:
        """Kernel blocks [NUM_GROUPS, num_appends, num_blocks * bpk]."""
        kernel = self.blocks[..., None] * self.bpk + np.arange(self.bpk, dtype=np.int32)
        return kernel.swapaxes(0, 1).reshape(NUM_GROUPS, len(self.rows), -1)


def _list_staging(ids: _Ids, expands: bool) -> TimedCase:
    model = ListStaging(ids.shape.num_reqs, ids.bpk, expands)
    expected = ids.kernel_blocks
    lists = [tuple(groups.tolist()) for groups in ids.blocks]
    rows = ids.rows
    new_rows = ids.shape.new_rows

    def reset() -> None:
        model.num_blocks[:] = ids.held * model.bpk

    def run() -> None:
        for row, new_block_ids in zip(rows, lists, strict=True):
            model.append(row, new_block_ids, new_rows)
        model.finish()

    def check() -> float:
        reset()
        run()
        kernel = torch.stack(model.contents).numpy()
        if not expands:
            kernel = kernel.reshape(-1, 1) * ids.bpk + np.arange(ids.bpk, dtype=np.int32)
        return must_equal(kernel.reshape(expected.shape), expected)

    return TimedCase(run, check, reset, REPEATS)


def _engine_staging(ids: _Ids) -> TimedCase:
    shape = ids.shape
    n = shape.num_appends
    tables = BlockTables(
        [KERNEL_BLOCK_SIZE * ids.bpk] * NUM_GROUPS,
        [KERNEL_BLOCK_SIZE] * NUM_GROUPS,
        SPARE * shape.num_reqs,
        shape.num_reqs,
        [shape.num_blocks if shape.new_rows else ids.held + REPEATS] * NUM_GROUPS,
        torch.device("cpu"),
    )
    expected = ids.kernel_blocks
    flat = [groups.reshape(-1) for groups in ids.blocks]
    counts = array("i", [shape.num_blocks] * NUM_GROUPS)
    new_rows = shape.new_rows
    # Each repeat of a step has rows of its own, since a row is staged once between two updates.
    every_rows = [[row + i * shape.num_reqs for row in ids.rows] for i in range(SPARE)]
    all_rows = cycle(every_rows)
    ones = np.ones(n, dtype=np.int64)
    positions = torch.zeros(n, dtype=torch.int64)

    def stage(rows: list[int]) -> None:
        for row, new_block_ids in zip(rows, flat, strict=True):
            tables.append_block_ids(row, new_block_ids, counts, new_rows)

    def run() -> None:
        stage(next(all_rows))

    def reset() -> None:
        forget_staged(tables)

    def check() -> float:
        forget_staged(tables)
        tables.num_blocks[:] = ids.held
        tables.forget()
        written = next(all_rows)
        stage(written)
        tables.update(np.array(written), ones, positions, n, n)
        gathered = torch.stack([table[:n] for table in tables.input_tables]).numpy()
        columns = slice(ids.held * ids.bpk, (ids.held + shape.num_blocks) * ids.bpk)
        return must_equal(gathered[:, :, columns], expected)

    return TimedCase(run, check, reset, SPARE)


def step(seed: int, scenario: str, blocks_per_kv_block: int, subject: str) -> TimedCase:
    """Make the case of a whole step."""
    ids = _Ids.draw(seed, SCENARIOS[scenario], blocks_per_kv_block)
    if subject == ENGINE:
        return _engine_staging(ids)
    return _list_staging(ids, expands=subject == "vllm 0.22 V2")


def guarded_ratios() -> dict[tuple[str, str], Interval]:
    """Return how many times longer than the engine path subjects of `REQUIRED` take.

    Keys are scenario and subject. Below `required_ratio` the engine path has lost what it promises.

    Below `required_ratio` the engine path has lost what it promises.

    Raises:
        WrongResultError: a subject computed something else than the others.
    """
    ratios = {}
    for scenario in REQUIRED:
        timed = time_together(
            {name: step(0, scenario, BLOCKS_PER_KV_BLOCK, name) for name in STAGINGS}, ROUNDS
        )
        for name in STAGINGS:
            if name != ENGINE:
                ratios[scenario, name] = ratio(timed[name].samples, timed[ENGINE].samples)
    return ratios

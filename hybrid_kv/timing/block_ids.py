"""Host cost of bringing block ids to the int32 buffer that the device write reads.

Every subject starts from the ids in the form in which its engine holds them (lists of ints in vLLM, int32 arrays here)
and ends in a preallocated int32 buffer, or, where its engine makes a new one each step, in that one. The engine path
stages ids, rows and counts; targets and kernel blocks are computed by the device's write and gather. The vLLM models'
device kernels are left out likewise.

A case is a whole step of a hybrid with `NUM_GROUPS` groups, `engine` being the runner's loop of `append_block_ids` over
the requests that got blocks, against small models of what vLLM does, written from its behaviour:
`vllm 0.22 V2` expands by list comprehension (vllm!38831), `vllm 0.32 V2` stages unexpanded ids in lists.
"""

from __future__ import annotations

from array import array
from dataclasses import dataclass
from itertools import cycle

import numpy as np
import numpy.typing as npt
import torch

from hybrid_kv.cache.block_table import BlockTables
from hybrid_kv.timing.case import ENGINE, Case, WrongResultError
from hybrid_kv.timing.clock import Interval, ratio
from hybrid_kv.timing.together import time_together

KERNEL_BLOCK_SIZE = 16
NUM_GROUPS = 2
HELD_BLOCKS = 32  # of a decoding request
BLOCKS_PER_KV_BLOCK = 8  # in the guard
ROUNDS = 15
STAGINGS = ("vllm 0.22 V2", "vllm 0.32 V2", ENGINE)


@dataclass(frozen=True)
class Scenario:
    """One step: `num_appends` of `num_reqs` requests get `num_blocks` blocks in each group."""

    num_reqs: int
    num_appends: int
    num_blocks: int
    new_rows: bool


SCENARIOS = {
    "decode, 16 of 256 append 1": Scenario(256, 16, 1, False),
    "decode, 256 of 256 append 1": Scenario(256, 256, 1, False),
    "8 prefills x 64": Scenario(8, 8, 64, True),
    "32 prefills x 256": Scenario(32, 32, 256, True),
    "resume 1 x 8192": Scenario(1, 1, 8192, True),
}
# How many times longer than the engine path a subject must take: in the guard's scenarios a quarter to a half of what
# was measured. Elsewhere the engine path must be the fastest.
REQUIRED = {
    "decode, 16 of 256 append 1": {"vllm 0.22 V2": 4.0, "vllm 0.32 V2": 2.5},
    "32 prefills x 256": {"vllm 0.22 V2": 150.0, "vllm 0.32 V2": 15.0},
}


def required_ratio(scenario: str, subject: str) -> float:
    """See `REQUIRED`."""
    return REQUIRED.get(scenario, {}).get(subject, 1.0)


def forget_staged(tables: BlockTables) -> None:
    """Empty the staging buffer without the device write, which is not what is timed."""
    tables._num_ids = tables._num_staged = 0


def must_equal(result: npt.NDArray[np.int32], expected: npt.NDArray[np.int32]) -> float:
    """Integers are right or wrong: 0.0, or `WrongResultError`."""
    if result.shape != expected.shape or (result != expected).any():
        raise WrongResultError("the kernel blocks are not those of the ids")
    return 0.0


class _ListStaging:
    """vLLM's V2 runner: per group, Python lists of rows, starts, ends and contents; a new tensor of contents a step."""

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


def step(seed: int, scenario: str, blocks_per_kv_block: int, subject: str) -> Case:
    """A whole step."""
    shape, bpk = SCENARIOS[scenario], blocks_per_kv_block
    n, count, new_rows, num_reqs = shape.num_appends, shape.num_blocks, shape.new_rows, shape.num_reqs
    rng = np.random.default_rng(seed)
    held = 0 if new_rows else HELD_BLOCKS
    repeats = 50
    spare = 8  # times as many rows as requests
    width = count if new_rows else held + repeats
    rows = rng.permutation(num_reqs)[:n]
    blocks = rng.integers(1, 1 << 20, (n, NUM_GROUPS, count)).astype(np.int32)
    flat = [groups.reshape(-1) for groups in blocks]
    lists = [tuple(groups.tolist()) for groups in blocks]
    row_list = rows.tolist()
    counts = array("i", [count] * NUM_GROUPS)
    # [NUM_GROUPS, n, count * bpk]
    expected = (blocks.transpose(1, 0, 2)[..., None] * bpk + np.arange(bpk, dtype=np.int32)).reshape(NUM_GROUPS, n, -1)

    def list_staging(expands: bool) -> Case:
        model = _ListStaging(num_reqs, bpk, expands)

        def reset() -> None:
            model.num_blocks[:] = held * model.bpk

        def run() -> None:
            for row, ids in zip(row_list, lists, strict=True):
                model.append(row, ids, new_rows)
            model.finish()

        def check() -> float:
            reset()
            run()
            staged = torch.stack(model.contents).numpy()
            kernel = staged if expands else staged.reshape(-1, 1) * bpk + np.arange(bpk, dtype=np.int32)
            return must_equal(kernel.reshape(expected.shape), expected)

        return Case(run, check, reset, repeats)

    if subject != ENGINE:
        return list_staging(expands=subject == "vllm 0.22 V2")

    tables = BlockTables(
        [KERNEL_BLOCK_SIZE * bpk] * NUM_GROUPS,
        [KERNEL_BLOCK_SIZE] * NUM_GROUPS,
        spare * num_reqs,
        num_reqs,
        [width] * NUM_GROUPS,
        torch.device("cpu"),
    )

    # Each repeat of a step has rows of its own, since a row is staged once between two updates.
    all_rows = cycle([[row + i * num_reqs for row in row_list] for i in range(spare)])
    ones, positions = np.ones(n, dtype=np.int64), torch.zeros(n, dtype=torch.int64)

    def stage(rows: list[int]) -> None:
        for row, ids in zip(rows, flat, strict=True):
            tables.append_block_ids(row, ids, counts, new_rows)

    def check() -> float:
        forget_staged(tables)
        tables.num_blocks[:] = held
        tables.forget()
        stage(written := next(all_rows))
        tables.update(np.array(written), ones, positions, n, n)
        gathered = torch.stack([table[:n] for table in tables.input_tables]).numpy()
        return must_equal(gathered[:, :, held * bpk : (held + count) * bpk], expected)

    return Case(lambda: stage(next(all_rows)), check, lambda: forget_staged(tables), spare)


def guarded_ratios() -> dict[tuple[str, str], Interval]:
    """By scenario of `REQUIRED` and subject: how many times longer than the engine path it takes.

    Below `required_ratio` the engine path has lost what it promises.

    Raises:
        WrongResultError: a subject computed something else than the others.
    """
    found = {}
    for scenario in REQUIRED:
        timed = time_together({name: step(0, scenario, BLOCKS_PER_KV_BLOCK, name) for name in STAGINGS}, ROUNDS)
        for name in STAGINGS:
            if name != ENGINE:
                found[scenario, name] = ratio(timed[name].samples, timed[ENGINE].samples)
    return found

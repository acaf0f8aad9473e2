"""Host cost of bringing block ids to the int32 buffer that the device write reads.

Every subject starts from the ids in the form in which its engine holds them (lists of ints in vLLM, int32 arrays here)
and ends in a preallocated int32 buffer, or, where its engine makes a new one each step, in that one. The engine path
stages ids, rows and counts; targets and kernel blocks are computed by the device's write and gather, whose cost (here
on a CPU) is shown beside it. The vLLM models' device kernels are left out likewise.

Table 1: one append, by `list`, `numpy`, `torch` and `engine` (`BlockTables.append_block_ids`).
Table 2: a whole step of a hybrid with `NUM_GROUPS` groups, `engine` being the runner's loop of `append_block_ids` over
the requests that got blocks, against small models of what vLLM does, written from its behaviour:
`vllm 0.22 V1` expands in numpy into a host table (its copy of whole rows is left out, in its favour), `vllm 0.22 V2`
expands by list comprehension (vllm!38831), `vllm 0.32 V2` stages unexpanded ids in lists.
"""

from __future__ import annotations

import json
from array import array
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from itertools import cycle
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from hybrid_kv.cache.block_table import BlockTables
from hybrid_kv.kernels.kernel_blocks import expand_list, expand_numpy, expand_torch
from hybrid_kv.results import provenance, read_rows
from hybrid_kv.timing.cases import Case, Cell, Scalar, WrongResultError, grid
from hybrid_kv.timing.measurement import ENGINE, QUICK_ROUNDS, Measurement, groups, measure_together

SUITE = "kernel_blocks"
NUM_BLOCKS = (1, 4, 16, 32, 64, 256, 1024, 4096, 16384)
BLOCKS_PER_KV_BLOCK = (2, 4, 8, 34)
QUICK_CELLS = ((1, 2), (16, 8), (256, 8), (256, 34))
KERNEL_BLOCK_SIZE = 16
NUM_GROUPS = 2
HELD_BLOCKS = 32  # of a decoding request
EXPANSIONS = ("list", "numpy", "torch", ENGINE)
STAGINGS = ("vllm 0.22 V1", "vllm 0.22 V2", "vllm 0.32 V2", ENGINE, "device")


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
QUICK_SCENARIOS = ("decode, 16 of 256 append 1", "32 prefills x 256")
_REQUIRED_OF_032 = {"decode, 16 of 256 append 1": 2.5, "32 prefills x 256": 10.0}


def required_ratio(benchmark: str, params: Mapping[str, Any]) -> float:
    """How many times longer than the engine path a subject must take; 1: the engine path must be the fastest."""
    if benchmark == "step" and params["subject"] == "vllm 0.32 V2":
        return _REQUIRED_OF_032.get(params["scenario"], 1.0)
    return 1.0


ONE, FIRST = np.ones(1, dtype=np.int64), torch.zeros(1, dtype=torch.int64)  # a request's first token
RESULTS = Path(__file__).resolve().parents[2] / "results" / "microbench.csv"


def recorded_ratios(file: Path = RESULTS) -> dict[tuple[str, str], float]:
    """The best ratio to the engine path that a clean commit recorded on this kind of machine; empty without one.

    Keys are (benchmark, params as sorted JSON). The best, not the newest: a slow commit must not lower the bar.
    """
    if not file.exists():
        return {}
    frame = read_rows(file)
    usable = (frame["metric"] == "ratio_to_engine") & (frame["machine"] == provenance().machine) & ~frame["dirty"]
    ratios: dict[tuple[str, str], float] = {}
    best = frame[usable]
    for benchmark, text, value in zip(best["benchmark"], best["params"], best["value"], strict=True):
        params = {name: one for name, one in json.loads(text).items() if name != "receipt"}
        key = benchmark, json.dumps(params, sort_keys=True)
        ratios[key] = max(ratios.get(key, 0.0), value)
    return ratios


def forget_staged(tables: BlockTables) -> None:
    """Empty the staging buffer without the device write, which is not what is timed."""
    tables._num_ids = tables._num_staged = 0


# ---- one append ----


def _must_equal(result: npt.NDArray[np.int32], expected: npt.NDArray[np.int32]) -> float:
    """Integers are right or wrong: 0.0, or `WrongResultError`."""
    if result.shape != expected.shape or (result != expected).any():
        raise WrongResultError("the kernel blocks are not those of the ids")
    return 0.0


def expansion(seed: int, num_blocks: int, blocks_per_kv_block: int, subject: str) -> Case:
    """One append."""
    bpk = blocks_per_kv_block
    ids = np.random.default_rng(seed).integers(1, 1 << 20, num_blocks).astype(np.int32)
    id_list = ids.tolist()
    expected = np.array([b * bpk + k for b in id_list for k in range(bpk)], dtype=np.int32)
    if subject == ENGINE:
        return _engine_append(ids, expected, bpk)
    buffer = torch.zeros(len(expected), dtype=torch.int32)
    numpy_buffer = buffer.numpy()
    view = memoryview(numpy_buffer)
    offsets = torch.arange(bpk, dtype=torch.int32)

    def run_list() -> None:
        view[:] = array("i", expand_list(id_list, bpk))

    def run_numpy() -> None:
        numpy_buffer[:] = expand_numpy(id_list, bpk)

    def run_torch() -> None:
        buffer.copy_(expand_torch(torch.tensor(id_list, dtype=torch.int32), offsets))

    run = {"list": run_list, "numpy": run_numpy, "torch": run_torch}[subject]

    def check() -> float:
        buffer.zero_()
        run()
        return _must_equal(numpy_buffer, expected)

    return Case(run, check)


def _engine_append(ids: npt.NDArray[np.int32], expected: npt.NDArray[np.int32], bpk: int) -> Case:
    # As many rows as calls in one sample, so that none of them finds the staging buffer full.
    n = len(ids)
    rows = max(4, min(500, (1 << 20) // n))
    tables = BlockTables([KERNEL_BLOCK_SIZE * bpk], [KERNEL_BLOCK_SIZE], rows, 1, [n], torch.device("cpu"))
    counts = array("i", [n])
    next_row = cycle(range(rows)).__next__

    def run() -> None:
        tables.append_block_ids(next_row(), ids, counts, True)

    def check() -> float:
        forget_staged(tables)
        tables.tables[0].zero_()
        run()
        (table,), _ = tables.update(np.array([(next_row() - 1) % rows]), ONE, FIRST, 1, 1)
        return _must_equal(table[0].numpy(), expected)

    return Case(run, check, partial(forget_staged, tables), rows)


# ---- a whole step ----


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
                ids = expand_list(ids, self.bpk)
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


class _HostTable:
    """vLLM 0.22's V1 runner: numpy expansion into a host table per group."""

    def __init__(self, num_reqs: int, width: int, blocks_per_kv_block: int) -> None:
        self.bpk = blocks_per_kv_block
        self.offsets = np.arange(blocks_per_kv_block).reshape(1, -1)
        self.num_blocks = np.zeros((NUM_GROUPS, num_reqs), dtype=np.int32)
        self.tables = np.zeros((NUM_GROUPS, num_reqs, width * blocks_per_kv_block), dtype=np.int32)

    def append(self, row: int, new_block_ids: tuple[list[int], ...], overwrite: bool) -> None:
        for group, ids in enumerate(new_block_ids):
            expanded = (np.array(ids).reshape(-1, 1) * self.bpk + self.offsets).reshape(-1)
            start = 0 if overwrite else self.num_blocks[group, row]
            self.num_blocks[group, row] = start + len(expanded)
            self.tables[group, row, start : start + len(expanded)] = expanded


def step(seed: int, scenario: str, blocks_per_kv_block: int, num_groups: int, subject: str) -> Case:
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
    arrays = [tuple(groups) for groups in blocks]
    flat = [groups.reshape(-1) for groups in blocks]
    lists = [tuple(ids.tolist() for ids in groups) for groups in arrays]
    row_list = rows.tolist()
    counts, held_counts = (array("i", [number] * NUM_GROUPS) for number in (count, held))
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
            return _must_equal(kernel.reshape(expected.shape), expected)

        return Case(run, check, reset, repeats)

    def host_table() -> Case:
        model = _HostTable(num_reqs, width, bpk)

        def reset() -> None:
            model.num_blocks[:] = held * bpk

        def run() -> None:
            for row, ids in zip(row_list, lists, strict=True):
                model.append(row, ids, new_rows)

        def check() -> float:
            reset()
            model.tables[:] = 0
            run()
            return _must_equal(model.tables[:, rows, held * bpk : (held + count) * bpk], expected)

        return Case(run, check, reset, repeats)

    if subject == "vllm 0.22 V1":
        return host_table()
    if subject != ENGINE and subject != "device":
        return list_staging(expands=subject == "vllm 0.22 V2")

    tables = BlockTables(
        [KERNEL_BLOCK_SIZE * bpk] * NUM_GROUPS,
        [KERNEL_BLOCK_SIZE] * NUM_GROUPS,
        spare * num_reqs,
        num_reqs,
        [width] * NUM_GROUPS,
        torch.device("cpu"),
    )

    held_ids = np.ones(held * NUM_GROUPS, dtype=np.int32)

    def reset() -> None:
        forget_staged(tables)
        if subject == "device":
            for row in range(num_reqs):
                tables.append_block_ids(row, held_ids, held_counts, True)
            tables.update(batch, ones, positions, num_reqs, num_reqs)

    # Each repeat of a step has rows of its own, since a row is staged once between two updates.
    all_rows = cycle([[row + i * num_reqs for row in row_list] for i in range(spare)])
    batch, ones, positions = np.arange(num_reqs), np.ones(num_reqs, dtype=np.int64), FIRST.expand(num_reqs)

    def stage(rows: list[int]) -> None:
        for row, ids in zip(rows, flat, strict=True):
            tables.append_block_ids(row, ids, counts, new_rows)

    def run() -> None:
        stage(next(all_rows))

    def run_device() -> None:
        stage(row_list)
        tables.update(batch, ones, positions, num_reqs, num_reqs)

    def check() -> float:
        reset()
        if subject == ENGINE:
            tables.num_blocks[:] = held
            tables.forget()
            stage(written := next(all_rows))
            tables.update(np.array(written), ones[:n], positions[:n], n, n)
            places = list(range(n))
        else:
            run_device()
            places = row_list
        gathered = torch.stack([table[places] for table in tables.input_tables]).numpy()
        return _must_equal(gathered[:, :, held * bpk : (held + count) * bpk], expected)

    return Case(run if subject == ENGINE else run_device, check, reset, spare)


# ---- the cells, and what the guard asks ----


def cells() -> list[Cell]:
    """Both tables; the engine and what it is compared with."""
    appends: dict[str, tuple[Scalar, ...]] = {
        "num_blocks": NUM_BLOCKS,
        "blocks_per_kv_block": BLOCKS_PER_KV_BLOCK,
        "subject": EXPANSIONS,
    }
    steps: dict[str, tuple[Scalar, ...]] = {
        "scenario": tuple(SCENARIOS),
        "blocks_per_kv_block": (8, 34),
        "num_groups": (NUM_GROUPS,),
        "subject": STAGINGS,
    }
    quick_steps = [(name, 8) for name in QUICK_SCENARIOS]
    return [
        *grid(SUITE, "expand", "cpu", expansion, appends, QUICK_CELLS, partial(_promise, "expand")),
        *grid(SUITE, "step", "cpu", step, steps, quick_steps, partial(_promise, "step")),
    ]


def _promise(benchmark: str, **params: Any) -> float | None:
    return None if params["subject"] in (ENGINE, "device") else required_ratio(benchmark, params)


def quick_ratios() -> list[tuple[str, dict[str, Any], float, float, float]]:
    """`(benchmark, params, ratio, low, high)`: how many times longer than the engine path each alternative takes.

    Compare `high` with `required_ratio(benchmark, params)`: below it, the engine path lost what it promises.

    Raises:
        WrongResultError: a subject computed something else than the others.
    """
    return [
        (one.cell.benchmark, dict(one.cell.params), one.ratio.value, one.ratio.low, one.ratio.high)
        for group in groups([cell for cell in cells() if cell.quick and cell.tier == "cpu"])
        for one in measure_together(group, QUICK_ROUNDS)
        if isinstance(one, Measurement) and one.ratio is not None and one.verdict
    ]

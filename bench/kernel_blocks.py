"""Block ids to kernel blocks: what that costs the host (one append; a step, `hybrid_kv.timing.block_ids`), and a whole
table on a GPU.

One append, by `list`, `numpy`, `torch` and `engine` (`BlockTables.append_block_ids`): the first three expand, as other
engines do or did; the engine stages ids as they are.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterator
from functools import partial
from itertools import cycle
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
import torch

from bench._reference import equal
from bench.harness.cells import Case, Cell, grid
from bench.harness.contest import Contest, kernel_and_torch
from hybrid_kv.cache.block_table import BlockTables
from hybrid_kv.kernels.common.integers import cdiv
from hybrid_kv.kernels.common.launch import check, jit
from hybrid_kv.timing import block_ids
from hybrid_kv.timing.case import ENGINE

if TYPE_CHECKING:
    import triton.language as tl

BLOCK = 1024  # kernel blocks of a program
SUITE = "kernel_blocks"
NUM_BLOCKS = (1, 16, 256, 4096)
BLOCKS_PER_KV_BLOCK = (2, 8, 34)
QUICK_CELLS = ((1, 2), (16, 8), (256, 8), (256, 34))
EXPANSIONS = ("list", "numpy", "torch", ENGINE)


def expand_torch(ids: torch.Tensor, offsets: torch.Tensor) -> torch.Tensor:
    """Broadcast sum in torch (vLLM 0.32, on the device); `offsets` is `arange(blocks_per_kv_block)`, int32."""
    return torch.add(offsets, ids.unsqueeze(-1), alpha=offsets.numel()).flatten(-2)


def _expand(
    block_ids: tl.tensor, out: tl.tensor, count: tl.tensor, BLOCKS_PER_KV_BLOCK: tl.constexpr, BLOCK: tl.constexpr
) -> None:
    # Lanes run over the kernel blocks: they are what is stored, and a manager block's id comes from memory once. A
    # constant divisor costs three instructions, a loaded one twenty; in 32 bit, counted from the program's first.
    start = tl.program_id(0).to(tl.int64) * BLOCK
    first = start // BLOCKS_PER_KV_BLOCK
    lane = tl.arange(0, BLOCK)
    inside = lane < count - start
    kernel_block = lane + (start - first * BLOCKS_PER_KV_BLOCK).to(tl.int32)
    column = kernel_block // BLOCKS_PER_KV_BLOCK
    block = tl.load(block_ids + first + column, mask=inside, other=0)
    expanded = block * BLOCKS_PER_KV_BLOCK + (kernel_block - column * BLOCKS_PER_KV_BLOCK)
    tl.store(out + start + lane, expanded, mask=inside)


def by_kernel(ids: torch.Tensor, offsets: torch.Tensor) -> torch.Tensor:
    """The same as one launch that does nothing else; the engine expands ids while it writes a step's input tables."""
    check("block_ids", ids, ids.shape, (torch.int32,), ids.device)
    out = ids.new_empty(*ids.shape[:-1], ids.shape[-1] * len(offsets))
    grid = (cdiv(out.numel(), BLOCK),)
    jit(_expand, ("count",))[grid](ids, out, out.numel(), BLOCKS_PER_KV_BLOCK=len(offsets), BLOCK=BLOCK)
    return out


def table_expansion(
    seed: int, num_rows: int, width: int, blocks_per_kv_block: int, implementation: Any, device: str
) -> Case:
    """A whole table of manager blocks to kernel blocks."""
    bpk = blocks_per_kv_block
    ids = np.random.default_rng(seed).integers(0, 2**31 // bpk, (num_rows, width)).astype(np.int32)
    expected = (ids[..., None] * bpk + np.arange(bpk)).reshape(num_rows, -1)
    block_ids, offsets = torch.from_numpy(ids).to(device), torch.arange(bpk, dtype=torch.int32, device=device)

    def run() -> torch.Tensor:
        return implementation(block_ids, offsets)

    return Case(run, lambda: equal("kernel blocks", run().cpu(), expected))


def expansions(device: str, num_rows: int, width: int, bpk: int) -> Contest:
    """The expansion alone, as other engines do it each step for whole tables."""
    params = {"num_rows": num_rows, "width": width, "blocks_per_kv_block": bpk}
    moved = 4 * num_rows * width * (1 + bpk)
    build = partial(table_expansion, device=device)
    return kernel_and_torch("expansion", params, build, by_kernel, expand_torch, moved, graph=True)


def gpu_contests(quick: bool, device: str) -> Iterator[Contest]:
    """Tables of one width, by the kernel blocks of a block."""
    for bpk in (34,) if quick else (2, 8, 34):
        yield expansions(device, 256, 241, bpk)


# ---- one append ----


def expansion(seed: int, num_blocks: int, blocks_per_kv_block: int, subject: str) -> Case:
    """One append: by a list (vllm!38831), in numpy (vLLM 0.22's V1 runner), in torch, or by the engine."""
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
        view[:] = array("i", [block_id * bpk + k for block_id in id_list for k in range(bpk)])

    def run_numpy() -> None:
        column = np.asarray(id_list, dtype=np.int32).reshape(-1, 1)
        numpy_buffer[:] = np.add(column * bpk, np.arange(bpk), dtype=np.int32).reshape(-1)

    def run_torch() -> None:
        buffer.copy_(expand_torch(torch.tensor(id_list, dtype=torch.int32), offsets))

    run = {"list": run_list, "numpy": run_numpy, "torch": run_torch}[subject]

    def check() -> float:
        buffer.zero_()
        run()
        return equal("kernel blocks", numpy_buffer, expected)

    return Case(run, check)


def _engine_append(ids: npt.NDArray[np.int32], expected: npt.NDArray[np.int32], bpk: int) -> Case:
    # As many rows as calls in one sample, so that none of them finds the staging buffer full.
    n = len(ids)
    rows = max(4, min(500, (1 << 20) // n))
    tables = BlockTables(
        [block_ids.KERNEL_BLOCK_SIZE * bpk], [block_ids.KERNEL_BLOCK_SIZE], rows, 1, [n], torch.device("cpu")
    )
    counts, ones, zeros = array("i", [n]), np.ones(1, dtype=np.int64), torch.zeros(1, dtype=torch.int64)
    next_row = cycle(range(rows)).__next__

    def run() -> None:
        tables.append_block_ids(next_row(), ids, counts, True)

    def check() -> float:
        block_ids.forget_staged(tables)
        tables.tables[0].zero_()
        run()
        (table,), _ = tables.update(np.array([(next_row() - 1) % rows]), ones, zeros, 1, 1)
        return equal("kernel blocks", table[0].numpy(), expected)

    return Case(run, check, partial(block_ids.forget_staged, tables), rows)


# ---- the cells ----


def _promise(**params: Any) -> float | None:
    """Of a rival."""
    if params["subject"] == ENGINE:
        return None
    return block_ids.required_ratio(params.get("scenario", ""), params["subject"])


def cells() -> list[Cell]:
    """The engine and its rivals on the host, one append and a whole step; on a GPU a table as others expand it."""
    appends = {"num_blocks": NUM_BLOCKS, "blocks_per_kv_block": BLOCKS_PER_KV_BLOCK, "subject": EXPANSIONS}
    steps = {
        "scenario": tuple(block_ids.SCENARIOS),
        "blocks_per_kv_block": (8, 34),
        "subject": block_ids.STAGINGS,
    }
    quick_steps = [(name, 8) for name in block_ids.REQUIRED]
    tables = {"num_rows": (256,), "width": (241,), "blocks_per_kv_block": BLOCKS_PER_KV_BLOCK}
    on_gpu = partial(table_expansion, implementation=by_kernel, device="cuda")
    return [
        *grid(SUITE, "expand", "cpu", expansion, appends, QUICK_CELLS, _promise),
        *grid(SUITE, "step", "cpu", block_ids.step, steps, quick_steps, _promise),
        *grid(SUITE, "expand_kernel", "gpu", on_gpu, tables, [(256, 241, 34)]),
    ]

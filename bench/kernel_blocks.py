"""Block ids to kernel blocks: the host's cost (`hybrid_kv.timing.block_ids`), and a whole table on a GPU."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import torch

from bench._reference import equal
from bench.harness.contest import Contest, Rival
from hybrid_kv.kernels.kernel_blocks import expand_torch, expand_triton
from hybrid_kv.timing import block_ids
from hybrid_kv.timing.cases import Case, Cell, grid, seed


def table_expansion(seed: int, num_rows: int, width: int, bpk: int, implementation: Any, device: str) -> Case:
    """A whole table of manager blocks to kernel blocks."""
    ids = np.random.default_rng(seed).integers(0, 2**31 // bpk, (num_rows, width)).astype(np.int32)
    expected = (ids[..., None] * bpk + np.arange(bpk)).reshape(num_rows, -1)
    block_ids, offsets = torch.from_numpy(ids).to(device), torch.arange(bpk, dtype=torch.int32, device=device)

    def run() -> torch.Tensor:
        return implementation(block_ids, offsets)

    return Case(run, lambda: equal("kernel blocks", run().cpu(), expected))


def table_expansion_gpu(seed: int, num_rows: int, width: int, blocks_per_kv_block: int) -> Case:
    """`table_expansion` as one launch."""
    bpk = blocks_per_kv_block
    return table_expansion(seed, num_rows, width, bpk, lambda ids, _: expand_triton(ids, bpk), "cuda")


def expansions(device: str, num_rows: int, width: int, bpk: int) -> Contest:
    """The expansion alone, as other engines do it each step for whole tables."""
    params = {"num_rows": num_rows, "width": width, "blocks_per_kv_block": bpk}
    number = seed("expansion", params)
    moved = 4 * num_rows * width * (1 + bpk)

    def build(implementation: Any) -> Case:
        return table_expansion(number, num_rows, width, bpk, implementation, device)

    return Contest(
        "expansion",
        params,
        {
            "triton": Rival(lambda: build(lambda ids, _: expand_triton(ids, bpk)), moved),
            "torch": Rival(lambda: build(expand_torch), moved),
        },
    )


def gpu_contests(quick: bool, device: str) -> Iterator[Contest]:
    """Tables of one width, by the kernel blocks of a block."""
    for bpk in (34,) if quick else (2, 8, 34):
        yield expansions(device, 256, 241, bpk)


def cells() -> list[Cell]:
    """The engine and its rivals on the host; and on a GPU a table as others expand it each step."""
    tables = {"num_rows": (256,), "width": (241,), "blocks_per_kv_block": block_ids.BLOCKS_PER_KV_BLOCK}
    return [
        *block_ids.cells(),
        *grid(block_ids.SUITE, "expand_kernel", "gpu", table_expansion_gpu, tables, [(256, 241, 34)]),
    ]

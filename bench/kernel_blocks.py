"""Block ids to kernel blocks: the host's cost (`hybrid_kv.timing.block_ids`), and a whole table on a GPU.

`model_without_kernels` holds the models of vLLM that stand in there against the real code of the same version, where
`--peers` names an install: both stage a step's ids, and neither runs what the device does with them.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from bench._reference import equal
from bench.harness.contest import Contest, Rival
from bench.peers import installs
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


# ---- the models of vLLM, and vLLM ----

MODEL, REAL = "model", "real"
STAGED_BLOCKS = 8  # kernel blocks of a block


def _models() -> dict[str, str]:
    """Each model that an install is there for, and the version of that."""
    versions = {install.version.rpartition(".")[0]: install.version for install in installs()}
    named = {model: versions.get(model.split()[1]) for model in block_ids.STAGINGS if model.startswith("vllm")}
    return {model: version for model, version in named.items() if version}


def staging(seed: int, scenario: str, model: str, version: str, subject: str) -> Case:
    """A step's ids handed over by a model of vLLM, or by what it is a model of."""
    if subject == MODEL:
        return block_ids.step(seed, scenario, STAGED_BLOCKS, block_ids.NUM_GROUPS, model)
    (install,) = (install for install in installs() if install.version == version)
    shape, groups = block_ids.SCENARIOS[scenario], block_ids.NUM_GROUPS
    count, is_new, held = shape.num_blocks, shape.new_rows, 0 if shape.new_rows else block_ids.HELD_BLOCKS
    repeats = 50
    rng = np.random.default_rng(seed)
    rows = rng.permutation(shape.num_reqs)[: shape.num_appends].tolist()
    blocks = rng.integers(1, 1 << 20, (len(rows), groups, count)).astype(np.int32)
    lists = [tuple(ids.tolist() for ids in request) for request in blocks]
    size = block_ids.KERNEL_BLOCK_SIZE
    sizes = groups, size * STAGED_BLOCKS, size, held + count * (1 if is_new else repeats), shape.num_reqs
    expanded = (blocks.swapaxes(0, 1)[..., None] * STAGED_BLOCKS + np.arange(STAGED_BLOCKS)).reshape(groups, -1)

    if model.endswith("V1"):
        from bench.peers.vllm_v1 import V1Tables

        tables = V1Tables(install, *sizes, tokens=1)
        bring = tables.add if is_new else tables.append

        def run() -> None:
            for row, ids in zip(rows, lists, strict=True):
                bring(ids, row)

        def handed_over() -> npt.NDArray[np.int32]:
            new = slice(held * STAGED_BLOCKS, (held + count) * STAGED_BLOCKS)
            return np.stack([table.block_table.np[rows, new].reshape(-1) for table in tables.groups])

        wanted = expanded
    else:
        from bench.peers.vllm_v2 import V2Staging

        tables = V2Staging(install, *sizes)

        def run() -> None:
            for row, ids in zip(rows, lists, strict=True):
                tables.append(row, ids, is_new)
            tables.finish()

        handed_over = tables.handed_over
        wanted = expanded if tables.expands else blocks.swapaxes(0, 1).reshape(groups, -1)

    def check() -> float:
        tables.rewind(held)
        run()
        return equal("handed over", handed_over(), wanted)

    return Case(run, check, lambda: tables.rewind(held), repeats)


def _comparisons() -> Iterator[Cell]:
    for model, version in _models().items():
        values = {"scenario": tuple(block_ids.SCENARIOS), "model": (model,), "version": (version,)}
        subjects = {"subject": (MODEL, REAL)}
        yield from grid(block_ids.SUITE, "model_without_kernels", "cpu", staging, values | subjects, base=REAL)


def cells() -> list[Cell]:
    """The engine and its rivals on the host; and on a GPU a table as others expand it each step."""
    tables = {"num_rows": (256,), "width": (241,), "blocks_per_kv_block": block_ids.BLOCKS_PER_KV_BLOCK}
    return [
        *block_ids.cells(),
        *_comparisons(),
        *grid(block_ids.SUITE, "expand_kernel", "gpu", table_expansion_gpu, tables, [(256, 241, 34)]),
    ]

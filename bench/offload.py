"""Blocks to host memory or a folder and back: attention and Mamba groups of two layers each.

The pages are those of Nemotron-3-Nano on one of eight ranks: a float32 state, padded to the
attention page.
"""

from __future__ import annotations

import shutil
import tempfile
import weakref
from collections.abc import Sequence
from itertools import count
from pathlib import Path

import torch

from bench._reference import equal
from bench._shapes import SHAPES
from bench.harness.cells import Case, Cell, WrongResultError, grid
from hybrid_kv.cache.layout import allocate_raw_buffers
from hybrid_kv.cache.offload import KVOffload
from hybrid_kv.cache.spec import (
    FullAttentionSpec,
    KVCacheConfig,
    KVCacheGroupSpec,
    MambaSpec,
    window_and_states,
)

NUM_BLOCKS = 33
BLOCK_SIZE = 544
Items = list[tuple[tuple[int, bytes], int]]


class Pool:
    """Random pages, and a tier that has room for `capacity` times `num_blocks` of them.

    Args:
        tier: host or folder.
    """

    def __init__(self, seed: int, tier: str, num_blocks: int, capacity: int) -> None:
        shape = SHAPES["nemotron-3-nano-tp8"]
        attention = FullAttentionSpec(BLOCK_SIZE, shape.kv_heads, shape.head_size, torch.bfloat16)
        window, state = (3, shape.channels), (shape.heads, shape.head_dim, shape.state_size)
        mamba = MambaSpec(
            BLOCK_SIZE,
            window_and_states((window, torch.bfloat16), (state, torch.float32)),
            page_size_padded=attention.page_size_bytes,
            mamba_cache_mode="align",
        )
        config = KVCacheConfig(
            NUM_BLOCKS,
            (KVCacheGroupSpec(("a0", "a1"), attention), KVCacheGroupSpec(("m0", "m1"), mamba)),
        )
        self.page_size = attention.page_size_bytes
        self.raw = allocate_raw_buffers(config, torch.device("cpu"))
        generator = torch.Generator().manual_seed(seed)
        for buffer in self.raw:
            flat = buffer.view(-1).view(torch.uint8)
            flat.copy_(torch.randint(0, 256, flat.shape, generator=generator, dtype=torch.uint8))
        room = capacity * num_blocks * 2 * self.page_size
        folder = None
        if tier == "folder":
            folder = Path(tempfile.mkdtemp(prefix="hybrid-kv-bench-"))
            weakref.finalize(self, shutil.rmtree, folder, ignore_errors=True)
        self.offload = KVOffload(
            config,
            self.raw,
            BLOCK_SIZE,
            host_bytes=room if folder is None else 0,
            folder=folder,
            folder_bytes=None if folder is None else room + room // 8,  # files have headers
        )
        self.num_blocks = num_blocks

    def items(self, name: int) -> Items:
        """Return keys of both groups, no other name has them, and the blocks 1 … num_blocks."""
        return [
            ((block % 2, (name * 64 + block).to_bytes(16, "big")), block)
            for block in range(1, 1 + self.num_blocks)
        ]

    def pages(self, blocks: Sequence[int]) -> torch.Tensor:
        """Return a copy, [len(blocks), layers, page_size_bytes] uint8."""
        layers = [buffer.view(-1).view(torch.uint8).view(NUM_BLOCKS, -1) for buffer in self.raw]
        return torch.stack([layer[list(blocks)] for layer in layers], dim=1)


def store(seed: int, tier: str, num_blocks: int) -> Case:
    """Build a store of blocks that the tier lacks; what it had before is evicted."""
    pool = Pool(seed, tier, num_blocks, capacity=2)
    names = count()

    def run() -> Items:
        items = pool.items(next(names))
        pool.offload.store(items)
        return items

    def check() -> float:
        items = run()
        fetched = pool.offload.fetch([key for key, _ in items])
        if fetched is None:
            raise WrongResultError("a block is lost")
        data = torch.stack([page.data.view(2, -1) for page in fetched])
        return equal("stored bytes", data, pool.pages([block for _, block in items]))

    return Case(run, check)


def load(seed: int, tier: str, num_blocks: int) -> Case:
    """Build a load of blocks from the tier into other blocks of the pool."""
    pool = Pool(seed, tier, num_blocks, capacity=1)
    items = pool.items(0)
    pool.offload.store(items)
    keys, sources = [key for key, _ in items], [block for _, block in items]
    targets = [block + num_blocks for block in sources]

    def run() -> None:
        pages = pool.offload.fetch(keys)
        if pages is None:
            raise WrongResultError("a block is lost")
        pool.offload.load(pages, targets)

    def check() -> float:
        for buffer in pool.raw:
            buffer.view(-1).view(torch.uint8).view(NUM_BLOCKS, -1)[targets] = 0
        run()
        return equal("loaded bytes", pool.pages(targets), pool.pages(sources))

    return Case(run, check)


def cells() -> list[Cell]:
    """Return the cells of both tiers.

    Storing is in no quick run: the system's page allocator makes pairs of equal code differ by 14
    %.
    """
    values = {"tier": ("folder", "host"), "num_blocks": (4, 16)}
    return [
        *grid("offload", "store", "cpu", store, values),
        *grid("offload", "load", "cpu", load, values, [("host", 4), ("folder", 4)]),
    ]

"""Host memory and a folder together, played with and held against lists of what each of them should have.

Stores, fetches and loads are drawn, of blocks of two sizes, in host memory that ends with the last byte of a block, a
byte before and a byte behind it. Every byte that comes back and every count is due. What else may happen to a folder is
`guard.shelf`'s.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch

from hybrid_kv.cache.block_pool import BlockKey
from hybrid_kv.cache.layout import allocate_raw_buffers
from hybrid_kv.cache.offload import KVOffload
from hybrid_kv.cache.spec import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec, MambaSpec, StatePart
from hybrid_kv.guard.kept import Host

PAGE, NUM_BLOCKS = 128, 7
PAGES = (2, 1)  # of a block, by group: as many layers
BYTES = tuple(PAGE * count for count in PAGES)
KEYS: list[BlockKey] = [(group, bytes([number]) * 16) for group in (0, 1) for number in range(5)]
LIMITS = tuple(size + more for size in (PAGE, 2 * PAGE, 3 * PAGE, 6 * PAGE) for more in (-1, 0, 1))
MUST_HAPPEN = ("host_hits", "folder_hits", "misses", "host_evictions", "corrupt_files", "full")


class Tiers:
    """One store, and what it should have.

    Args:
        folder: without blocks; None: host memory alone.

    Attributes:
        due: each figure of `OffloadStats`; and `full`: how often host memory was, to its last byte.
    """

    def __init__(self, rng: np.random.Generator, limit: int, folder: Path | None) -> None:
        self.rng, self.folder, self.due = rng, folder, Counter[str]()
        parts = (StatePart("state", (PAGE // 4,), torch.float32),)
        groups = (
            KVCacheGroupSpec(("a0", "a1"), FullAttentionSpec(4, 1, 8, torch.float16)),
            KVCacheGroupSpec(("m0",), MambaSpec(4, parts, mamba_cache_mode="all")),
        )
        config = KVCacheConfig(NUM_BLOCKS, groups)
        self.buffers = allocate_raw_buffers(config, torch.device("cpu"))
        self.tier = KVOffload(config, self.buffers, 4, host_bytes=limit, folder=folder)
        self.host, self.filed = Host(limit, BYTES), set[BlockKey]()
        self.contents = {key: rng.integers(0, 256, size=BYTES[key[0]], dtype=np.uint8) for key in KEYS}

    def check(self) -> None:
        """Raise AssertionError unless every count is as it should be."""
        self.due["host_evictions"] = self.host.num_left
        self.due["full"] += self.host.used == self.host.limit
        said = asdict(self.tier.stats)
        wrong = {name: (count, self.due[name]) for name, count in said.items() if count != self.due[name]}
        assert not wrong, f"counts and what is due: {wrong}"
        assert self.tier.host_used == self.host.used, f"{self.tier.host_used} B are used, not {self.host.used}"
        for key in KEYS:
            due = key in self.host or key in self.filed
            assert self.tier.contains(key) == due, f"block {self._name(key)} is there: {not due}"

    def store(self) -> None:
        """What is there already counts as used."""
        keys, blocks = self._keys(), self._blocks()
        items = list(zip(keys, blocks, strict=False))
        for key, block in items:
            for page, part in zip(self._pages(block), self.contents[key].reshape(-1, PAGE), strict=False):
                page[:] = part
        self.tier.store(items)
        for group, name in keys:
            is_new = self.folder is not None and (group, name) not in self.filed
            if (group, name) not in self.host and (is_new or self.host.fits(group)):
                self.due["stored_blocks"] += 1
                self.due["stored_bytes"] += BYTES[group]
        self.host.keep(keys)
        if self.folder is not None:
            self.filed.update(keys)

    def fetch(self) -> None:
        """All of the blocks come back, or none; a damaged file is gone."""
        keys, blocks = self._keys(), self._blocks()
        absent = [key for key in keys if key not in self.host]
        missing = sum(key not in self.filed for key in absent)
        bad = next((key for key in absent if not missing and self.rng.random() < 0.2), None)
        if bad is not None:
            self._damage(bad)
        pages = self.tier.fetch(keys)
        if missing or bad is not None:
            assert pages is None, f"blocks {[*map(self._name, keys)]} are fetched though one is missing or damaged"
            self.due["misses"] += missing or 1
            return
        assert pages is not None, f"blocks {[*map(self._name, keys)]} are not fetched"
        self.due["host_hits"] += len(keys) - len(absent)
        self.due["folder_hits"] += len(absent)
        self.host.keep(keys)
        before = [buffer.clone() for buffer in self.buffers]
        self.tier.load(pages, blocks[: len(pages)])
        for key, block in zip(keys, blocks, strict=False):
            self.due["loaded_blocks"] += 1
            self.due["loaded_bytes"] += BYTES[key[0]]
            parts = self.contents[key].reshape(-1, PAGE)
            for page, part, old in zip(self._pages(block), parts, before, strict=False):
                assert (page == part).all(), f"block {self._name(key)} comes back as another"
                old.view(-1).view(torch.uint8).numpy()[block * PAGE : (block + 1) * PAGE] = part
        same = all(torch.equal(buffer, due) for buffer, due in zip(self.buffers, before, strict=True))
        assert same, f"loading {[*map(self._name, keys)]} changes other blocks"

    def _damage(self, key: BlockKey) -> None:
        assert self.folder is not None
        (path,) = self.folder.rglob(f"{self._name(key)}.kv")
        data = path.read_bytes()
        path.write_bytes(data[:-1] + bytes([data[-1] ^ 1]))
        self.filed.discard(key)
        self.due["corrupt_files"] += 1

    def _name(self, key: BlockKey) -> str:
        return f"{key[0]}-{key[1].hex()}"

    def _pages(self, block: int) -> list[npt.NDArray[np.uint8]]:
        """Of all layers of the larger group, as views."""
        flat = (buffer.view(-1).view(torch.uint8).numpy() for buffer in self.buffers)
        return [one[block * PAGE : (block + 1) * PAGE] for one in flat]

    def _keys(self) -> list[BlockKey]:
        return [KEYS[i] for i in self.rng.permutation(len(KEYS))[: self.rng.integers(1, 4)]]

    def _blocks(self) -> list[int]:
        return (1 + self.rng.permutation(NUM_BLOCKS - 1)).tolist()


def play_tiers(root: Path, rng: np.random.Generator, num_events: int, limits: Sequence[int] = LIMITS) -> str:
    """The first thing that is not as it should be, or nothing. Every other limit has a folder beside it."""
    happened = Counter[str]()
    for number, limit in enumerate(limits):
        tiers = Tiers(rng, limit, root / str(number) if number % 2 else None)
        for event in range(num_events):
            play = tiers.store if rng.random() < 0.5 else tiers.fetch
            try:
                play()
                tiers.check()
                tiers.tier.check_integrity()
            except Exception as error:
                kind = "" if isinstance(error, AssertionError) else f"{type(error).__name__}: "
                return f"host memory of {limit} B, event {event}, {play.__name__}: {kind}{error}"
        happened += tiers.due
    missing = [name for name in MUST_HAPPEN if not happened[name]]
    return f"void: {', '.join(missing)} never happened" if missing else ""

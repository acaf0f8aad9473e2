"""KV offload: blocks of every group in host memory and a folder, under their hash.

This is a store of pages; the cache manager decides when to use it. A *stored block* is the
concatenation of the pages that its group's layers have under one block id, in layer order: layer
i's are bytes `[b * page, (b + 1) * page)` of raw buffer i, with that layer's own page size. So
convolution window, SSM state and padding travel together (sgl#39830), and a block costs the sum of
its layers' pages, once (vllm!50443). The number of blocks is the configuration's, never read off a
tensor, whose first dimension may count kernel blocks (vllm!38554).

Keys name content: (group id, 16-byte digest of all tokens up to the end of the block). Both tiers
may lose any block at any time; what they return is whole, verified and of that key, or nothing.
"""

from __future__ import annotations

import sys
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from pathlib import Path

import numpy as np
import torch

from hybrid_kv.cache.block_hash import DIGEST_SIZE
from hybrid_kv.cache.block_pool import NULL_BLOCK, BlockKey
from hybrid_kv.cache.folder_tier import FORMAT_VERSION, FolderTier, OffloadStats
from hybrid_kv.cache.spec import KVCacheConfig, MambaSpec
from hybrid_kv.errors import ConfigError
from hybrid_kv.kernels.common.upload import upload


@dataclass(frozen=True, eq=False)
class Page:
    """A fetched block on the host.

    `data` is `[bytes of the block]` uint8 and stays valid after any eviction.

    On a GPU the bytes may still be on their way until `KVOffload.synchronize`; `KVOffload.load` is
    ordered after them.
    """

    key: BlockKey
    data: torch.Tensor


def check_offloadable(config: KVCacheConfig, hash_block_size: int) -> None:
    """Raise `ConfigError` unless every group's blocks can be stored.

    They must end where a hash ends, and another request must be allowed to use them.
    """
    for index, group in enumerate(config.groups):
        if any(
            isinstance(spec, MambaSpec) and not spec.mode.keeps_states for spec in group.layer_specs
        ):
            raise ConfigError(
                f"offload: the states of group {index} (Mamba) are overwritten at every step in "
                'mamba_cache_mode="none", so nothing in them may be reused; use '
                'mamba_cache_mode="align" or "all"'
            )
        if group.spec.block_size % hash_block_size:
            raise ConfigError(
                f"offload: block_size={group.spec.block_size} of group {index} is not divisible by "
                f"hash_block_size={hash_block_size}; hybrid (attention + Mamba) models need prefix "
                "caching to align "
                'their block sizes: mamba_cache_mode="align" or "all"'
            )


def fingerprint(config: KVCacheConfig, hash_block_size: int, namespace: str) -> bytes:
    """Return 16 bytes that differ whenever a stored block would mean something else.

    The number of blocks is not in it.
    """
    groups = [(group.layer_names, group.spec) for group in config.groups]
    identity = repr((FORMAT_VERSION, sys.byteorder, namespace, hash_block_size, groups))
    return blake2b(identity.encode(), digest_size=DIGEST_SIZE).digest()


class KVOffload:
    """Blocks of every group in host memory and, if given, in a folder.

    In memory the least recently used leave first.

    `raw_buffers`: those of `allocate_raw_buffers`, contiguous, of any shape and dtype; layer i of
    every group lives in buffer i. `block_bytes[g]` is what one block of group g takes in a tier.
    `host_bytes` bounds the payload bytes of the host tier exactly; pages that `fetch` handed out
    live on next to it. `namespace` separates models that share a layout (weights, revision): a
    folder's blocks are found under the same namespace and layout only.

    On a GPU, `store` and `load` work in the order of the current stream: a block is read after what
    was queued before `store` and may be reused at once, and what is queued after `load` sees the
    blocks. The copies over the bus run on a side stream from and to pinned memory; with a folder,
    `store` waits for them.
    """

    def __init__(
        self,
        config: KVCacheConfig,
        raw_buffers: Sequence[torch.Tensor],
        hash_block_size: int,
        *,
        host_bytes: int,
        folder: str | Path | None = None,
        folder_bytes: int | None = None,
        namespace: str = "",
    ) -> None:
        """Check that all blocks can be stored, and bind the buffers."""
        check_offloadable(config, hash_block_size)
        self.host_bytes = host_bytes
        self.num_blocks = config.num_blocks
        self.device = raw_buffers[0].device
        self.stats = OffloadStats()
        self._config = config
        self.bind(raw_buffers)
        self.block_bytes = tuple(sum(view.shape[1] for view in views) for views in self._pages)
        self._host: OrderedDict[BlockKey, torch.Tensor] = OrderedDict()
        self.host_used = 0
        self._folder: FolderTier | None = None
        if folder is not None:
            identity = fingerprint(config, hash_block_size, namespace)
            self._folder = FolderTier(Path(folder), identity, folder_bytes, self.stats)
        self._stream = torch.cuda.Stream(self.device) if self.device.type == "cuda" else None

    def store(self, items: Sequence[tuple[BlockKey, int]]) -> None:
        """Copy device blocks to every tier that lacks them.

        A key that is there already only counts as used.

        Raises:
            ValueError: an unknown group, a digest of another length, or a block id outside `1 …
                num_blocks - 1`.
        """
        self._check([key for key, _ in items], [block for _, block in items])
        blocks = dict(items)  # blocks of one key hold the same
        unfiled = set() if self._folder is None else {key for key in blocks if not self._filed(key)}
        held = {key: self._host[key] for key in blocks if key in self._host}
        absent = {
            key: block
            for key, block in blocks.items()
            if key not in held and (key in unfiled or self.block_bytes[key[0]] <= self.host_bytes)
        }
        copies = self._to_host(absent)
        data = held | copies
        self._keep([(key, data[key]) for key in blocks if key in data])
        self.stats.stored_blocks += len(copies)
        self.stats.stored_bytes += sum(copy.numel() for copy in copies.values())
        if self._folder is not None and unfiled:
            self.synchronize()  # the files are written from these bytes
            self._folder.write([(key, data[key]) for key in blocks if key in unfiled])

    def contains(self, key: BlockKey) -> bool:
        """Return whether a tier has `key`; its file may still turn out to be damaged in `fetch`."""
        return key in self._host or (self._folder is not None and self._folder.contains(key))

    def fetch(self, keys: Sequence[BlockKey]) -> list[Page] | None:
        """Return the blocks of all `keys`, or None if one is missing or bad.

        A request continues from its attention blocks and its state together or from neither
        (lmc#2845).
        """
        self._check(keys, [])
        missing = sum(key not in self._host and not self._filed(key) for key in keys)
        if missing:
            self.stats.misses += missing
            return None
        pages = []
        filed = 0
        for key in keys:
            data = self._host.get(key)
            if data is None:
                data = self._empty(self.block_bytes[key[0]])
                if self._folder is None or not self._folder.read(key, data):
                    self.stats.misses += 1
                    return None
                filed += 1
            pages.append(Page(key, data))
        self._keep([(page.key, page.data) for page in pages])
        self.stats.folder_hits += filed
        self.stats.host_hits += len(pages) - filed
        return pages

    def load(self, pages: Sequence[Page], block_ids: Sequence[int]) -> None:
        """Copy fetched pages to device blocks, page i to block `block_ids[i]`.

        Raises:
            ValueError: as in `store`, or not one distinct block for every page.
        """
        self._check([page.key for page in pages], block_ids)
        if len(pages) != len(block_ids) or len(set(block_ids)) != len(block_ids):
            raise ValueError(
                f"{len(pages)} pages need as many distinct blocks, got {list(block_ids)}"
            )
        for group, views in enumerate(self._pages):
            chosen = [
                (page.data, block)
                for page, block in zip(pages, block_ids, strict=True)
                if page.key[0] == group
            ]
            if not chosen:
                continue
            (ids,) = upload(self.device, np.array([block for _, block in chosen]))
            with torch.cuda.stream(self._stream):
                staged = torch.empty(
                    len(chosen), self.block_bytes[group], dtype=torch.uint8, device=self.device
                )
                for row, (data, _) in zip(staged, chosen, strict=True):
                    row.copy_(data, non_blocking=True)
            if self._stream is not None:
                current = torch.cuda.current_stream(self.device)
                current.wait_stream(self._stream)
                staged.record_stream(current)
            pages_of_layers = staged.split([view.shape[1] for view in views], dim=1)
            for view, pages_of_layer in zip(views, pages_of_layers, strict=True):
                view.index_copy_(0, ids, pages_of_layer)
            self.stats.loaded_blocks += len(chosen)
            self.stats.loaded_bytes += staged.numel()

    def bind(self, raw_buffers: Sequence[torch.Tensor]) -> None:
        """Take these buffers for the blocks from now on; none while the engine sleeps.

        Raises:
            ConfigError: they do not hold the pages.
        """
        self._pages = _page_views(self._config, raw_buffers) if raw_buffers else []

    def synchronize(self) -> None:
        """Wait until the bytes of all stored and fetched blocks are where they belong."""
        if self._stream is not None:
            self._stream.synchronize()

    def check_integrity(self) -> None:
        """Raise AssertionError unless the host tier holds what came and has not left.

        It must count the bytes that it holds.
        """
        used = sum(data.numel() for data in self._host.values())
        assert self.host_used == used <= self.host_bytes, (
            f"{used} B held, {self.host_used} of {self.host_bytes} counted"
        )
        if max(self.block_bytes) <= self.host_bytes:  # a block that does not fit never comes
            came = self.stats.stored_blocks + self.stats.folder_hits
            left = self.stats.host_evictions
            assert came - left == len(self._host), (
                f"{came} blocks came to the host, {left} left, it has {len(self._host)}"
            )

    def _filed(self, key: BlockKey) -> bool:
        return self._folder is not None and self._folder.exists(key)

    def _to_host(self, blocks: Mapping[BlockKey, int]) -> dict[BlockKey, torch.Tensor]:
        """Copy each device block to the host.

        There is one allocation each, so that evicting one frees its bytes.
        """
        copies: dict[BlockKey, torch.Tensor] = {}
        for group, views in enumerate(self._pages):
            keys = [key for key in blocks if key[0] == group]
            if not keys:
                continue
            (ids,) = upload(self.device, np.array([blocks[key] for key in keys]))
            # Gathered on the current stream: after the kernel that wrote the block, before the one
            # that reuses it.
            gathered = torch.cat([view.index_select(0, ids) for view in views], dim=1)
            if self._stream is not None:
                self._stream.wait_stream(torch.cuda.current_stream(self.device))
                gathered.record_stream(self._stream)
            with torch.cuda.stream(self._stream):
                for key, row in zip(keys, gathered, strict=True):
                    copies[key] = self._empty(len(row)).copy_(row, non_blocking=True)
        return copies

    def _keep(self, blocks: Sequence[tuple[BlockKey, torch.Tensor]]) -> None:
        """Make these the most recently used blocks of the host tier, the last one most.

        Others leave as needed.
        """
        for key, data in blocks:
            if data.numel() <= self.host_bytes:
                if key not in self._host:
                    self.host_used += data.numel()
                    self._host[key] = data
                self._host.move_to_end(key)
        while self.host_used > self.host_bytes:
            self.host_used -= self._host.popitem(last=False)[1].numel()
            self.stats.host_evictions += 1

    def _empty(self, size: int) -> torch.Tensor:
        return torch.empty(size, dtype=torch.uint8, pin_memory=self._stream is not None)

    def _check(self, keys: Sequence[BlockKey], block_ids: Sequence[int]) -> None:
        for group, digest in keys:
            if not 0 <= group < len(self._pages) or len(digest) != DIGEST_SIZE:
                raise ValueError(
                    f"key ({group}, {digest!r}) is not one of {len(self._pages)} groups and 16 "
                    "bytes"
                )
        for block in block_ids:
            if not NULL_BLOCK < block < self.num_blocks:
                raise ValueError(
                    f"block {block} is the null block or outside 1 … {self.num_blocks - 1}"
                )


def _page_views(
    config: KVCacheConfig, raw_buffers: Sequence[torch.Tensor]
) -> list[list[torch.Tensor]]:
    """For every layer of every group its buffer as `[num_blocks, page_size_bytes]` uint8."""
    pages = config.buffer_page_sizes
    result = []
    for group in config.groups:
        if len(group.layer_names) > len(raw_buffers):
            raise ConfigError(
                f"a group of {len(group.layer_names)} layers needs as many buffers, not "
                f"{len(raw_buffers)}"
            )
        views = []
        for i, (raw, page) in enumerate(
            zip(raw_buffers, pages[: len(group.layer_names)], strict=False)
        ):
            if raw.nbytes < config.num_blocks * page or not raw.is_contiguous():
                raise ConfigError(
                    f"raw buffer {i} ({raw.nbytes} B) must be contiguous and hold "
                    f"num_blocks={config.num_blocks} pages "
                    f"of {page} B; allocate it with allocate_raw_buffers"
                )
            flat = raw.view(-1).view(torch.uint8)
            views.append(flat[: config.num_blocks * page].view(config.num_blocks, page))
        result.append(views)
    return result

"""Which blocks each request holds, in every group."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from itertools import accumulate
from typing import NamedTuple

import numpy as np

from hybrid_kv.cache.block_pool import BlockIds, BlockPool
from hybrid_kv.cache.spec import KVCacheConfig, MambaSpec, cdiv
from hybrid_kv.config import ConfigError

_EMPTY: BlockIds = np.empty(0, dtype=np.int32)


class NewBlocks(NamedTuple):
    """Blocks that a request just got: ids group by group, and how many each group got, as block tables stage them."""

    ids: BlockIds
    counts: array[int]

    def per_group(self) -> list[BlockIds]:
        """The ids of each group, as views."""
        ends = list(accumulate(self.counts))
        return [self.ids[end - count : end] for end, count in zip(ends, self.counts, strict=True)]


class KVCacheManager:
    """Allocates a request's blocks in all groups together, or in none.

    A Mamba group in mode `none` holds one state (plus its speculative slots) however long the request; an attention
    group holds `ceil(tokens / block_size)` blocks.
    """

    def __init__(self, config: KVCacheConfig) -> None:
        modes = {group.spec.mamba_cache_mode for group in config.groups if isinstance(group.spec, MambaSpec)}
        if unknown := modes - {"none"}:
            raise ConfigError(f"mamba_cache_mode {unknown.pop()!r} can be planned but not run yet; use none")
        self.config = config
        self.pool = BlockPool(config.num_blocks)
        self._held: dict[str, list[list[BlockIds]]] = {}
        self._num_held: dict[str, list[int]] = {}

    def _blocks_needed(self, num_tokens: int) -> list[int]:
        return [
            1 + group.spec.num_speculative_blocks
            if isinstance(group.spec, MambaSpec)
            else cdiv(num_tokens, group.spec.block_size)
            for group in self.config.groups
        ]

    def can_ever_fit(self, num_tokens: int) -> bool:
        """Whether a request of `num_tokens` tokens fits in the pool when it is alone."""
        return sum(self._blocks_needed(num_tokens)) <= self.pool.num_blocks - 1

    def allocate_slots(self, request_id: str, num_tokens: int) -> NewBlocks | None:
        """Grow the request to `num_tokens` tokens. Returns the *new* blocks, or None if the pool is too full."""
        held = self._num_held.get(request_id) or [0] * len(self.config.groups)
        missing = [max(0, need - have) for need, have in zip(self._blocks_needed(num_tokens), held, strict=True)]
        total = sum(missing)
        if total == 0:
            return NewBlocks(_EMPTY, array("i", missing))
        ids = self.pool.allocate(total)
        if ids is None:
            return None
        new = NewBlocks(ids, array("i", missing))
        for blocks, part in zip(self._held.setdefault(request_id, [[] for _ in missing]), new.per_group(), strict=True):
            blocks.append(part)
        self._num_held[request_id] = [have + more for have, more in zip(held, missing, strict=True)]
        return new

    def block_ids(self, request_id: str) -> list[BlockIds]:
        """All ids that the request holds, per group, in table order."""
        groups = self._held.get(request_id, [[] for _ in self.config.groups])
        return [np.concatenate([_EMPTY, *parts]) for parts in groups]

    def free(self, request_id: str) -> None:
        """Return everything the request holds."""
        self._num_held.pop(request_id, None)
        for parts in self._held.pop(request_id, []):
            for part in parts:
                self.pool.free(part)

    def check_integrity(self, running: Sequence[str] = ()) -> None:
        """Raise AssertionError unless the pool is whole, each held block has one owner, and only `running` hold any."""
        self.pool.check_integrity()
        assert self._held.keys() == self._num_held.keys(), "a request is half known"
        strangers = sorted(self._held.keys() - set(running))
        assert not strangers, f"requests that do not run hold blocks: {strangers}"
        for request, counts in self._num_held.items():
            assert [len(ids) for ids in self.block_ids(request)] == counts, f"{request} does not hold what it counts"
        owned = np.concatenate([_EMPTY, *(ids for request in self._held for ids in self.block_ids(request))])
        assert len(np.unique(owned)) == len(owned), "a block has two owners"
        assert (self.pool.ref_count[owned] == 1).all(), "a held block is not referenced once"
        num_used = self.pool.num_blocks - 1 - self.pool.num_free_blocks
        assert len(owned) == num_used, f"{num_used} blocks are in use, {len(owned)} have an owner"

"""Partial blocks: prefixes that end inside a block, at a multiple of `prefix_match_unit` tokens.

Blocks of a hybrid model have 500 to 2,000 tokens, and a hit that ends on their boundaries leaves up
to as many to compute again. With a unit, a prompt of n tokens also leaves what its own repetition
reads at its *resume point*, `(n - 1) // unit * unit`: in each group one more block, published under
the hash of all tokens up to there. Such a block is written once and never again:

- of states it gets the state after exactly these tokens, from the prefill that passes them;
- of attention it gets a copy of the block that the request is filling, once the step is over.

A hit that ends inside a block takes the whole blocks before its end as ever, and a fresh block for
the rest, into which the published one is copied at once. So a request writes no block that others
find, a source is held until it has been copied, and the copies of a step cannot come in the wrong
order: each is done before the next block is handed out (in vLLM a source may be the target of
another copy of its step, `v1/worker/utils.py`, release 0.32).

Hashes are chained over units, so that a block and a part of it have names in one chain. A partial
block serves its own length and no other; that its K and V are also those of a shorter prefix helps
nobody, as no state is there. Of a whole block in the pool, attention can restore any part.

Partial blocks stay on the device: no offload tier, no other engine and no router gets them.

Sources: vLLM's `prefix_match_unit` and `get_mamba_prefill_checkpoint_position`
(`v1/kv_cache_interface.py`, release 0.32). A draft head needs no unit less here: the last position
before each possible end of a hit is invisible to its queries (`models.mtp`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import NamedTuple

import numpy as np

from hybrid_kv.cache.block_hash import BlockHashes
from hybrid_kv.cache.block_pool import BlockIds, BlockKey, BlockPool
from hybrid_kv.cache.observe import BlockCopy, CacheObserver
from hybrid_kv.cache.offload import KVOffload
from hybrid_kv.cache.prefix import tail_source
from hybrid_kv.cache.request_blocks import NO_IDS, LogicalBlockRules, PrefixHit, RequestBlocks

CopyBlocks = Callable[[BlockIds, BlockIds], None]


class PartialBlocks(NamedTuple):
    """Blocks for what a prefill leaves after `num_tokens` tokens, by group; not published yet."""

    num_tokens: int
    blocks: dict[int, int]


def no_copy(sources: BlockIds, targets: BlockIds) -> None:
    """Copy nothing: there is no memory to copy in."""


class PartialBlockManager:
    """The partial blocks of all requests.

    Args:
        unit: tokens; it divides every block size.
        granularity: tokens; all groups have a boundary at its multiples.

    Attributes:
        copy_blocks: copies whole pages from blocks to others, in all layers, in the order of the
            device's work.
        pending: by request id, from the step that fills them until they are published.
    """

    def __init__(
        self,
        unit: int,
        granularity: int,
        groups: Sequence[LogicalBlockRules],
        pool: BlockPool,
        observers: Sequence[CacheObserver],
    ) -> None:
        self.unit = unit
        self.granularity = granularity
        self.copy_blocks: CopyBlocks = no_copy
        self.pending: dict[str, PartialBlocks] = {}
        self._groups = groups
        self._pool = pool
        self._observers = observers

    @property
    def most_blocks(self) -> int:
        """Blocks that a request may need at once besides its logical blocks.

        Those that its hit is copied from, and those that it leaves.
        """
        return 2 * len(self._groups)

    def resume_point(self, num_prompt_tokens: int) -> int:
        """Return after how many tokens a prompt leaves partial blocks; 0: it leaves none.

        Where all groups have a boundary the prefill ends a chunk, and leaves whole blocks.
        """
        end = (num_prompt_tokens - 1) // self.unit * self.unit
        return end if end % self.granularity else 0

    def due(self, start: int, end: int, num_prompt_tokens: int) -> int:
        """Return the resume point of a prompt if a prefill from `start` to `end` passes it.

        Else 0.
        """
        point = self.resume_point(num_prompt_tokens)
        return point if start < point <= end else 0

    def chunk_end(self, start: int, end: int) -> int:
        """Return where a chunk that can reach `end` ends where each boundary's state is kept.

        One that starts inside a block ends at the next boundary of all groups, as in vLLM.
        """
        inside = start % self.granularity
        return min(end, start - inside + self.granularity) if inside else end

    def kept_blocks(
        self,
        group: LogicalBlockRules,
        blocks: range,
        kept: Sequence[int],
        resume_points: Sequence[int],
    ) -> Sequence[int]:
        """Return completed blocks that are published: those kept anyway, and of windows some more.

        A sliding window is restored at the resume point from the blocks before it, too.

        Args:
            resume_points: of the request, its prompt's first (`Request.resume_points`).
        """
        if group.window is None or len(kept) == len(blocks):
            return kept
        needed = group.restored(self.resume_point(resume_points[0] + 1) if resume_points else 0)
        return sorted({*kept, *set(blocks).intersection(needed)})

    def groups_of(self, num_tokens: int) -> list[int]:
        """Return the groups that need a partial block for a prefix of so many tokens.

        Of states all do: a chunk ends where all groups have a boundary, or anywhere.
        """
        return [
            index
            for index, group in enumerate(self._groups)
            if group.mode is not None or group.reads_tail(num_tokens)
        ]

    def reserve(self, request_id: str, num_tokens: int, ids: BlockIds) -> None:
        """Keep blocks for what a request is about to leave, one for each of `groups_of`.

        Nothing happens where these are none.
        """
        if not len(ids):
            return
        groups = self.groups_of(num_tokens)
        blocks = dict(zip(groups, ids.tolist(), strict=True))
        self.pending[request_id] = PartialBlocks(num_tokens, blocks)
        self._report(request_id, blocks)

    def _report(self, request_id: str, blocks: Mapping[int, int]) -> None:
        """Report blocks, one of a group, as allocated."""
        rows = [NO_IDS] * len(self._groups)
        for index, block in blocks.items():
            rows[index] = np.array([block], dtype=np.int32)
        for observer in self._observers:
            observer.on_allocate(request_id, rows)

    def is_complete(self, request_id: str, num_computed: int) -> bool:
        """Return whether a request has blocks to publish after so many tokens."""
        pending = self.pending.get(request_id)
        return pending is not None and pending.num_tokens <= num_computed

    def publish(
        self, request_id: str, rows: Sequence[RequestBlocks], chain: Sequence[bytes]
    ) -> list[tuple[BlockKey, int]]:
        """Fill and publish what a request has left.

        Its references are still to be dropped.

        Args:
            rows: of the request, by group.
            chain: hashes of its units.
        """
        num_tokens, blocks = self.pending.pop(request_id)
        self._copy(
            request_id,
            num_tokens,
            [
                BlockCopy(index, rows[index][num_tokens // group.block_size], block)
                for index, block in blocks.items()
                if (group := self._groups[index]).mode is None
            ],
        )
        digest = chain[num_tokens // self.unit - 1]
        keys: list[tuple[BlockKey, int]] = [
            ((index, digest), block) for index, block in blocks.items()
        ]
        for key, block in keys:
            self._pool.publish(key, block)
        for observer in self._observers:
            observer.on_publish_partial(request_id, num_tokens, keys)
        return keys

    def restore(self, request_id: str, num_tokens: int, copies: Sequence[BlockCopy]) -> None:
        """Fill the last blocks of a hit of `num_tokens` tokens that ends inside of them."""
        if copies:
            self._report(request_id, {copy.group: copy.target for copy in copies})
            self._copy(request_id, num_tokens, copies)

    def _copy(self, request_id: str, num_tokens: int, copies: Sequence[BlockCopy]) -> None:
        if not copies:
            return
        for observer in self._observers:
            observer.on_copy_blocks(request_id, num_tokens, copies)
        sources = np.array([copy.source for copy in copies], dtype=np.int32)
        targets = np.array([copy.target for copy in copies], dtype=np.int32)
        self.copy_blocks(sources, targets)

    def release(self, request_id: str) -> tuple[BlockIds, int]:
        """Forget what a request would have left; return its blocks, and the tokens before them."""
        pending = self.pending.pop(request_id, None)
        if pending is None:
            return NO_IDS, 0
        return np.array([*pending.blocks.values()], dtype=np.int32), pending.num_tokens

    def longest_hit(
        self,
        offload: KVOffload | None,
        hashes: BlockHashes,
        token_ids: Sequence[int],
    ) -> PrefixHit:
        """Return the longest prefix, a multiple of the unit, that every group can restore."""
        limit = len(token_ids) - 1
        chain = hashes.chain(self.unit, token_ids, limit)
        chain = chain[: limit // self.unit]
        lookups = [
            UnitLookup(index, group, chain, self._pool, offload)
            for index, group in enumerate(self._groups)
        ]
        ends = [next(lookup.ends_until(len(chain) * self.unit), 0) for lookup in lookups]
        tokens = next(
            (
                end
                for end in lookups[self._first_states].ends_until(min(ends))
                if all(lookup.restores(end) for lookup in lookups)
            ),
            0,
        )
        longer = tokens + self.unit
        vetoed_by = None
        if max(ends) >= longer:
            vetoes = (i for i, lookup in enumerate(lookups) if not lookup.restores(longer))
            vetoed_by = next(vetoes, None)
        whole = [lookup.whole for lookup in lookups if lookup.is_full]
        junction = min(whole, default=0) // self.granularity * self.granularity
        return PrefixHit(
            tokens,
            tuple(ends),
            vetoed_by,
            junction if junction > tokens else 0,
            (chain,) * len(lookups),
        )

    @property
    def _first_states(self) -> int:
        return next(i for i, group in enumerate(self._groups) if group.mode is not None)


class UnitLookup:
    """The prefixes of one text that one group can restore, at units.

    Attributes:
        is_full: it is full attention.
        whole: of full attention, the tokens of the blocks that can be found from the first on.
    """

    def __init__(
        self,
        index: int,
        group: LogicalBlockRules,
        chain: Sequence[bytes],
        pool: BlockPool,
        offload: KVOffload | None,
    ) -> None:
        self.index = index
        self.group = group
        self.chain = chain
        self.pool = pool
        self.offload = offload
        self.is_full = group.num_tail_blocks is None
        self.whole = 0
        if self.is_full:
            count = len(chain) * group.hash_size // group.block_size
            missing = (i for i in range(count) if not self._has(i))
            self.whole = next(missing, count) * group.block_size

    def _has(self, block_idx: int) -> bool:
        end = (block_idx + 1) * self.group.block_size
        key = self.index, self.group.digest(self.chain, end)
        in_tier = self.offload is not None and self.offload.contains(key)
        return in_tier or self.pool.lookup(key) is not None

    def restores(self, end: int) -> bool:
        """Return whether the group can restore the first `end` tokens, a multiple of the unit."""
        group = self.group
        if end > len(self.chain) * group.hash_size:
            return False
        if group.reads_tail(end) and (
            tail_source(self.index, group, self.chain, end, self.pool) is None
        ):
            return False
        if self.is_full:
            return end // group.block_size * group.block_size <= self.whole
        return all(self._has(block_idx) for block_idx in group.restored(end))

    def ends_until(self, limit: int) -> Iterator[int]:
        """Yield the prefixes of at most `limit` tokens that can be restored, the longest first."""
        unit = self.group.hash_size
        return filter(self.restores, range(limit // unit * unit, 0, -unit))

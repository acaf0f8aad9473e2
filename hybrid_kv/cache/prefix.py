"""Prefix hits: the longest prefix that every group can restore now, and how it is taken."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from hybrid_kv.cache.block_hash import BlockHashes
from hybrid_kv.cache.block_pool import BlockIds, BlockKey, BlockPool
from hybrid_kv.cache.observe import BlockCopy
from hybrid_kv.cache.offload import KVOffload, Page
from hybrid_kv.cache.request_blocks import LogicalBlockRules, PrefixHit, RequestBlocks
from hybrid_kv.kernels.common.integers import cdiv

# Of a request: its hashes, and the tokens that they are of.
Text = tuple[BlockHashes, Sequence[int]]


def longest_hit(
    groups: Sequence[LogicalBlockRules],
    unit: int,
    pool: BlockPool,
    offload: KVOffload | None,
    hashes: BlockHashes,
    token_ids: Sequence[int],
) -> PrefixHit:
    """Return the longest prefix that every group can restore (`LogicalBlockRules.longest`).

    A prefix that a group cannot restore is no reason that it can restore a shorter one: what lets a
    group agree to a length says nothing of the others. So each in turn shortens the prefix to the
    longest that it can restore, until all agree. The last token is always computed.

    Args:
        unit: tokens; every hit is a multiple of it.
        offload: where blocks may be besides the pool.
    """
    limit = len(token_ids) - 1
    chains = [hashes.chain(group.block_size, token_ids, limit) for group in groups]
    lookup = pool.lookup

    def longest(index: int, tokens: int) -> int:
        """Return the longest prefix of at most `tokens` tokens that a group can restore."""
        group = groups[index]
        chain = chains[index]

        def has(block_idx: int) -> bool:
            key = index, chain[block_idx]
            return lookup(key) is not None or (offload is not None and offload.contains(key))

        return group.longest(tokens // group.block_size, has) * group.block_size

    indices = range(len(groups))
    ends = [longest(index, limit) for index in indices]
    tokens = min(ends) // unit * unit
    if tokens == max(ends):  # as for most prompts: no group has more than any other
        return PrefixHit(tokens, tuple(ends), None, 0, tuple(chains))
    # Of attention all shorter prefixes can be restored, too.
    unsure = [index for index in indices if groups[index].num_tail_blocks is not None]
    of_attention = (ends[index] for index in indices if index not in unsure)
    junction = min(of_attention, default=0) // unit * unit
    while tokens:
        beyond = [index for index in unsure if ends[index] > tokens]
        shorter = min((longest(index, tokens) for index in beyond), default=tokens)
        if shorter == tokens:
            break
        tokens = shorter // unit * unit
    longer = tokens + unit
    vetoed_by = None
    if max(ends) >= longer:
        vetoes = (i for i in indices if ends[i] < longer or longest(i, longer) < longer)
        vetoed_by = next(vetoes, None)
    return PrefixHit(
        tokens,
        tuple(ends),
        vetoed_by,
        junction if junction > tokens else 0,
        tuple(chains),
    )


class AbsentBlock(NamedTuple):
    """A block of a hit that the pool does not have, and the null logical block that it fills."""

    key: BlockKey
    row: RequestBlocks
    block_idx: int


class Tail(NamedTuple):
    """The null logical block that a hit ends in, and the block that is copied for it."""

    group: int
    row: RequestBlocks
    block_idx: int
    source: int


def tail_source(
    index: int, group: LogicalBlockRules, chain: Sequence[bytes], end: int, pool: BlockPool
) -> int | None:
    """Return the block that has what a prefix needs of the block that it ends in; None: no one has.

    Of a state only a block that was left after exactly `end` tokens has it; the K and V of a whole
    block are those of each of its parts, too (`cache.partial_blocks`).
    """
    block = pool.lookup((index, group.digest(chain, end)))
    if block is not None or group.mode is not None:
        return block
    whole = cdiv(end, group.block_size) * group.block_size
    if whole > len(chain) * group.hash_size:
        return None
    return pool.lookup((index, group.digest(chain, whole)))


class LocatedHit:
    """A hit's blocks, found in the pool or left to the offload tier; `take` takes them.

    Attributes:
        rows: of each group the request's logical blocks up to the end of the hit.
        pooled: ids of the blocks that the pool has.
        pooled_rows: ids of each group's logical blocks, those of absent blocks null.
        absent: the other blocks.
        tails: the logical blocks that the hit ends in, which are absent, too.
        sources: ids of the blocks that these are copied from, held from `take` on.
    """

    def __init__(
        self, hit: PrefixHit, groups: Sequence[LogicalBlockRules], pool: BlockPool
    ) -> None:
        self.rows: list[RequestBlocks] = []
        self.pooled_rows: list[BlockIds] = []
        self.absent: list[AbsentBlock] = []
        self.tails: list[Tail] = []
        pooled: list[int] = []
        for index, group in enumerate(groups):
            row = RequestBlocks()
            count = hit.num_tokens // group.block_size
            ids = np.zeros(count, dtype=np.int32)
            hashes = group.block_size // group.hash_size  # of a block
            for block_idx in group.restored(hit.num_tokens):
                key = index, hit.chains[index][(block_idx + 1) * hashes - 1]
                block = pool.lookup(key)
                if block is None:
                    self.absent.append(AbsentBlock(key, row, block_idx))
                else:
                    ids[block_idx] = block
                    pooled.append(block)
            row.extend(ids)
            row.published = count
            if group.reads_tail(hit.num_tokens):
                source = tail_source(index, group, hit.chains[index], hit.num_tokens, pool)
                assert source is not None, f"group {index} has nothing of the end of a hit"
                row.extend(np.zeros(1, dtype=np.int32))
                self.tails.append(Tail(index, row, count, source))
            self.rows.append(row)
            self.pooled_rows.append(ids)
        self.pooled: BlockIds = np.array(pooled, dtype=np.int32)
        self.sources: BlockIds = np.array([tail.source for tail in self.tails], dtype=np.int32)

    def num_needed(self, pool: BlockPool) -> int:
        """Return how many free blocks of the pool it takes."""
        num_needed = len(self.absent) + len(self.tails)
        if self.pooled.size:  # or numpy takes microseconds for nothing, as for most prompts
            num_needed += int(np.count_nonzero(pool.is_idle(self.pooled)))
        if self.tails:
            num_needed += int(np.count_nonzero(pool.is_idle(self.sources)))
        return num_needed

    def fetch(self, offload: KVOffload | None) -> list[Page] | None:
        """Return the offload tier's pages of the absent blocks; None if it lacks any."""
        if not self.absent:
            return []
        if offload is None:
            return None
        pages = offload.fetch([absent.key for absent in self.absent])
        return pages if pages is not None and len(pages) == len(self.absent) else None

    def take(self, pool: BlockPool, num_more: int) -> tuple[BlockIds, BlockIds]:
        """Take the blocks that the pool has, and new ones; there must be room.

        Returns:
            The blocks that are to be loaded, in the order of `absent`, and `num_more` others.
        """
        if self.pooled.size:
            pool.touch(self.pooled)
        if self.tails:
            pool.touch(self.sources)
        ids = pool.allocate(len(self.absent) + len(self.tails) + num_more)
        assert ids is not None
        gaps: list[AbsentBlock | Tail] = [*self.absent, *self.tails]
        for gap, block in zip(gaps, ids[: len(gaps)].tolist(), strict=True):
            gap.row.set(gap.block_idx, block)
        return ids[: len(self.absent)], ids[len(gaps) :]

    def release(self, pool: BlockPool) -> None:
        """Drop the blocks that tails were copied from."""
        if self.tails:
            pool.free(self.sources)

    def copies(self) -> list[BlockCopy]:
        """Return the copies that fill `tails`, once they are taken."""
        return [BlockCopy(tail.group, tail.source, tail.row[tail.block_idx]) for tail in self.tails]


def shared_tokens(block_size: int, unit: int, prompt: Text, other: Text, end: int) -> int:
    """Return how many tokens a text could take from the first `end` of another one.

    All of those are taken to be cached.
    """
    hashes, token_ids = prompt
    other_hashes, other_ids = other
    limit = min(end, len(token_ids) - 1)
    hashes_of_prompt = hashes.chain(block_size, token_ids, limit)
    others = other_hashes.chain(block_size, other_ids, limit)
    if limit < block_size or hashes_of_prompt[0] != others[0]:
        return 0  # as for most pairs: every waiting prompt is compared with every prefill in flight

    # Chained hashes are equal up to the first difference of the texts, and never again.
    def differs(block_idx: int) -> bool:
        return hashes_of_prompt[block_idx] != others[block_idx]

    different = True
    equal = bisect_left(range(limit // block_size), different, key=differs)
    return equal * block_size // unit * unit

"""Per-group block ids of a request, its prefix hit, and a rejected admission.

`cache.manager` fills and empties logical blocks, `cache.block_table` stages the new ones.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from hybrid_kv.cache.block_pool import NULL_BLOCK, BlockIds, BlockKey
from hybrid_kv.cache.spec import KVCacheSpec, MambaSpec, SlidingWindowSpec, StateProgress

NO_IDS: BlockIds = np.empty(0, dtype=np.int32)


class NewBlocks(NamedTuple):
    """Logical blocks that a request just got.

    They are ids group by group, and how many each group got, as block tables stage them.
    """

    ids: BlockIds
    counts: array[int]

    @classmethod
    def of(cls, rows: Sequence[RequestBlocks]) -> NewBlocks:
        """Return all logical blocks of a request that is new to the tables.

        There is a row for each group.
        """
        return cls(
            np.concatenate([row.all() for row in rows]), array("i", [row.length for row in rows])
        )

    def per_group(self) -> list[BlockIds]:
        """Return the ids of each group, as views."""
        ends = list(accumulate(self.counts))
        return [self.ids[end - count : end] for end, count in zip(ends, self.counts, strict=True)]


NO_BLOCKS = NewBlocks(NO_IDS, array("i"))


@dataclass(frozen=True)
class PrefixHit:
    """The prefix of a request that the cache can restore.

    `group_tokens` is what each group could have restored alone; `vetoed_by` is a group that could
    not restore the next longer prefix though another one could, if there is one. `junction` is the
    prefix that full attention could restore, in tokens, if it is longer than the hit; else 0.
    `chains` are the request's hashes, group by group, needed to take the hit; drop them before
    storing it.
    """

    num_tokens: int
    group_tokens: tuple[int, ...] = ()
    vetoed_by: int | None = None
    junction: int = 0
    chains: tuple[Sequence[bytes], ...] = field(default=(), repr=False, compare=False)

    def keys(self) -> frozenset[BlockKey]:
        """Return the keys of all blocks of the request's prefixes, of the hit or beyond it."""
        return frozenset(
            (group, digest) for group, chain in enumerate(self.chains) for digest in chain
        )


NO_HIT = PrefixHit(0)


class Refusal(NamedTuple):
    """A rejected admission: the room that it needed, and blocks that might make it need less."""

    request_id: str
    num_needed: int
    keys: frozenset[BlockKey]


class LogicalBlockRules:
    """The rules of a group's logical blocks, read off its spec once.

    A decode step reads them for every request and group.
    """

    __slots__ = ("block_size", "drafts", "hash_size", "mode", "num_tail_blocks", "window")

    def __init__(self, spec: KVCacheSpec, prefix_match_unit: int | None = None) -> None:
        self.block_size = spec.block_size
        self.hash_size = prefix_match_unit or spec.block_size  # tokens of a hash of its chain
        # None: attention, a block for every logical block
        self.mode = spec.mode if isinstance(spec, MambaSpec) else None
        self.drafts = spec.num_speculative_blocks if isinstance(spec, MambaSpec) else 0
        self.window = spec if isinstance(spec, SlidingWindowSpec) else None
        # Those before its end from which a prefix is restored; None: all of them.
        self.num_tail_blocks: int | None = None
        if self.mode is not None:
            self.num_tail_blocks = 1
        elif self.window is not None:
            self.num_tail_blocks = self.window.num_tail_blocks

    @property
    def gives_back(self) -> bool:
        """True if logical blocks are freed while the request runs."""
        return self.window is not None if self.mode is None else self.mode.gives_back

    def first_needed(self, num_computed: int, num_seen: int) -> int:
        """Return the first logical block that is kept; those before it are freed.

        Args:
            num_computed: tokens that are confirmed.
            num_seen: of them, those that the state to go on from has seen.
        """
        if self.mode is not None:
            return self.mode.first_needed(num_seen, self.block_size)
        return 0 if self.window is None else self.window.first_needed(num_computed)

    def digest(self, chain: Sequence[bytes], num_tokens: int) -> bytes:
        """Return the hash of the first `num_tokens` tokens, a multiple of `hash_size`."""
        return chain[num_tokens // self.hash_size - 1]

    def restored(self, num_tokens: int) -> range:
        """Return the whole logical blocks that a prefix of `num_tokens` tokens is restored from.

        All of attention, the last ones of a sliding window, the last state of Mamba. A prefix that
        ends inside a block needs a part of one more (`reads_tail`), and of Mamba nothing else.
        """
        count = num_tokens // self.block_size
        if self.window is not None:
            return range(min(count, self.window.first_needed(num_tokens)), count)
        if self.mode is not None:
            return range(count if num_tokens % self.block_size else max(0, count - 1), count)
        return range(count)

    def reads_tail(self, num_tokens: int) -> bool:
        """Return whether a prefix of `num_tokens` tokens is restored from a part of a block."""
        return num_tokens % self.block_size > 0 and self.num_tail_blocks != 0

    def longest(self, num_blocks: int, has: Callable[[int], bool]) -> int:
        """Return the most blocks, up to `num_blocks`, of a prefix that can be restored.

        Args:
            has: whether a logical block can be found.
        """
        if self.num_tail_blocks is None:
            return next((i for i in range(num_blocks) if not has(i)), num_blocks)
        end = num_blocks
        for block_idx in reversed(range(num_blocks if self.num_tail_blocks else 0)):
            # A prefix that would need a lost block ends before it instead.
            if not has(block_idx):
                end = block_idx
            elif end - block_idx == self.num_tail_blocks:
                break
        return end

    def num_complete(self, progress: StateProgress) -> int:
        """Return how many logical blocks hold all that they stand for."""
        return (progress.computed if self.mode is None else progress.flushed) // self.block_size


class RequestBlocks:
    """A request's logical blocks in one group. Those before `first` have been freed."""

    __slots__ = ("_ids", "first", "length", "published")

    def __init__(self) -> None:
        self._ids: BlockIds = np.zeros(4, dtype=np.int32)
        self.length = 0
        self.first = 0
        self.published = 0  # logical blocks already published or skipped

    def extend(self, ids: BlockIds) -> None:
        end = self.length + len(ids)
        if end > len(self._ids):
            self._ids = np.concatenate([self._ids[: self.length], np.zeros(end, dtype=np.int32)])
        self._ids[self.length : end] = ids
        self.length = end

    def held(self) -> BlockIds:
        """Return the ids from `first` on, null logical blocks left out."""
        ids = self._ids[self.first : self.length]
        return ids[ids != NULL_BLOCK]

    def ends(self, block_size: int) -> npt.NDArray[np.int64]:
        """Return the ends of the logical blocks of `held()`, in tokens."""
        ids = self._ids[self.first : self.length]
        return (self.first + np.flatnonzero(ids != NULL_BLOCK) + 1) * block_size

    def all(self) -> BlockIds:
        """Return the ids of all logical blocks, null ones included."""
        return self._ids[: self.length]

    def __getitem__(self, block_idx: int) -> int:
        return int(self._ids[block_idx])

    def set(self, block_idx: int, block: int) -> None:
        """Fill a null logical block."""
        self._ids[block_idx] = block

    def give_back(self, end: int) -> dict[int, int]:
        """Take the blocks before logical block `end` from the request.

        Returns:
            Their logical blocks.
        """
        logical_blocks = enumerate(self._ids[self.first : end].tolist(), self.first)
        self._ids[self.first : end] = NULL_BLOCK
        self.first = end
        return {block: block_idx for block_idx, block in logical_blocks if block != NULL_BLOCK}

"""Ref-counted blocks, one id space for all groups, and the contents that free blocks still hold.

A block whose content is *published* under a key can be found again until it is evicted, also while
no request references it. Blocks that lookups cannot find are handed out first; published ones
follow, least recently used first.

Of equal blocks of several requests lookups find one. The others are its *duplicates* while requests
hold them: when it is evicted, one of them takes its place.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

import numpy as np
import numpy.typing as npt

BlockIds = npt.NDArray[np.int32]
BlockKey = tuple[int, bytes]  # group id, hash of all tokens up to the end of the block

NULL_BLOCK = 0


class LRUQueue:
    """Free published blocks in the order of their release.

    Entries are never removed from the middle: an entry counts only while `_position` of its block
    points at it, so that a hit or a refresh is one indexed write. Stale entries are dropped when
    the array is full.
    """

    def __init__(self, num_blocks: int) -> None:
        self._ids: BlockIds = np.zeros(2 * num_blocks, dtype=np.int32)
        self._position = np.full(num_blocks, -1, dtype=np.int64)
        self._head = self._tail = 0
        self.size = 0

    def ids(self) -> BlockIds:
        """Return the blocks, the oldest first."""
        entries = self._ids[self._head : self._tail]
        return entries[self._position[entries] == np.arange(self._head, self._tail)]

    def push(self, ids: BlockIds) -> None:
        """Append blocks, each at most once; one that is in the queue moves to its end."""
        if self._tail + len(ids) > len(self._ids):
            live = self.ids()
            self._ids[: len(live)] = live
            self._position[live] = np.arange(len(live))
            self._head = 0
            self._tail = len(live)
        end = self._tail + len(ids)
        self._ids[self._tail : end] = ids
        self.size += int(np.count_nonzero(self._position[ids] < 0))
        self._position[ids] = np.arange(self._tail, end)
        self._tail = end

    def discard(self, ids: BlockIds) -> None:
        """Take blocks out wherever they are; those that are not in the queue are left alone."""
        self.size -= int(np.count_nonzero(self._position[ids] >= 0))
        self._position[ids] = -1

    def pop(self, count: int) -> BlockIds:
        """Take out the `count` oldest blocks; there must be as many."""
        window = count
        while True:
            end = min(self._head + window, self._tail)
            entries = self._ids[self._head : end]
            live = np.flatnonzero(self._position[entries] == np.arange(self._head, end))[:count]
            if len(live) == count:
                break
            window *= 2
        ids = entries[live].copy()
        self._head += int(live[-1]) + 1 if count else 0
        self._position[ids] = -1
        self.size -= count
        return ids


class BlockPool:
    """The blocks of all groups, handed out as int32 arrays of ids.

    Block 0 is the null block: never handed out, never freed; padded rows and logical blocks without
    a block point at it. Free blocks without a key live in a ring, so that taking or returning n of
    them is at most two slice copies.
    """

    def __init__(
        self, num_blocks: int, on_unpublish: Callable[[Sequence[BlockKey]], None] | None = None
    ) -> None:
        if num_blocks < 2:
            raise ValueError(
                f"a pool of {num_blocks} blocks has nothing to hand out beside the null block"
            )
        self.num_blocks = num_blocks
        self.ref_count = np.zeros(num_blocks, dtype=np.int32)
        self.ref_count[NULL_BLOCK] = 1
        self._capacity = num_blocks - 1
        self._ring: BlockIds = np.arange(1, num_blocks, dtype=np.int32)
        self._head = 0
        self._num_unpublished = self._capacity
        self._lru = LRUQueue(num_blocks)
        self._published = np.zeros(num_blocks, dtype=bool)
        # Since it was handed out; then requests may share it, also when the cache has been reset
        # meanwhile.
        self._was_published = np.zeros(num_blocks, dtype=bool)
        self._keys: dict[int, BlockKey] = {}
        self._blocks: dict[BlockKey, int] = {}
        self._is_duplicate = np.zeros(num_blocks, dtype=bool)
        self._duplicates: dict[BlockKey, dict[int, None]] = {}  # in the order in which they came
        self._duplicate_keys: dict[int, BlockKey] = {}
        self.num_evictions = 0
        self._on_unpublish = on_unpublish

    @property
    def num_free_blocks(self) -> int:
        """Blocks that can be handed out, published ones included."""
        return self._num_unpublished + self._lru.size

    @property
    def num_published_blocks(self) -> int:
        """Blocks that a lookup can find."""
        return len(self._blocks)

    def allocate(self, count: int) -> BlockIds | None:
        """Hand out `count` ids with reference count 1.

        Returns:
            None if fewer are free; then nothing changed.
        """
        if count > self.num_free_blocks:
            return None
        plain = min(count, self._num_unpublished)
        end = self._head + plain
        if end <= self._capacity:
            ids = self._ring[self._head : end].copy()
        else:
            ids = np.concatenate([self._ring[self._head :], self._ring[: end - self._capacity]])
        self._head = end % self._capacity
        self._num_unpublished -= plain
        if plain < count:
            evicted = self._lru.pop(count - plain)
            self.num_evictions += len(evicted)
            self._unpublish(evicted)
            ids = np.concatenate([ids, evicted])
        self.ref_count[ids] = 1
        self._was_published[ids] = False
        return ids

    def free(self, ids: BlockIds) -> None:
        """Drop one reference to each id (no duplicates).

        Blocks without any left become free, in the given order.
        """
        counts = self.ref_count[ids] - 1
        wrong = ids[(counts < 0) | (ids <= NULL_BLOCK)]
        if wrong.size:
            raise AssertionError(f"freed a block without references: {wrong.tolist()}")
        self.ref_count[ids] = counts
        released = ids[counts == 0]
        for block in released[self._is_duplicate[released]].tolist():
            self._part(block)
        published = self._published[released]
        if published.any():
            self._lru.push(released[published])
            released = released[~published]
        self._push_unpublished(released)

    def _push_unpublished(self, ids: BlockIds) -> None:
        tail = (self._head + self._num_unpublished) % self._capacity
        first = ids[: self._capacity - tail]
        self._ring[tail : tail + len(first)] = first
        self._ring[: len(ids) - len(first)] = ids[len(first) :]
        self._num_unpublished += len(ids)

    def publish(self, key: BlockKey, block: int) -> bool:
        """Let lookups of `key` find a referenced block.

        Returns:
            False if they find another block, whose duplicate this one becomes.
        """
        if block in self._keys or block in self._duplicate_keys:
            return False
        if key in self._blocks:
            self._duplicates.setdefault(key, {})[block] = None
            self._duplicate_keys[block] = key
            self._is_duplicate[block] = True
            return False
        assert self.ref_count[block] > 0, f"block {block} is published but has no reference"
        self._blocks[key] = block
        self._keys[block] = key
        self._published[block] = self._was_published[block] = True
        return True

    def lookup(self, key: BlockKey) -> int | None:
        """Return the block published under `key`."""
        return self._blocks.get(key)

    def key_of(self, block: int) -> BlockKey | None:
        """Return the key under which a block is published."""
        return self._keys.get(block)

    def may_be_shared(self, ids: npt.NDArray[np.int64]) -> npt.NDArray[np.bool_]:
        """Return, per id, whether it has been published since it was handed out."""
        return self._was_published[ids]

    def is_idle(self, ids: BlockIds) -> npt.NDArray[np.bool_]:
        """Return, per id, whether it is published and free: taking it uses up a free block."""
        return (self.ref_count[ids] == 0) & self._published[ids]

    def idle_blocks(self) -> BlockIds:
        """Return free published blocks, the next to be lost first."""
        return self._lru.ids()

    def touch(self, ids: BlockIds) -> None:
        """Add a reference to published blocks, free or not."""
        assert self._published[ids].all(), f"not all of {ids.tolist()} are published"
        self._lru.discard(ids)
        self.ref_count[ids] += 1

    def refresh(self, ids: BlockIds) -> None:
        """Make those that are free and published the most recently used, in the given order."""
        self._lru.push(ids[self.is_idle(ids)])

    def reset(self) -> None:
        """Forget every published content; blocks in use stay in use."""
        for block in list(self._duplicate_keys):
            self._part(block)
        idle = self.idle_blocks()
        self._lru.discard(idle)
        self._unpublish(list(self._keys))
        self._push_unpublished(idle)

    def published_keys(self) -> list[BlockKey]:
        """Return all keys that a lookup finds."""
        return list(self._blocks)

    def _unpublish(self, blocks: Iterable[int]) -> None:
        lost: list[BlockKey] = []
        for block in blocks:
            key = self._keys.pop(int(block))
            del self._blocks[key]
            self._published[block] = False
            duplicates = self._duplicates.get(key)
            if duplicates:
                heir = next(iter(duplicates))
                self._part(heir)
                self.publish(key, heir)
            else:
                lost.append(key)
        if lost and self._on_unpublish is not None:
            self._on_unpublish(lost)

    def _part(self, duplicate: int) -> None:
        key = self._duplicate_keys.pop(duplicate)
        self._is_duplicate[duplicate] = False
        del self._duplicates[key][duplicate]
        if not self._duplicates[key]:
            del self._duplicates[key]

    def check_integrity(self) -> None:
        """Raise AssertionError unless free and referenced blocks partition the pool.

        Keys must name live blocks.
        """
        positions = (self._head + np.arange(self._num_unpublished)) % self._capacity
        plain = self._ring[positions]
        idle = self.idle_blocks()
        free = np.concatenate([plain, idle])
        assert len(idle) == self._lru.size, (
            f"{len(idle)} published blocks are free, {self._lru.size} are counted"
        )
        assert len(np.unique(free)) == len(free), "a block is free twice"
        assert (self.ref_count[free] == 0).all(), "a free block is referenced"
        assert self._published[idle].all() and not self._published[plain].any(), (
            "a free block is in the wrong queue"
        )
        assert self.ref_count[NULL_BLOCK] == 1, "the null block was handed out or freed"
        held = int(np.count_nonzero(self.ref_count[1:]))
        assert held + len(free) == self._capacity, (
            f"{held} held + {len(free)} free != {self._capacity}"
        )
        assert {block: key for key, block in self._blocks.items()} == self._keys, (
            "keys and blocks disagree"
        )
        assert sorted(self._keys) == np.flatnonzero(self._published).tolist(), (
            "published flags and keys disagree"
        )
        duplicates = sorted(self._duplicate_keys)
        assert duplicates == np.flatnonzero(self._is_duplicate).tolist(), (
            "duplicate flags and keys disagree"
        )
        assert {(key, block) for key, blocks in self._duplicates.items() for block in blocks} == {
            (key, block) for block, key in self._duplicate_keys.items()
        }, "duplicates and their keys disagree"
        assert (self.ref_count[duplicates] > 0).all(), "a free block is a duplicate"
        assert self._duplicates.keys() <= self._blocks.keys(), "a duplicate of nothing"

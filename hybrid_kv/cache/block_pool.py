"""Ref-counted blocks, one id space for all groups."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

BlockIds = npt.NDArray[np.int32]

NULL_BLOCK = 0


class BlockPool:
    """Hands out block ids as int32 arrays, oldest freed first.

    Block 0 is the null block: never handed out, never freed; padded rows point at it. The free ids live in a ring, so
    that taking or returning n of them is at most two slice copies however large n is.
    """

    def __init__(self, num_blocks: int) -> None:
        if num_blocks < 2:
            raise ValueError(f"a pool of {num_blocks} blocks has nothing to hand out beside the null block")
        self.num_blocks = num_blocks
        self.ref_count = np.zeros(num_blocks, dtype=np.int32)
        self.ref_count[NULL_BLOCK] = 1
        self._capacity = num_blocks - 1
        self._ring: BlockIds = np.arange(1, num_blocks, dtype=np.int32)
        self._head = 0
        self.num_free_blocks = self._capacity

    def allocate(self, count: int) -> BlockIds | None:
        """`count` ids with reference count 1, or None if fewer are free (then nothing changed)."""
        if count > self.num_free_blocks:
            return None
        end = self._head + count
        if end <= self._capacity:
            ids = self._ring[self._head : end].copy()
        else:
            ids = np.concatenate([self._ring[self._head :], self._ring[: end - self._capacity]])
        self._head = end % self._capacity
        self.num_free_blocks -= count
        self.ref_count[ids] = 1
        return ids

    def free(self, ids: BlockIds) -> None:
        """Drop one reference to each id (no duplicates); those without any left become free, in the given order."""
        counts = self.ref_count[ids] - 1
        if (wrong := ids[(counts < 0) | (ids <= NULL_BLOCK)]).size:
            raise AssertionError(f"freed a block that nobody holds: {wrong.tolist()}")
        self.ref_count[ids] = counts
        released = ids[counts == 0]
        tail = (self._head + self.num_free_blocks) % self._capacity
        first = released[: self._capacity - tail]
        self._ring[tail : tail + len(first)] = first
        self._ring[: len(released) - len(first)] = released[len(first) :]
        self.num_free_blocks += len(released)

    def check_integrity(self) -> None:
        """Raise AssertionError unless free and referenced blocks partition the pool."""
        positions = (self._head + np.arange(self.num_free_blocks)) % self._capacity
        free = self._ring[positions]
        assert len(np.unique(free)) == len(free), "a block is free twice"
        assert (self.ref_count[free] == 0).all(), "a free block is referenced"
        assert self.ref_count[NULL_BLOCK] == 1, "the null block was handed out or freed"
        held = int(np.count_nonzero(self.ref_count[1:]))
        assert held + len(free) == self._capacity, f"{held} held + {len(free)} free != {self._capacity}"

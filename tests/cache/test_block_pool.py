"""Each block id is handed out once, contents stay as long as they can, misuse is caught."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from hybrid_kv.cache.block_pool import NULL_BLOCK, BlockKey, BlockPool
from hybrid_kv.check.guard.kept import Device


def ids(*values: int) -> np.ndarray:
    return np.array(values, dtype=np.int32)


def key(name: int) -> BlockKey:
    return name % 2, bytes([name])


KEYS = [key(name) for name in range(7)]


class Pool(RuleBasedStateMachine):
    """The pool beside two lists and the guard's model of what can be found."""

    @initialize(num_blocks=st.integers(2, 12))
    def start(self, num_blocks: int) -> None:
        self.device, self.lost = Device(), list[BlockKey]()
        self.pool = BlockPool(num_blocks, self.lost.extend)
        # free and not published, in the order of their release
        self.plain = list(range(1, num_blocks))
        self.idle: list[int] = []  # free and published, least recently used first
        self.held: Counter[int] = Counter()
        self.shared: set[int] = set()  # published since they were handed out

    def found(self) -> dict[int, BlockKey]:
        blocks = {key: self.device.found(key) for key in KEYS}
        return {block: key for key, block in blocks.items() if block is not None}

    @rule(count=st.integers(0, 12))
    def allocate(self, count: int) -> None:
        got, before = self.pool.allocate(count), {*self.found().values()}
        if count > len(self.plain) + len(self.idle):
            assert got is None
            return
        assert got is not None
        assert got.dtype == np.int32
        expected = (self.plain + self.idle)[:count]
        assert got.tolist() == expected
        self.plain, self.idle = self.plain[count:], self.idle[max(0, count - len(self.plain)) :]
        self.device.take(expected)
        self.shared -= {*expected}
        self.held.update(expected)
        got[:] = NULL_BLOCK  # the caller's own copy
        assert {*self.lost} == before - {*self.found().values()}
        self.lost.clear()

    @precondition(lambda self: self.held)
    @rule(data=st.data())
    def free(self, data: st.DataObject) -> None:
        blocks = data.draw(st.permutations(sorted(self.held)))[: data.draw(st.integers(1, 12))]
        argument = ids(*blocks)
        self.pool.free(argument)
        argument[:] = NULL_BLOCK
        self.held -= Counter(blocks)
        released = [block for block in blocks if block not in self.held]
        self.device.give_back(released)
        for block in released:
            (self.idle if block in self.found() else self.plain).append(block)

    @precondition(lambda self: self.held)
    @rule(data=st.data(), key=st.sampled_from(KEYS))
    def publish(self, data: st.DataObject, key: BlockKey) -> None:
        """A block of the same content takes the place of one that is evicted."""
        block = data.draw(st.sampled_from(sorted(self.held)))
        assert self.pool.publish(key, block) == self.device.publish(key, block)

    @precondition(lambda self: self.found())
    @rule(data=st.data())
    def touch(self, data: st.DataObject) -> None:
        blocks = data.draw(st.lists(st.sampled_from(sorted(self.found())), unique=True, max_size=5))
        self.pool.touch(ids(*blocks))
        self.held.update(blocks)
        self.idle = [block for block in self.idle if block not in blocks]

    @rule(data=st.data())
    def refresh(self, data: st.DataObject) -> None:
        blocks = data.draw(
            st.lists(st.integers(1, self.pool.num_blocks - 1), unique=True, max_size=5)
        )
        self.pool.refresh(ids(*blocks))
        moved = [block for block in blocks if block in self.idle]
        self.idle = [block for block in self.idle if block not in moved] + moved

    @rule()
    def reset(self) -> None:
        """Blocks in use stay in use."""
        self.pool.reset()
        assert {*self.lost} == {*self.found().values()}
        self.lost.clear()
        self.device.clear()
        self.plain += self.idle
        self.idle = []

    @precondition(lambda self: self.plain + self.idle)
    @rule(data=st.data())
    def misuse(self, data: st.DataObject) -> None:
        wrong = data.draw(st.sampled_from([NULL_BLOCK, *self.plain, *self.idle]))
        with pytest.raises(AssertionError, match="without references"):
            self.pool.free(ids(*sorted(self.held), wrong))
        if self.plain:
            with pytest.raises(AssertionError, match="not all of"):
                self.pool.touch(ids(self.plain[0]))

    @invariant()
    def agree(self) -> None:
        pool, found = self.pool, self.found()
        self.shared |= found.keys()
        pool.check_integrity()
        assert pool.num_free_blocks == len(self.plain) + len(self.idle)
        assert pool.num_published_blocks == len(found)
        assert pool.num_evictions == self.device.num_lost
        assert [*map(pool.lookup, KEYS)] == [*map(self.device.found, KEYS)]
        assert sorted(pool.published_keys()) == sorted(found.values())
        everything = np.arange(pool.num_blocks)
        assert [pool.key_of(block) for block in everything.tolist()] == [
            found.get(b) for b in everything.tolist()
        ]
        assert pool.idle_blocks().tolist() == self.idle
        assert np.flatnonzero(pool.is_idle(everything)).tolist() == sorted(self.idle)
        assert np.flatnonzero(pool.may_be_shared(everything)).tolist() == sorted(self.shared)
        assert pool.ref_count.tolist() == [
            1,
            *(self.held[block] for block in everything[1:].tolist()),
        ]


TestPool = Pool.TestCase
TestPool.settings = settings(stateful_step_count=40)


def test_the_queue_of_published_blocks_stays_right_and_small_over_long_runs() -> None:
    """Each hit and refresh leaves a stale entry behind; they are dropped again and again."""
    rng = np.random.default_rng(0)
    pool = BlockPool(9)
    everything = pool.allocate(8)
    assert everything is not None
    for block in everything.tolist():
        pool.publish(key(block), block)
    pool.free(everything)
    order, evicted = everything.tolist(), 0
    for step in range(3_000):
        chosen = rng.permutation(order)[: rng.integers(1, 9)].astype(np.int32)
        if step % 3 == 0:
            pool.refresh(chosen)
        elif step % 3 == 1:
            pool.touch(chosen)
            pool.free(chosen)
        else:
            chosen = np.array(order[: len(chosen)], dtype=np.int32)
            got = pool.allocate(len(chosen))
            assert got is not None
            assert got.tolist() == chosen.tolist()
            evicted += len(got)
            for block in got.tolist():
                pool.publish((0, step.to_bytes(4, "big") + bytes([block])), block)
            pool.free(got)
        order = [block for block in order if block not in chosen.tolist()] + chosen.tolist()
        assert pool.idle_blocks().tolist() == order
        assert pool._lru._tail <= len(pool._lru._ids) == 18
    pool.check_integrity()
    assert pool.num_evictions == evicted


def test_only_a_block_in_use_is_published() -> None:
    with pytest.raises(AssertionError, match="has no reference"):
        BlockPool(4).publish(key(1), 3)


def test_integrity_checks_see_damage() -> None:
    for damage in (
        lambda pool: pool.ref_count.__setitem__(3, 1),
        lambda pool: pool.ref_count.__setitem__(1, 0),
        lambda pool: pool.ref_count.__setitem__(NULL_BLOCK, 0),
        lambda pool: pool._ring.__setitem__(5, 5),
        lambda pool: pool._keys.pop(2),
        lambda pool: pool._blocks.pop(key(2)),
        lambda pool: pool._published.__setitem__(1, 1),
        lambda pool: pool._published.__setitem__(2, 0),
        lambda pool: setattr(pool._lru, "size", 2),
        lambda pool: pool._lru.discard(ids(2)),
    ):
        pool = BlockPool(7)
        pool.allocate(2)
        pool.publish(key(2), 2)
        pool.free(ids(2))
        pool.check_integrity()
        damage(pool)
        with pytest.raises(AssertionError):
            pool.check_integrity()


def test_a_pool_needs_a_block_beside_the_null_block() -> None:
    with pytest.raises(ValueError, match="nothing to hand out"):
        BlockPool(1)


def test_a_reset_leaves_no_heir_to_a_content_of_two_blocks() -> None:
    pool = BlockPool(4)
    both = pool.allocate(2)
    assert both is not None
    assert [pool.publish(key(1), block) for block in both.tolist()] == [True, False]
    pool.reset()
    assert pool.lookup(key(1)) is None and pool.num_published_blocks == 0
    pool.check_integrity()

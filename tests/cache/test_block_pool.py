"""Block ids are handed out once, published contents last as long as they can, and misuse is caught."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from hybrid_kv.cache.block_pool import NULL_BLOCK, BlockKey, BlockPool


def ids(*values: int) -> np.ndarray:
    return np.array(values, dtype=np.int32)


def key(name: int) -> BlockKey:
    return name % 2, bytes([name])


class Pool(RuleBasedStateMachine):
    """The pool beside two lists and two dicts."""

    @initialize(num_blocks=st.integers(2, 12))
    def start(self, num_blocks: int) -> None:
        self.pool = BlockPool(num_blocks)
        self.plain = list(range(1, num_blocks))  # free and not published, in the order of their release
        self.idle: list[int] = []  # free and published, least recently used first
        self.held: Counter[int] = Counter()
        self.keys: dict[int, BlockKey] = {}
        self.evictions = 0

    @rule(count=st.integers(0, 12))
    def allocate(self, count: int) -> None:
        got = self.pool.allocate(count)
        if count > len(self.plain) + len(self.idle):
            assert got is None
            return
        assert got is not None
        assert got.dtype == np.int32
        expected = (self.plain + self.idle)[:count]
        assert got.tolist() == expected
        evicted = expected[len(self.plain) :]
        self.plain, self.idle = self.plain[count:], self.idle[len(evicted) :]
        self.evictions += len(evicted)
        for block in evicted:
            del self.keys[block]
        self.held.update(expected)
        got[:] = NULL_BLOCK  # the caller's own copy

    @precondition(lambda self: self.held)
    @rule(data=st.data())
    def free(self, data: st.DataObject) -> None:
        blocks = data.draw(st.permutations(sorted(self.held)))[: data.draw(st.integers(1, 12))]
        argument = ids(*blocks)
        self.pool.free(argument)
        argument[:] = NULL_BLOCK
        self.held -= Counter(blocks)
        for block in blocks:
            if block not in self.held:
                (self.idle if block in self.keys else self.plain).append(block)

    @precondition(lambda self: self.held)
    @rule(data=st.data(), name=st.integers(0, 15))
    def publish(self, data: st.DataObject, name: int) -> None:
        block = data.draw(st.sampled_from(sorted(self.held)))
        is_new = block not in self.keys and key(name) not in self.keys.values()
        assert self.pool.publish(key(name), block) == is_new
        if is_new:
            self.keys[block] = key(name)

    @precondition(lambda self: self.keys)
    @rule(data=st.data())
    def touch(self, data: st.DataObject) -> None:
        blocks = data.draw(st.lists(st.sampled_from(sorted(self.keys)), unique=True, max_size=5))
        self.pool.touch(ids(*blocks))
        self.held.update(blocks)
        self.idle = [block for block in self.idle if block not in blocks]

    @rule(data=st.data())
    def refresh(self, data: st.DataObject) -> None:
        blocks = data.draw(st.lists(st.integers(1, self.pool.num_blocks - 1), unique=True, max_size=5))
        self.pool.refresh(ids(*blocks))
        moved = [block for block in blocks if block in self.idle]
        self.idle = [block for block in self.idle if block not in moved] + moved

    @rule()
    def reset(self) -> None:
        self.pool.reset()
        self.plain += self.idle
        self.idle, self.keys = [], {}

    @precondition(lambda self: self.plain + self.idle)
    @rule(data=st.data())
    def free_what_nobody_holds(self, data: st.DataObject) -> None:
        wrong = data.draw(st.sampled_from([NULL_BLOCK, *self.plain, *self.idle]))
        with pytest.raises(AssertionError, match="nobody holds"):
            self.pool.free(ids(*sorted(self.held), wrong))

    @invariant()
    def agree(self) -> None:
        pool = self.pool
        pool.check_integrity()
        assert pool.num_free_blocks == len(self.plain) + len(self.idle)
        assert pool.num_published_blocks == len(self.keys)
        assert pool.num_evictions == self.evictions
        assert {name: pool.lookup(key(name)) for name in range(16)} == {
            name: next((b for b, k in self.keys.items() if k == key(name)), None) for name in range(16)
        }
        everything = np.arange(pool.num_blocks)
        assert [pool.key_of(block) for block in everything.tolist()] == [self.keys.get(b) for b in everything.tolist()]
        assert np.flatnonzero(pool.is_idle(everything)).tolist() == sorted(self.idle)
        assert pool.ref_count.tolist() == [1, *(self.held[block] for block in everything[1:].tolist())]


TestPool = Pool.TestCase
TestPool.settings = settings(stateful_step_count=40)


def test_published_blocks_go_last_and_the_least_recently_used_of_them_first() -> None:
    pool = BlockPool(7)
    blocks = pool.allocate(6)
    assert blocks is not None
    for name, block in enumerate(blocks[:4].tolist()):
        pool.publish(key(name), block)
    pool.free(ids(4, 2, 6, 1, 3, 5))
    pool.refresh(ids(2, 5, 1))
    pool.touch(ids(4))
    pool.free(ids(4))
    order = [pool.allocate(1) for _ in range(6)]
    assert [int(one[0]) for one in order if one is not None] == [6, 5, 3, 2, 1, 4]
    assert pool.num_evictions == 4
    assert pool.num_published_blocks == 0


def test_too_much_is_refused_and_changes_nothing() -> None:
    pool = BlockPool(5)
    blocks = pool.allocate(3)
    assert blocks is not None
    pool.publish(key(1), 2)
    pool.free(ids(2))
    for _ in range(3):
        assert pool.allocate(3) is None
    assert (pool.num_free_blocks, pool.num_evictions, pool.lookup(key(1))) == (2, 0, 2)
    pool.check_integrity()


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
    for step in range(5_000):
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
        assert pool._lru.ids().tolist() == order
        assert pool._lru._tail <= len(pool._lru._ids) == 18
    pool.check_integrity()
    assert pool.num_evictions == evicted


def test_a_shared_block_is_free_when_its_last_reference_goes() -> None:
    pool = BlockPool(4)
    block = pool.allocate(1)
    assert block is not None
    pool.publish(key(1), int(block[0]))
    pool.touch(block)
    pool.free(block)
    assert pool.num_free_blocks == 2
    pool.free(block)
    assert pool.num_free_blocks == 3
    pool.check_integrity()


def test_the_first_block_of_a_key_stays() -> None:
    pool = BlockPool(5)
    pool.allocate(3)
    assert pool.publish(key(1), 1)
    assert not pool.publish(key(1), 2)
    assert not pool.publish(key(2), 1)
    assert (pool.lookup(key(1)), pool.lookup(key(2)), pool.key_of(2)) == (1, None, None)
    pool.free(ids(1, 2))
    # Block 2 holds the same content, but nobody can find it: it goes before block 1.
    assert [int(b[0]) for b in (pool.allocate(1), pool.allocate(1), pool.allocate(1)) if b is not None] == [4, 2, 1]


def test_a_twin_takes_the_place_of_an_evicted_block() -> None:
    pool = BlockPool(4)
    pool.allocate(3)
    for block in (1, 2, 3):
        assert pool.publish(key(1), block) == (block == 1)
    pool.free(ids(2))  # given back: it may be overwritten
    pool.free(ids(1))
    pool.allocate(2)
    assert pool.lookup(key(1)) == 3
    pool.check_integrity()
    pool.free(ids(3))
    assert pool.lookup(key(1)) == 3
    pool.allocate(1)
    assert pool.lookup(key(1)) is None


def test_a_reset_makes_no_twin_findable() -> None:
    pool = BlockPool(4)
    pool.allocate(2)
    pool.publish(key(1), 1)
    pool.publish(key(1), 2)
    pool.reset()
    assert pool.lookup(key(1)) is None
    pool.check_integrity()


def test_only_a_block_that_somebody_holds_is_published_and_only_a_published_one_touched() -> None:
    pool = BlockPool(4)
    with pytest.raises(AssertionError, match="nobody holds it"):
        pool.publish(key(1), 3)
    pool.allocate(1)
    with pytest.raises(AssertionError, match="not all of"):
        pool.touch(ids(1))
    pool.check_integrity()


def test_blocks_in_use_outlive_a_reset() -> None:
    pool = BlockPool(4)
    pool.allocate(2)
    pool.publish(key(1), 1)
    pool.publish(key(2), 2)
    pool.free(ids(2))
    pool.reset()
    assert (pool.num_published_blocks, pool.num_free_blocks, pool.lookup(key(1))) == (0, 2, None)
    assert pool.publish(key(3), 1)
    pool.free(ids(1))
    pool.check_integrity()
    assert pool.lookup(key(3)) == 1


def test_handed_out_ids_are_copies() -> None:
    pool = BlockPool(4)
    got = pool.allocate(2)
    assert got is not None
    pool.free(got)
    got[:] = 99
    pool.check_integrity()
    pool.allocate(3)
    for block in (1, 2, 3):
        pool.publish(key(block), block)
    pool.free(ids(1, 2, 3))
    got = pool.allocate(2)
    assert got is not None
    pool.free(got)
    got[:] = 99
    pool.check_integrity()


@pytest.mark.parametrize("wrong", [ids(1), ids(NULL_BLOCK), ids(2, 1), ids(-1)])
def test_freeing_what_nobody_holds_is_caught_and_changes_nothing(wrong: np.ndarray) -> None:
    pool = BlockPool(4)
    pool.allocate(2)
    pool.free(ids(1))
    with pytest.raises(AssertionError, match="nobody holds"):
        pool.free(wrong)
    pool.check_integrity()
    assert pool.ref_count.tolist() == [1, 0, 1, 0]


def test_integrity_checks_see_damage() -> None:
    for damage in (
        lambda pool: pool.ref_count.__setitem__(3, 1),
        lambda pool: pool.ref_count.__setitem__(1, 0),
        lambda pool: pool.ref_count.__setitem__(NULL_BLOCK, 0),
        lambda pool: pool._ring.__setitem__(5, 5),
        lambda pool: pool._keys.pop(2),
        lambda pool: pool._blocks.pop(key(2)),
        lambda pool: pool._published.__setitem__(1, True),
        lambda pool: pool._published.__setitem__(2, False),
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

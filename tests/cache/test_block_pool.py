"""Block ids are handed out once, come back in order, and misuse is caught."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hybrid_kv.cache.block_pool import NULL_BLOCK, BlockPool


def ids(*values: int) -> np.ndarray:
    return np.array(values, dtype=np.int32)


@given(st.integers(2, 12), st.lists(st.tuples(st.booleans(), st.integers(0, 12)), max_size=60))
def test_any_order_of_operations_keeps_the_pool_whole(num_blocks: int, operations: list[tuple[bool, int]]) -> None:
    pool = BlockPool(num_blocks)
    free, held = list(range(1, num_blocks)), []  # the model: a queue and the allocations that are out
    for allocate, number in operations:
        if allocate:
            got = pool.allocate(number)
            if number > len(free):
                assert got is None
            else:
                assert got is not None
                assert got.dtype == np.int32
                assert got.tolist() == free[:number]
                held.append(got)
                free = free[number:]
        elif held:
            back = held.pop(number % len(held))
            pool.free(back)
            free += back.tolist()
        pool.check_integrity()
        assert pool.num_free_blocks == len(free)


def test_a_shared_block_is_free_when_its_last_reference_goes() -> None:
    pool = BlockPool(4)
    block = pool.allocate(1)
    assert block is not None
    pool.ref_count[block] += 1
    pool.free(block)
    assert pool.num_free_blocks == 2
    pool.free(block)
    assert pool.num_free_blocks == 3
    pool.check_integrity()


def test_handed_out_ids_are_copies() -> None:
    pool = BlockPool(4)
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
        lambda pool: pool._ring.__setitem__(2, 2),
    ):
        pool = BlockPool(5)
        pool.allocate(1)
        pool.check_integrity()
        damage(pool)
        with pytest.raises(AssertionError):
            pool.check_integrity()


def test_a_pool_needs_a_block_beside_the_null_block() -> None:
    with pytest.raises(ValueError, match="nothing to hand out"):
        BlockPool(1)

"""Requests hold exactly the blocks they need, all groups together or none."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from hybrid_kv.cache.manager import KVCacheManager
from hybrid_kv.cache.spec import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec, MambaSpec
from hybrid_kv.config import ConfigError, MambaCacheMode


def manager(num_blocks: int, k: int = 0, mode: MambaCacheMode = "none") -> KVCacheManager:
    attention = FullAttentionSpec(4, num_kv_heads=1, head_size=8, dtype=torch.float16)
    state = MambaSpec(
        100, ((8,),), (torch.float16,), attention.page_size_bytes, mamba_cache_mode=mode, num_speculative_blocks=k
    )
    return KVCacheManager(
        KVCacheConfig(num_blocks, (KVCacheGroupSpec(("m",), state), KVCacheGroupSpec(("a",), attention)))
    )


@given(
    num_blocks=st.integers(2, 20),
    k=st.integers(0, 2),
    operations=st.lists(st.tuples(st.sampled_from("abc"), st.integers(0, 30)), max_size=40),
)
def test_any_order_of_operations_keeps_ownership_whole(
    num_blocks: int, k: int, operations: list[tuple[str, int]]
) -> None:
    subject = manager(num_blocks, k)
    tokens: dict[str, int] = {}
    for request, number in operations:
        if number == 0:
            subject.free(request)
            tokens.pop(request, None)
        else:
            before = [list(ids) for ids in subject.block_ids(request)]
            free = subject.pool.num_free_blocks
            new = subject.allocate_slots(request, number)
            if new is None:
                assert subject.pool.num_free_blocks == free
                assert [list(ids) for ids in subject.block_ids(request)] == before
            else:
                tokens[request] = max(number, tokens.get(request, 0))
                after = [list(ids) for ids in subject.block_ids(request)]
                assert after == [old + list(ids) for old, ids in zip(before, new.per_group(), strict=True)]
                assert [len(ids) for ids in after] == [1 + k, -(-tokens[request] // 4)]
        subject.check_integrity(running=tuple(tokens))
    for request in list(tokens):
        subject.free(request)
    subject.check_integrity()
    assert subject.pool.num_free_blocks == num_blocks - 1


def test_a_refused_request_leaves_nothing_behind() -> None:
    subject = manager(num_blocks=4)
    assert subject.allocate_slots("big", 100) is None
    subject.check_integrity(running=())
    assert subject._num_held == {}
    assert subject.can_ever_fit(8)
    assert not subject.can_ever_fit(9)


def test_integrity_sees_a_stranger_and_a_double_owner() -> None:
    subject = manager(num_blocks=8)
    subject.allocate_slots("a", 4)
    with pytest.raises(AssertionError, match=r"do not run hold blocks: \['a'\]"):
        subject.check_integrity(running=("b",))
    subject.allocate_slots("b", 4)
    subject._held["b"] = subject._held["a"]
    with pytest.raises(AssertionError, match="two owners"):
        subject.check_integrity(running=("a", "b"))


def test_integrity_sees_a_leak() -> None:
    subject = manager(num_blocks=8)
    subject.pool.allocate(1)
    with pytest.raises(AssertionError, match="1 blocks are in use, 0 have an owner"):
        subject.check_integrity()


@pytest.mark.parametrize("mode", ["align", "all"])
def test_modes_that_are_only_planned_are_refused(mode: MambaCacheMode) -> None:
    with pytest.raises(ConfigError, match=f"mamba_cache_mode '{mode}' can be planned but not run"):
        manager(8, mode=mode)

"""Sliding windows: blocks that a request keeps, its peak, and prefixes that can be restored."""

from __future__ import annotations

from array import array
from dataclasses import replace
from math import lcm
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from hybrid_kv import LLM, SamplingParams
from hybrid_kv.cache.block_hash import BlockHashes
from hybrid_kv.cache.block_pool import NULL_BLOCK, BlockKey, BlockPool
from hybrid_kv.cache.manager import KVCacheManager
from hybrid_kv.cache.prefix import longest_hit
from hybrid_kv.cache.request_blocks import LogicalBlockRules
from hybrid_kv.cache.spec import (
    FullAttentionSpec,
    KVCacheConfig,
    KVCacheGroupSpec,
    KVCacheSpec,
    MambaSpec,
    SlidingWindowSpec,
    StatePart,
    StateProgress,
    group_layers,
)
from hybrid_kv.check.guard.scenario import answer_book
from hybrid_kv.config import ConfigError

KIB = torch.float32


def window_spec(window: int, block_size: int, most: int | None = None) -> SlidingWindowSpec:
    return SlidingWindowSpec(block_size, 1, 4, KIB, window, most)


def manager_of(*specs: KVCacheSpec, caching: bool = True) -> KVCacheManager:
    groups = tuple(KVCacheGroupSpec((f"layer {i}",), spec) for i, spec in enumerate(specs))
    return KVCacheManager(KVCacheConfig(300, groups), caching)


def test_blocks_wholly_before_the_window_of_the_next_token_are_freed() -> None:
    """After n tokens the next one sees tokens n - 4 … n; blocks of 4 before these are freed."""
    manager = manager_of(window_spec(5, 4), caching=False)
    for n in range(24):
        assert manager.allocate_slots("0", n, 1, is_decode=True) is not None
        seen = range(max(0, n - 4), n + 1)
        assert len(manager.block_ids("0")[0]) == len({token // 4 for token in seen})


@given(st.integers(1, 30), st.integers(1, 9), st.integers(1, 40), st.integers(1, 90))
def test_a_request_holds_at_most_what_is_planned_and_there_is_one_that_does(
    window: int, block_size: int, most: int, length: int
) -> None:
    spec = window_spec(window, block_size, most)
    held = max(
        -(-end // block_size) - max(0, start - window + 1) // block_size
        for start in range(length)
        for end in [min(start + most, length)]
    )
    assert spec.max_blocks_per_request(length) >= held
    # The bound is met once a span may begin anywhere.
    whole = [
        -(-(start + most) // block_size) - (start - window + 1) // block_size
        for start in range(window, window + block_size)
    ]
    assert spec.max_blocks_per_request(window + block_size + most) >= max(whole)
    assert spec.max_blocks_per_request(10**6) == max(whole)
    assert replace(spec, max_step_tokens=None).max_blocks_per_request(length) == -(
        -length // block_size
    )
    assert spec.block_table_width(length) == -(-length // block_size)


def state_spec(block_size: int) -> MambaSpec:
    return MambaSpec(block_size, (StatePart("ssm", (4,), KIB),), mamba_cache_mode="align")


FULL = FullAttentionSpec(4, 1, 4, KIB)


@given(st.data())
def test_a_hit_is_the_longest_prefix_that_every_group_accepts(data: st.DataObject) -> None:
    """Any blocks may be lost: a group that accepts no length says nothing of shorter ones."""
    spec_of = st.one_of(
        st.builds(window_spec, st.integers(1, 20), st.sampled_from([2, 4, 8])),
        st.builds(lambda size: replace(FULL, block_size=size), st.sampled_from([4, 8])),
        st.builds(state_spec, st.sampled_from([4, 8])),
    )
    specs = data.draw(st.lists(spec_of, min_size=1, max_size=4))
    tokens = list(range(49))
    hashes = BlockHashes()
    found: list[set[int]] = []
    pool = BlockPool(200)
    for group, spec in enumerate(specs):
        count = 48 // spec.block_size
        lost = data.draw(st.sets(st.integers(0, count - 1), max_size=4))
        found.append(set(range(count)) - lost)
        chain = hashes.chain(spec.block_size, tokens, 48)
        for block_idx in found[-1]:
            ids = pool.allocate(1)
            assert ids is not None
            pool.publish((group, chain[block_idx]), int(ids[0]))

    def accepts(spec: KVCacheSpec, blocks: set[int], end: int) -> bool:
        if isinstance(spec, MambaSpec):
            needed = range(end - 1, end)
        elif isinstance(spec, SlidingWindowSpec):
            needed = range(max(0, end - spec.sliding_window + 1), end)
        else:
            needed = range(end)
        return {token // spec.block_size for token in needed} <= blocks

    unit = lcm(*(spec.block_size for spec in specs))
    ends = range(0, 49, unit)
    due = max(end for end in ends if not end or all(map(accepts, specs, found, [end] * len(specs))))
    rules = [LogicalBlockRules(spec) for spec in specs]
    hit = longest_hit(rules, unit, pool, None, hashes, tokens)
    assert hit.num_tokens == due
    assert (hit.vetoed_by is not None) == (max(hit.group_tokens) >= due + unit)


def publish(manager: KVCacheManager, name: str, tokens: list[int], step: int) -> None:
    """Run a request's tokens in chunks, and end it."""
    hashes = BlockHashes()
    for start in range(0, len(tokens), step):
        end = min(start + step, len(tokens))
        assert manager.allocate_slots(name, start, end - start, is_decode=False) is not None
        manager.cache_blocks(name, hashes, tokens, StateProgress(end, end), is_decode=False)
    manager.free(name)


def test_a_hit_takes_the_blocks_of_the_window_and_null_ones_before_them() -> None:
    """A window of 6 before token 24 begins at token 19, in block 4; full attention takes all."""
    manager = manager_of(FULL, window_spec(6, 4))
    tokens = list(range(25))
    publish(manager, "0", tokens, 7)
    hit = manager.find_longest_cache_hit(BlockHashes(), tokens, use_offload=False)
    assert hit.num_tokens == 24
    new = manager.allocate_slots("1", 24, 1, is_decode=False, hit=hit)
    assert new is not None and new.counts == array("i", [7, 7])
    full, window = new.per_group()
    assert (full != NULL_BLOCK).all()
    assert np.flatnonzero(window).tolist() == [4, 5, 6]
    manager.free("1")
    manager.check_integrity()


class Stored:
    """An offload tier that remembers what it is given."""

    def __init__(self) -> None:
        self.blocks: list[int] = []

    def store(self, published: list[tuple[BlockKey, int]]) -> None:
        self.blocks += [block for _, block in published]

    def check_integrity(self) -> None:
        pass


def test_null_blocks_are_never_stored_or_published() -> None:
    manager = manager_of(FULL, window_spec(6, 4))
    manager.offload = stored = Stored()  # type: ignore[assignment] # only these methods are called
    publish(manager, "0", list(range(40)), 9)
    manager.adopt("1", 23)
    tokens = list(range(100, 140))
    manager.cache_blocks("1", BlockHashes(), tokens, StateProgress(24, 24), is_decode=True)
    assert NULL_BLOCK not in stored.blocks
    assert len(stored.blocks) == 2 * 10 + 6 + 1  # of the adopted window only block 5 is whole


def specs_of(pattern: str) -> dict[str, Any]:
    llm = LLM(
        answer_book(pattern).model,
        block_size=8,
        num_blocks=90,
        max_model_len=80,
        device="cpu",
        mamba_cache_mode="align",
    )
    return {
        name: spec
        for group in llm.plan.config.groups
        for name, spec in zip(group.layer_names, group.layer_specs, strict=True)
    }


def test_vllm_55600_a_drafters_window_changes_no_other_block_size() -> None:
    """The drafter's tokens are twice as wide, its blocks half as long; other block sizes stay."""
    alone, beside = specs_of("M*"), specs_of("M*-")
    assert {name: beside[name] for name in alone} == alone
    assert beside["layers.2"].block_size == 4
    assert beside["layers.2"].page_size_bytes == beside["layers.1"].page_size_bytes


@pytest.mark.parametrize("options", [{}, {"kv_offload_bytes": 1 << 20}, {"async_scheduling": True}])
def test_a_window_with_smaller_blocks_beside_states_gives_the_right_tokens(
    options: dict[str, Any],
) -> None:
    book = answer_book("M-*")
    llm = LLM(
        book.model,
        block_size=8,
        num_blocks=90,
        max_num_seqs=3,
        max_num_batched_tokens=20,
        max_model_len=80,
        device="cpu",
        mamba_cache_mode="align",
        sanitize=True,
        **options,
    )
    drawn = np.random.default_rng(5).integers(0, 97, 50).tolist()
    params = SamplingParams(max_tokens=9)
    for again in range(2):
        outputs = llm.generate([drawn[:n] for n in (20, 33, 50)], params, progress=False)
        assert [output.token_ids for output in outputs] == [
            book.answer(drawn[:n], params, 80) for n in (20, 33, 50)
        ]
        if again:
            assert [output.cached_tokens for output in outputs] == [16, 32, 48]
        elif "kv_offload_bytes" in options:
            llm.reset_prefix_cache()


def test_windows_of_several_sizes_are_groups_of_their_own() -> None:
    specs: dict[str, KVCacheSpec] = {
        "a": window_spec(5, 4),
        "b": window_spec(9, 4),
        "c": window_spec(5, 4),
    }
    assert [group.layer_names for group in group_layers(specs)] == [("a",), ("c",), ("b",)]


def test_a_window_of_no_token_is_refused() -> None:
    with pytest.raises(ConfigError, match="sliding_window=0"):
        window_spec(0, 4)

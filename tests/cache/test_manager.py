"""Requests hold exactly the blocks they need, in all groups or none, and hit every prefix."""

from __future__ import annotations

from collections.abc import Sequence
from typing import cast

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from hybrid_kv.cache.block_hash import BlockHashes
from hybrid_kv.cache.block_pool import NULL_BLOCK, BlockKey
from hybrid_kv.cache.manager import HitLostError, KVCacheManager
from hybrid_kv.cache.offload import KVOffload, Page
from hybrid_kv.cache.request_blocks import NO_HIT, NewBlocks, PrefixHit
from hybrid_kv.cache.spec import (
    FullAttentionSpec,
    KVCacheConfig,
    KVCacheGroupSpec,
    KVCacheSpec,
    MambaSpec,
    SlotsSpec,
    StatePart,
    StateProgress,
)
from hybrid_kv.config import ConfigError
from hybrid_kv.kernels.common.integers import cdiv

TEXT = list(range(100, 180))


def attention(block_size: int) -> FullAttentionSpec:
    return FullAttentionSpec(block_size, num_kv_heads=1, head_size=8, dtype=torch.float16)


def mamba(block_size: int, mode: str = "all", k: int = 0) -> MambaSpec:
    return MambaSpec(
        block_size,
        (StatePart("state", (8,), torch.float16),),
        mamba_cache_mode=mode,
        rollback=SlotsSpec(k),
    )


def manager(
    *specs: KVCacheSpec,
    num_blocks: int = 100,
    caching: bool = True,
    lookahead: int = 0,
    limit: int | None = None,
) -> KVCacheManager:
    groups = tuple(KVCacheGroupSpec((str(i),), spec) for i, spec in enumerate(specs))
    return KVCacheManager(KVCacheConfig(num_blocks, groups), caching, lookahead, limit)


class Owner:
    """A request at the manager, run as the scheduler would."""

    def __init__(
        self, subject: KVCacheManager, name: str, tokens: Sequence[int], salt: str = ""
    ) -> None:
        self.subject, self.name, self.tokens = subject, name, list(tokens)
        self.hashes = BlockHashes(salt)
        self.computed = 0
        self.hit = NO_HIT
        self.logical_blocks: list[list[int]] = [[] for _ in subject.config.groups]

    def look(self) -> PrefixHit:
        return self.subject.find_longest_cache_hit(self.hashes, self.tokens, use_offload=True)

    def allocate(
        self, end: int, is_decode: bool = False, hit: PrefixHit = NO_HIT
    ) -> NewBlocks | None:
        start = hit.num_tokens or self.computed
        new = self.subject.allocate_slots(self.name, start, end - start, is_decode, hit, start)
        if new is not None:
            self.computed = start
            for logical_blocks, part in zip(self.logical_blocks, new.per_group(), strict=True):
                logical_blocks += part.tolist()
        return new

    def publish(self, end: int, is_decode: bool = False) -> None:
        self.subject.cache_blocks(
            self.name, self.hashes, self.tokens, StateProgress(end, end), is_decode
        )
        self.computed = end

    def run(self, *ends: int, is_decode: bool = False) -> Owner:
        """Chunks up to `ends`; the first one takes the hit."""
        for end in ends or (len(self.tokens),):
            if not self.computed:
                self.hit = self.look()
            assert self.allocate(end, is_decode, NO_HIT if self.computed else self.hit) is not None
            self.publish(end, is_decode)
        return self

    def finish(self) -> None:
        self.subject.free(self.name)


def forget(subject: KVCacheManager, owner: Owner, group: int, block_idx: int) -> None:
    """As if the block had been evicted, whoever holds it."""
    size = subject.config.groups[group].spec.block_size
    chain = owner.hashes.chain(size, owner.tokens, (block_idx + 1) * size)
    block = subject.pool.lookup((group, chain[block_idx]))
    assert block is not None
    subject.pool._unpublish([block])


# Holding blocks.


@given(
    num_blocks=st.integers(2, 20),
    k=st.integers(0, 2),
    operations=st.lists(st.tuples(st.sampled_from("abc"), st.integers(0, 30)), max_size=40),
)
def test_any_order_of_operations_keeps_ownership_whole(
    num_blocks: int, k: int, operations: list[tuple[str, int]]
) -> None:
    subject = manager(mamba(100, "none", k), attention(4), num_blocks=num_blocks, caching=False)
    tokens: dict[str, int] = {}
    for request, number in operations:
        known = tokens.get(request, 0)
        if number == 0:
            subject.free(request)
            tokens.pop(request, None)
        else:
            before = [list(ids) for ids in subject.block_ids(request)]
            free = subject.pool.num_free_blocks
            new = subject.allocate_slots(
                request, known, max(0, number - known), is_decode=False, num_seen_tokens=known
            )
            if new is None:
                assert subject.pool.num_free_blocks == free
                assert [list(ids) for ids in subject.block_ids(request)] == before
            else:
                tokens[request] = max(number, known)
                after = [list(ids) for ids in subject.block_ids(request)]
                assert after == [
                    old + list(ids) for old, ids in zip(before, new.per_group(), strict=True)
                ]
                assert [len(ids) for ids in after] == [1 + k, -(-tokens[request] // 4)]
        subject.check_integrity(running=tuple(tokens))
    for request in list(tokens):
        subject.free(request)
    subject.check_integrity()
    assert subject.pool.num_free_blocks == num_blocks - 1


def test_a_request_of_exactly_the_pool_without_the_null_block_fits() -> None:
    """vllm!47272: no request gets the null block."""
    for mode, held in (("none", 1 + 2), ("align", 2 + 2), ("all", 5 + 2)):
        for extra in (0, 1):
            subject = manager(
                mamba(4, mode, 2), attention(4), num_blocks=held + 5 + extra, caching=mode != "none"
            )
            assert subject.can_ever_fit(20) == bool(extra)


def test_lookahead_needs_attention_blocks_but_none_behind_max_model_len() -> None:
    subject = manager(mamba(8, "all", 3), attention(4), lookahead=3, limit=22)
    for end, logical_blocks in ((8, 3), (9, 3), (10, 4), (17, 5), (18, 6), (20, 6), (22, 6)):
        owner = Owner(subject, "a", TEXT)
        owner.allocate(end)
        assert [len(ids) for ids in owner.logical_blocks] == [cdiv(end, 8), logical_blocks]
        owner.finish()
    # 20 tokens and 2 positions behind them: 6 attention blocks, 3 states, and 3 for drafts.
    for usable in (11, 12):
        subject = manager(
            mamba(8, "all", 3), attention(4), lookahead=3, limit=22, num_blocks=1 + usable
        )
        assert subject.can_ever_fit(20) == (usable == 12)


@pytest.mark.parametrize("mode", ["none", "align", "all"])
@given(data=st.data())
@settings(max_examples=75)
def test_no_request_ever_holds_more_than_its_spec_says(mode: str, data: st.DataObject) -> None:
    k = data.draw(st.integers(0, 3))
    sizes = data.draw(st.tuples(st.integers(1 + k, 9), st.integers(1, 9)))
    lookahead = data.draw(st.sampled_from([0, k]))
    specs = mamba(sizes[0], mode, k), attention(sizes[1])
    limit = data.draw(st.integers(2, 40))
    subject = manager(*specs, caching=mode != "none", lookahead=lookahead, limit=limit)
    owner = Owner(subject, "a", TEXT)
    prompt = data.draw(st.integers(1, limit - 1))
    highest = [0, 0]
    while owner.computed < limit - 1:
        start = owner.computed
        if start < prompt:
            end = min(prompt, start + data.draw(st.integers(1, 12)))
            accepted, is_decode = end, start > 0 and end == start + 1
        else:
            end = min(limit - 1, start + 1 + data.draw(st.integers(0, k)))
            accepted, is_decode = data.draw(st.integers(start + 1, end)), True
        assert owner.allocate(end, is_decode) is not None
        held = [len(ids) for ids in subject.block_ids("a")]
        highest = [max(pair) for pair in zip(highest, held, strict=True)]
        assert [len(logical_blocks) for logical_blocks in owner.logical_blocks] <= [
            spec.block_table_width(limit) for spec in specs
        ]
        owner.publish(accepted, is_decode)
        subject.check_integrity(["a"])
    bounds = [spec.max_blocks_per_request(limit) for spec in specs]
    assert all(most <= bound for most, bound in zip(highest, bounds, strict=True))
    # The last token is sampled, never cached; nothing else is too much.
    assert lookahead or highest[1] == cdiv(limit - 1, sizes[1])
    if owner.computed > prompt and mode == "all":
        assert cdiv(limit - 1, sizes[0]) + k == highest[0]
    if owner.computed > max(prompt + sizes[0], 2 * sizes[0]):
        assert mode == "all" or highest[0] == bounds[0]
    owner.finish()
    assert subject.pool.num_free_blocks == 99


# Hits.


@given(data=st.data())
@settings(max_examples=100)
def test_a_hit_is_the_longest_prefix_that_is_there(data: st.DataObject) -> None:
    sizes = data.draw(st.lists(st.sampled_from([1, 2, 3, 4, 8]), min_size=1, max_size=3))
    kinds = [data.draw(st.booleans()) for _ in sizes]
    subject = manager(
        *(mamba(n) if state else attention(n) for n, state in zip(sizes, kinds, strict=True))
    )
    owner = Owner(subject, "a", TEXT[:30]).run()
    present = [set(range(30 // n)) for n in sizes]
    for _ in range(data.draw(st.integers(0, 6))):
        group = data.draw(st.integers(0, len(sizes) - 1))
        if present[group]:
            block_idx = data.draw(st.sampled_from(sorted(present[group])))
            present[group].remove(block_idx)
            forget(subject, owner, group, block_idx)
    same = data.draw(st.integers(0, 30))
    length = data.draw(st.integers(1, 34))
    text = (TEXT[:same] + [7] * 34)[:length]

    def restores(group: int, tokens: int) -> bool:
        if tokens % sizes[group] or tokens > min(same, length - 1):
            return False
        logical_blocks = range(tokens // sizes[group])
        return set(logical_blocks[-1:] if kinds[group] else logical_blocks) <= present[group]

    groups = range(len(sizes))
    hit = Owner(subject, "b", text).look()
    unit = int(np.lcm.reduce(sizes))
    assert hit.num_tokens == max(
        n for n in range(31) if all(restores(group, n) for group in groups)
    )
    assert hit.group_tokens == tuple(
        max(n for n in range(31) if restores(group, n)) for group in groups
    )
    longer = hit.num_tokens + unit
    if max(hit.group_tokens) >= longer:
        assert hit.vetoed_by is not None
        assert not restores(hit.vetoed_by, longer)
    else:
        assert hit.vetoed_by is None


@pytest.mark.parametrize("usable", [6, 7])
def test_a_hit_is_taken_whole_or_not_at_all(usable: int) -> None:
    """A free block of the hit is a free block less: 2 + 1 of them, and 2 + 2 new ones."""
    subject = manager(attention(4), mamba(4), num_blocks=1 + usable)
    Owner(subject, "a", TEXT[:8]).run().finish()
    owner = Owner(subject, "b", TEXT[:16])
    hit = owner.look()
    assert hit.num_tokens == 8
    published = subject.pool.num_published_blocks
    new = owner.allocate(16, hit=hit)
    if usable == 6:
        assert new is None
        assert subject.pool.num_free_blocks == 6
        assert subject.pool.num_published_blocks == published
        assert subject.block_ids("b")[0].size == 0
        assert owner.look() == hit
        subject.check_integrity()
        return
    assert new is not None
    assert list(new.counts) == [4, 4]
    assert owner.logical_blocks[1][0] == NULL_BLOCK
    assert sum(logical_blocks.count(NULL_BLOCK) for logical_blocks in owner.logical_blocks) == 1
    assert subject.pool.num_free_blocks == 0
    subject.check_integrity(["b"])


def test_nothing_is_found_before_it_was_computed() -> None:
    """vllm!56525: scheduled is not written.

    An owner that is dropped in between has published nothing.
    """
    subject = manager(attention(4), mamba(4))
    owner = Owner(subject, "a", TEXT[:12])
    owner.allocate(12)
    assert Owner(subject, "b", TEXT[:12]).look() == PrefixHit(0, (0, 0))
    owner.finish()
    assert Owner(subject, "b", TEXT[:12]).look() == PrefixHit(0, (0, 0))


def test_align_publishes_only_states_that_a_chunk_left_on_a_boundary() -> None:
    """vllm!51113: a chunk that ends off the grid has no state for any key, skipped or not."""
    subject = manager(attention(4), mamba(4, "align"))
    owner = Owner(subject, "a", TEXT[:30]).run(3, 6, 12, 19, 20, 27)
    chain = owner.hashes.chain(4, TEXT[:30], 30)
    found = [
        [subject.pool.lookup((group, digest)) is not None for digest in chain[:6]]
        for group in (0, 1)
    ]
    assert found == [[True] * 6, [False, False, True, False, True, False]]
    hits = [Owner(subject, "b", TEXT[:length]).look() for length in (9, 13, 20, 21, 26)]
    assert hits == [
        PrefixHit(0, (8, 0), vetoed_by=1, junction=8),
        PrefixHit(12, (12, 12)),
        PrefixHit(12, (16, 12), vetoed_by=1, junction=16),
        PrefixHit(20, (20, 20)),
        PrefixHit(20, (24, 20), vetoed_by=1, junction=24),
    ]


def test_align_publishes_the_boundaries_that_verify_steps_passed() -> None:
    subject = manager(attention(4), mamba(4, "align", 2))
    owner = Owner(subject, "a", TEXT[:10]).run(8, 10)
    for before, end, accepted in ((10, 13, 11), (11, 14, 13), (13, 16, 16), (16, 19, 17)):
        assert owner.computed == before
        owner.tokens = TEXT[:accepted]
        owner.allocate(end, is_decode=True)
        owner.publish(accepted, is_decode=True)
        subject.check_integrity(["a"])
    assert [Owner(subject, "b", TEXT[:n]).look().num_tokens for n in (9, 12, 13, 16, 17)] == [
        8,
        8,
        12,
        12,
        16,
    ]


# A further tier.


class Tier:
    """What an offload tier may do: keep blocks, lose them, fail."""

    def __init__(self) -> None:
        self.blocks: set[BlockKey] = set()
        self.fetched: list[BlockKey] = []
        self.loaded: dict[BlockKey, int] = {}
        self.is_lost = self.fails = False

    def check_integrity(self) -> None:
        pass

    def store(self, published: Sequence[tuple[BlockKey, int]]) -> None:
        self.blocks |= {key for key, _ in published}

    def contains(self, key: BlockKey) -> bool:
        return key in self.blocks

    def fetch(self, keys: Sequence[BlockKey]) -> list[Page] | None:
        self.fetched += keys
        return None if self.is_lost else [Page(key, torch.zeros(1)) for key in keys]

    def load(self, pages: Sequence[Page], block_ids: Sequence[int]) -> None:
        if self.fails:
            raise RuntimeError("out of memory")
        self.loaded.update(zip((page.key for page in pages), block_ids, strict=True))


def with_tier(num_blocks: int = 100) -> tuple[KVCacheManager, Tier]:
    """The tier has 12 tokens of `TEXT`, the device the first 4 of them."""
    subject, tier = manager(attention(4), mamba(4), num_blocks=num_blocks), Tier()
    subject.offload = cast(KVOffload, tier)
    Owner(subject, "a", TEXT[:12]).run().finish()
    subject.reset_prefix_cache()
    Owner(subject, "b", TEXT[:5]).run().finish()
    tier.fetched.clear()
    tier.loaded.clear()
    return subject, tier


def test_nothing_is_read_for_a_request_that_does_not_fit() -> None:
    subject, tier = with_tier(num_blocks=1 + 6)
    other = Owner(subject, "d", TEXT[40:44]).run()
    owner = Owner(subject, "c", TEXT[:13])
    for _ in range(3):
        assert owner.allocate(13, hit=owner.look()) is None  # 4 blocks of attention and 2 states
        assert not subject.may_fit("c")
    assert subject.may_fit("another")
    assert not tier.fetched
    other.finish()
    assert subject.may_fit("c")
    assert owner.allocate(13, hit=owner.look()) is not None
    assert len(tier.fetched) == len(tier.loaded) == 3


@pytest.mark.parametrize("event", ["its own block", "another block", "reset"])
def test_what_makes_a_rejected_request_worth_a_look(event: str) -> None:
    subject = manager(attention(4), mamba(4), num_blocks=1 + 8)
    other = Owner(subject, "a", TEXT[40:52] if event == "another block" else TEXT[:12])
    other.allocate(12)
    owner = Owner(subject, "b", TEXT[:12])
    assert owner.allocate(12, hit=owner.look()) is None
    assert not subject.may_fit("b")
    if event == "reset":
        subject.reset_prefix_cache()
    else:
        other.publish(12)
    assert subject.may_fit("b") == (event != "another block")


def test_a_hit_that_was_lost_meanwhile_takes_nothing() -> None:
    subject, tier = with_tier()
    owner = Owner(subject, "c", TEXT[:13])
    free, published = subject.pool.num_free_blocks, subject.pool.num_published_blocks
    tier.is_lost = True
    with pytest.raises(HitLostError, match="request c: 3 blocks"):
        owner.allocate(13, hit=owner.look())
    subject.check_integrity()
    assert (subject.pool.num_free_blocks, subject.pool.num_published_blocks) == (free, published)
    without = subject.find_longest_cache_hit(owner.hashes, owner.tokens, use_offload=False)
    assert without == PrefixHit(4, (4, 4))
    assert owner.allocate(13, hit=without) is not None


def test_what_failed_to_load_is_not_found_and_not_lost() -> None:
    subject, tier = with_tier()
    owner = Owner(subject, "c", TEXT[:13])
    tier.fails = True
    with pytest.raises(RuntimeError, match="out of memory"):
        owner.allocate(13, hit=owner.look())
    owner.finish()
    subject.check_integrity()
    assert subject.pool.num_free_blocks == 99
    assert (
        subject.find_longest_cache_hit(owner.hashes, owner.tokens, use_offload=False).num_tokens
        == 4
    )
    tier.fails = False
    assert owner.allocate(13, hit=owner.look()) is not None
    assert len(tier.loaded) == 3
    subject.check_integrity(["c"])


def test_a_step_that_needs_no_block_gets_none() -> None:
    """Most decode steps: one count for each group all the same, and no call of the pool."""
    subject = manager(attention(4), mamba(4), mamba(8))
    owner = Owner(subject, "a", TEXT[:6]).run()
    subject.pool.allocate = None  # type: ignore[method-assign, assignment]
    new = owner.allocate(8, is_decode=True)
    assert new is not None
    assert (len(new.ids), list(new.counts)) == (0, [0, 0, 0])
    subject._count_missing = None  # type: ignore[method-assign, assignment]
    again = owner.allocate(8, is_decode=True)  # nor are the logical blocks counted again
    assert again is not None and not len(again.ids)


# What is evicted first.


def depths(subject: KVCacheManager, owner: Owner) -> list[tuple[int, int]]:
    """Group and end of each published block, in the order of eviction."""
    ends = {}
    for group, part in enumerate(subject.config.groups):
        size = part.spec.block_size
        for block_idx, digest in enumerate(owner.hashes.chain(size, owner.tokens, 0)):
            ends[group, digest] = group, (block_idx + 1) * size
    keys = [subject.pool.key_of(block) for block in subject.pool.idle_blocks().tolist()]
    return [ends[key] for key in keys if key is not None]


@pytest.mark.parametrize("mode", ["align", "all"])
@pytest.mark.parametrize("sizes", [(4, 4), (4, 8), (8, 4)])
def test_the_deepest_blocks_of_all_groups_are_evicted_first_and_together(
    mode: str, sizes: tuple[int, int]
) -> None:
    """A state is worth nothing without the attention blocks before it, and the other way round."""
    subject = manager(attention(sizes[0]), mamba(sizes[1], mode))
    owner = Owner(subject, "a", TEXT[:34]).run(8, 16, 24, 32, 34)
    owner.finish()
    ends = [end for _, end in depths(subject, owner)]
    assert len(ends) == 32 // sizes[0] + (4 if mode == "align" else 32 // sizes[1])
    assert ends == sorted(ends, reverse=True)


def test_states_that_were_given_back_are_as_recent_as_their_request() -> None:
    """vllm!52244's kind of loss: a long request's states must not go before an older request's."""
    subject = manager(attention(4), mamba(4, "align"))
    long = Owner(subject, "a", TEXT[:30]).run(4, 8)
    other = Owner(subject, "b", TEXT[40:49]).run(4, 8, 9)
    other.finish()
    long.run(12, 16, 20, 24, 28, 30)
    long.finish()
    keys = [subject.pool.key_of(block) for block in subject.pool.idle_blocks().tolist()]
    old = {(group, digest) for group in (0, 1) for digest in other.hashes.chain(4, other.tokens, 0)}
    assert [key in old for key in keys] == [True] * 4 + [False] * (7 + 7)


# Refusals and the checks themselves.


def test_what_cannot_be_cached_is_rejected() -> None:
    with pytest.raises(ConfigError, match="mode none keeps no state"):
        manager(attention(4), mamba(100, "none"))
    manager(attention(4), mamba(100, "none"), caching=False)
    manager(attention(4))
    for mode in ("align", "all"):
        with pytest.raises(ConfigError, match="at least 5 tokens, not 4"):
            manager(attention(4), mamba(4, mode, 4))
        manager(attention(4), mamba(4, mode, 3))
    manager(attention(4), mamba(2, "none", 4), caching=False)


def test_integrity_sees_a_stranger_and_a_double_owner() -> None:
    subject = manager(attention(4), mamba(4), num_blocks=12)
    Owner(subject, "a", TEXT[:3]).run()
    with pytest.raises(AssertionError, match=r"do not run hold blocks: \['a'\]"):
        subject.check_integrity(running=("b",))
    Owner(subject, "b", TEXT[:3]).run()
    right = subject._held["b"]
    subject._held["b"] = subject._held["a"]
    with pytest.raises(AssertionError, match="other reference counts than owners"):
        subject.check_integrity(running=("a", "b"))
    subject._held["b"] = right
    subject.check_integrity(running=("a", "b"))
    held = [row.held() for row in subject._held["a"]]
    subject._held["c"] = subject._held["a"]
    for ids in held:
        subject.pool.ref_count[ids] += 1
    with pytest.raises(AssertionError, match="two owners but were never published"):
        subject.check_integrity(running=("a", "b", "c"))


def test_a_block_that_became_another_requests_is_not_refreshed_by_the_one_that_gave_it_back() -> (
    None
):
    subject = manager(attention(4), mamba(4, "align"), num_blocks=30)
    pool = subject.pool
    long = Owner(subject, "a", TEXT[:30]).run(4, 8, 12)
    idle = pool.idle_blocks().tolist()  # states that it gave back
    assert idle
    taken = pool.allocate(pool.num_free_blocks)  # evicts them
    assert taken is not None
    pool.free(np.array(idle, dtype=np.int32))  # the next ones to be handed out
    pool.free(taken[~np.isin(taken, idle)])
    other = Owner(subject, "b", TEXT[40:45]).run(4, 5)
    other.finish()
    before = pool.idle_blocks().tolist()
    assert set(before) & set(idle)
    long.finish()
    assert pool.idle_blocks().tolist()[: len(before)] == before, (
        "the older request's blocks are no younger than they were"
    )


@pytest.mark.parametrize("mode", ["align", "all"])
def test_a_prefix_lives_as_long_as_any_of_its_copies(mode: str) -> None:
    subject = manager(attention(4), mamba(4, mode), num_blocks=40)
    # Neither sees the other's blocks: both start before anything is published.
    first, second = Owner(subject, "a", TEXT[:9]), Owner(subject, "b", TEXT[:9])
    for end in (4, 8, 9):
        for owner in (first, second):
            assert owner.allocate(end) is not None
        for owner in (first, second):
            owner.publish(end)
    first.finish()
    own = [block for logical_blocks in second.logical_blocks for block in logical_blocks]
    assert subject.pool.allocate(subject.pool.num_free_blocks) is not None  # evicts the first one's
    assert Owner(subject, "c", TEXT[:9]).look().num_tokens == 8
    assert {subject.pool.lookup(key) for key in subject.pool.published_keys()} <= set(own)
    second.finish()
    assert Owner(subject, "c", TEXT[:9]).look().num_tokens == 8
    subject.pool.check_integrity()


# Requests whose first tokens were computed elsewhere.


@pytest.mark.parametrize(
    ("mode", "num_tokens", "states"),
    [
        ("none", 20, [1, 1, 1]),
        ("align", 20, [0, 0, 1, 1, 1]),
        ("all", 20, [0, 0, 1, 1, 1]),
        ("all", 24, [0, 0, 1, 1, 1, 1]),
    ],
)
def test_one_that_was_begun_elsewhere_gets_a_state_and_logical_blocks_for_drafts(
    mode: str, num_tokens: int, states: list[int]
) -> None:
    subject = manager(attention(8), mamba(8, mode, k=2), caching=mode != "none")
    new = subject.adopt("a", num_tokens)
    assert new is not None
    logical_blocks = [(part > NULL_BLOCK).tolist() for part in new.per_group()]
    assert logical_blocks == [[True] * (num_tokens // 8 + 1), [bool(state) for state in states]]
    subject.check_integrity(["a"])
    subject.free("a")
    subject.check_integrity()


def test_of_one_that_was_begun_elsewhere_no_state_before_the_last_is_published() -> None:
    subject = manager(attention(8), mamba(8))
    request = Owner(subject, "a", TEXT[:24])
    subject.adopt("a", 24)
    request.publish(24)
    # the last token is never taken, and at 16 there is no state
    assert not request.look().num_tokens
    longer = Owner(subject, "b", TEXT[:25])
    assert longer.look().num_tokens == 24
    assert not Owner(subject, "c", TEXT[:17]).look().num_tokens


def test_one_that_was_begun_elsewhere_gets_all_its_blocks_or_none() -> None:
    subject = manager(attention(8), mamba(8), num_blocks=5)
    assert subject.adopt("a", 24) is None  # four blocks of attention, two of states
    subject.check_integrity()
    assert subject.pool.num_free_blocks == 4

"""Hits that end inside a block: where they end, what they read, and what is refused."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from hashlib import blake2b
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from hybrid_kv.cache.block_hash import BlockHashes
from hybrid_kv.cache.block_pool import BlockIds, BlockPool
from hybrid_kv.cache.manager import KVCacheManager
from hybrid_kv.cache.partial_blocks import PartialBlockManager
from hybrid_kv.cache.prefix import tail_source
from hybrid_kv.cache.request_blocks import LogicalBlockRules, NewBlocks
from hybrid_kv.cache.spec import (
    FullAttentionSpec,
    KVCacheConfig,
    KVCacheGroupSpec,
    KVCacheSpec,
    MambaSpec,
    SlidingWindowSpec,
    SlotsSpec,
    StatePart,
    StateProgress,
)
from hybrid_kv.check.guard.scenario import answer_book
from hybrid_kv.config import ConfigError
from hybrid_kv.engine.llm import LLM
from hybrid_kv.sampling import SamplingParams

PAGE, LONGEST, K = 192, 60, 2  # bytes, tokens, drafts
BUDGET = (3, 8, 64)  # tokens of a step


def attention(block_size: int) -> FullAttentionSpec:
    return FullAttentionSpec(block_size, 1, PAGE // (4 * block_size), torch.float16)


def window(block_size: int, size: int) -> SlidingWindowSpec:
    head_size = PAGE // (4 * block_size)
    return SlidingWindowSpec(block_size, 1, head_size, torch.float16, sliding_window=size)


def states(block_size: int) -> MambaSpec:
    return MambaSpec(
        block_size,
        (StatePart("state", (8,), torch.float16),),
        PAGE,
        mamba_cache_mode="align",
        rollback=SlotsSpec(K),
    )


def config(layout: Sequence[KVCacheSpec], num_blocks: int) -> KVCacheConfig:
    groups = tuple(KVCacheGroupSpec((str(i),), spec) for i, spec in enumerate(layout))
    return KVCacheConfig(num_blocks, groups)


LAYOUTS: tuple[tuple[KVCacheSpec, ...], ...] = (
    (states(8), attention(8)),
    (attention(8), states(12), states(12)),
    (states(8), attention(16), attention(8)),
    (states(8), window(8, 6), attention(8)),
    (window(4, 9), attention(8), states(8)),
)


@dataclass
class Running:
    """A request of the machine, with the ids of its logical blocks by group."""

    tokens: list[int]
    prompt: int
    salt: str
    hashes: BlockHashes
    logical_blocks: list[list[int]]
    computed: int = 0


class InsideBlocks(RuleBasedStateMachine):
    """The scheduler and the model at once: each slot and state gets a stamp of its prefix.

    A hit must read the stamps of its own text, whatever else has used the blocks.
    """

    @initialize(
        layout=st.sampled_from(LAYOUTS),
        unit=st.sampled_from([1, 2, 4]),
        num_blocks=st.integers(20, 70),
        interval=st.sampled_from([None, 0, 16]),
    )
    def start(
        self, layout: tuple[KVCacheSpec, ...], unit: int, num_blocks: int, interval: int | None
    ) -> None:
        self.specs = layout
        self.raw = torch.zeros(num_blocks, PAGE, dtype=torch.uint8)
        self.manager = KVCacheManager(
            config(layout, num_blocks),
            enable_prefix_caching=True,
            max_model_len=LONGEST,
            retention_interval=interval,
        )
        self.manager.match_at(unit)
        assert self.manager.partial is not None
        self.partial = self.manager.partial
        self.partial.copy_blocks = self.copy
        self.running: dict[str, Running] = {}
        self.texts: list[list[int]] = [[1] * LONGEST, [1, 2] * (LONGEST // 2)]
        self.number = 0

    def copy(self, sources: BlockIds, targets: BlockIds) -> None:
        assert len({*sources.tolist(), *targets.tolist()}) == 2 * len(sources)
        assert not any(self.manager.pool.key_of(block) for block in targets.tolist())
        self.raw[targets.astype(np.int64)] = self.raw[sources.astype(np.int64)]

    # What the model does.

    def stamp(self, one: Running, end: int, group: int, size: int) -> torch.Tensor:
        text = repr((group, one.salt, one.tokens[:end])).encode()
        return torch.tensor(list(blake2b(text, digest_size=size).digest()), dtype=torch.uint8)

    def slot(self, spec: KVCacheSpec, block: int, position: int) -> torch.Tensor:
        width = PAGE // spec.block_size
        first = position % spec.block_size * width
        return self.raw[block, first : first + width]

    def write(self, one: Running, begin: int, end: int, is_decode: bool) -> None:
        for group, spec in enumerate(self.specs):
            size, blocks = spec.block_size, one.logical_blocks[group]
            if isinstance(spec, MambaSpec):
                inside = [n for n in range(begin + 1, end) if n % size == 0] if is_decode else []
                for n in (*inside, end):
                    block = blocks[(n - 1) // size]
                    assert block and self.manager.pool.key_of(block) is None
                    self.raw[block, :32] = self.stamp(one, n, group, 32)
                continue
            for position in range(begin, end):
                block = blocks[position // size]
                assert block and self.manager.pool.key_of(block) is None
                slot = self.slot(spec, block, position)
                slot.copy_(self.stamp(one, position + 1, group, len(slot)))

    def write_partial(self, name: str) -> None:
        pending = self.partial.pending[name]
        for group, block in pending.blocks.items():
            if isinstance(self.specs[group], MambaSpec):
                self.raw[block, :32] = self.stamp(self.running[name], pending.num_tokens, group, 32)

    def read(self, one: Running, end: int) -> None:
        for group, spec in enumerate(self.specs):
            size, blocks = spec.block_size, one.logical_blocks[group]
            if isinstance(spec, MambaSpec):
                block = blocks[(end - 1) // size]
                assert block and torch.equal(
                    self.raw[block, :32], self.stamp(one, end, group, 32)
                ), f"group {group}: not the state after {end} tokens"
                continue
            first = spec.first_seen(end) if isinstance(spec, SlidingWindowSpec) else 0
            for position in range(first, end):
                block = blocks[position // size]
                slot = self.slot(spec, block, position)
                assert block and torch.equal(slot, self.stamp(one, position + 1, group, len(slot)))

    # What the scheduler does.

    def take(self, one: Running, new: NewBlocks) -> None:
        for blocks, part in zip(one.logical_blocks, new.per_group(), strict=True):
            blocks += part.tolist()

    def chunk(self, name: str, budget: int) -> bool:
        one, manager = self.running[name], self.manager
        begin, given = one.computed, dict[str, Any]()
        if not begin:
            hit = manager.find_longest_cache_hit(one.hashes, one.tokens, use_offload=False)
            begin, given = hit.num_tokens, {"hit": hit}
        end = manager.chunk_end(begin, min(begin + budget, len(one.tokens)), len(one.tokens))
        due = self.partial.due(begin, end, one.prompt)
        self.forget_given_back(one)
        new = manager.allocate_slots(
            name,
            begin,
            end - begin,
            is_decode=False,
            num_seen_tokens=begin,
            num_partial_tokens=due,
            **given,
        )
        if new is None:
            return bool(one.computed)
        self.take(one, new)
        if begin:
            self.read(one, begin)
        self.write(one, begin, end, is_decode=False)
        if due:
            self.write_partial(name)
        one.computed = end
        self.publish(name, is_decode=False)
        return True

    def publish(self, name: str, is_decode: bool) -> None:
        one = self.running[name]
        progress = StateProgress(one.computed, one.computed)
        self.manager.cache_blocks(
            name, one.hashes, one.tokens, progress, is_decode, (one.prompt - 1, 0)
        )

    def forget_given_back(self, one: Running) -> None:
        if not one.computed:
            return
        for spec, blocks in zip(self.specs, one.logical_blocks, strict=True):
            first = 0
            if isinstance(spec, MambaSpec):
                first = spec.mode.first_needed(one.computed, spec.block_size)
            elif isinstance(spec, SlidingWindowSpec):
                first = spec.first_needed(one.computed)
            blocks[:first] = [0] * len(blocks[:first])

    @precondition(lambda self: len(self.running) < 4)
    @rule(data=st.data(), salt=st.sampled_from(["", "", "a"]), budget=st.sampled_from(BUDGET))
    def admit(self, data: st.DataObject, salt: str, budget: int) -> None:
        base = data.draw(st.sampled_from(self.texts))
        shared = data.draw(st.integers(1, min(len(base), LONGEST - 8)))
        tail = data.draw(st.lists(st.integers(1, 3), max_size=5))
        self.number += 1
        name, tokens = str(self.number), [*base[:shared], *tail]
        self.running[name] = Running(
            tokens, len(tokens), salt, BlockHashes(salt), [[] for _ in self.specs]
        )
        if not self.chunk(name, budget):
            del self.running[name]

    @precondition(lambda self: self.running)
    @rule(data=st.data(), budget=st.sampled_from(BUDGET), drafts=st.integers(0, K))
    def step(self, data: st.DataObject, budget: int, drafts: int) -> None:
        name = data.draw(st.sampled_from(sorted(self.running)))
        one = self.running[name]
        if one.computed < len(one.tokens):
            self.chunk(name, budget)
            return
        begin = one.computed
        if begin + 1 + drafts >= LONGEST:
            return
        self.forget_given_back(one)
        new = self.manager.allocate_slots(
            name, begin, 1 + drafts, is_decode=True, num_seen_tokens=begin
        )
        if new is None:
            return
        self.take(one, new)
        self.read(one, begin)
        one.tokens += data.draw(st.lists(st.integers(1, 2), min_size=1, max_size=1 + drafts))
        one.computed = len(one.tokens)
        self.write(one, begin, one.computed, is_decode=True)
        self.publish(name, is_decode=True)

    @precondition(lambda self: self.running)
    @rule(data=st.data())
    def end(self, data: st.DataObject) -> None:
        name = data.draw(st.sampled_from(sorted(self.running)))
        self.texts.append(self.running.pop(name).tokens)
        self.manager.free(name)

    @rule()
    def reset(self) -> None:
        self.manager.reset_prefix_cache()

    @invariant()
    def is_whole(self) -> None:
        self.manager.check_integrity(tuple(self.running))
        assert not self.partial.pending, "what a step has left is published after it"


TestInsideBlocks = InsideBlocks.TestCase
TestInsideBlocks.settings = settings(
    max_examples=settings.default.max_examples, stateful_step_count=30
)


def engine(layers: str = "M*M~*", **options: Any) -> LLM:
    given = {
        "block_size": 16,
        "num_blocks": 300,
        "max_model_len": 128,
        "max_num_batched_tokens": 128,
        "device": "cpu",
        "mamba_cache_mode": "align",
        "prefix_match_unit": 4,
        "sanitize": True,
    }
    return LLM(answer_book(layers).model, **given | options)


@pytest.mark.parametrize("interval", [None, 0])
@pytest.mark.parametrize("scheme", ["slots", "recompute"])
def test_a_prompt_again_hits_at_the_last_unit_before_its_last_token(
    interval: int | None, scheme: str
) -> None:
    """n tokens twice: (n - 1) // U * U of the second ones come from the cache, with drafts, too."""
    llm = engine(
        "M*M*",
        prefix_cache_retention_interval=interval,
        state_scheme=scheme,
        speculative_method="ngram",
        num_speculative_tokens=3,
    )
    book = answer_book("M*M*")
    params = SamplingParams(max_tokens=6)
    for n in (2, 4, 5, 9, 16, 17, 18, 31, 33, 47, 64, 90):
        prompt = [(3 * i * i + n) % 31 for i in range(n)]
        outputs = [llm.generate([prompt], params, progress=False)[0] for _ in range(2)]
        assert [output.cached_tokens for output in outputs] == [0, (n - 1) // 4 * 4], n
        assert {tuple(output.token_ids) for output in outputs} == {
            tuple(book.answer(prompt, params, 128))
        }
        llm.reset_prefix_cache()


def test_prompts_that_wait_for_each_other_hit_inside_a_block() -> None:
    """Equal prompts at once: the first computes, all others resume where it has left states."""
    book = answer_book("M*M~*")
    params = SamplingParams(max_tokens=5)
    prompt = [7 * i % 29 for i in range(27)]
    outputs = engine().generate([prompt] * 4, params, progress=False)
    assert [output.cached_tokens for output in outputs] == [0, 24, 24, 24]
    assert {tuple(output.token_ids) for output in outputs} == {
        tuple(book.answer(prompt, params, 128))
    }


@pytest.mark.parametrize("drafter", [False, True])
@pytest.mark.parametrize("unit", [4, None])
def test_a_third_prompt_resumes_where_two_have_parted(unit: int | None, drafter: bool) -> None:
    """At the end of the last whole block that all share: a draft head costs a hit no unit less.

    The state is there because the second prompt has stopped there, in sparse retention alone.
    """
    layers = "M*M~*>" if drafter else "M*M~*"
    options: dict[str, Any] = {"prefix_match_unit": unit, "prefix_cache_retention_interval": 0}
    if drafter:
        options |= {"speculative_method": "dflash", "num_speculative_tokens": 5}
    llm = engine(layers, **options)
    book = answer_book(layers)
    shared = [5 * i % 31 for i in range(39)]
    params = SamplingParams(max_tokens=4)
    hits = []
    for first in (2, 3, 4):
        prompt = [*shared, *((first * i + 1) % 31 for i in range(30))]
        (output,) = llm.generate([prompt], params, progress=False)
        assert output.token_ids == book.answer(prompt, params, 128)
        hits.append(output.cached_tokens)
    assert hits == [0, 0, 32]


def test_a_longer_prompt_resumes_inside_a_block_of_a_shorter_one() -> None:
    llm = engine()
    book = answer_book("M*M~*")
    first = [5 * i % 31 for i in range(40)]
    longer = [*first[:36], *(11 * i % 31 for i in range(50))]
    params = SamplingParams(max_tokens=4)
    outputs = [llm.generate([prompt], params, progress=False)[0] for prompt in (first, longer)]
    assert [output.cached_tokens for output in outputs] == [0, 36]
    assert outputs[1].token_ids == book.answer(longer, params, 128)


def test_without_a_unit_no_hit_ends_inside_a_block() -> None:
    llm = engine(prefix_match_unit=None)
    assert llm.manager.partial is None and llm.manager.hit_granularity == 16
    prompt = [7 * i % 29 for i in range(27)]
    params = SamplingParams(max_tokens=2)
    outputs = [llm.generate([prompt], params, progress=False)[0] for _ in range(2)]
    assert outputs[1].cached_tokens == 16


@pytest.mark.parametrize(
    ("layers", "options", "named"),
    [
        ("M*", {"prefix_match_unit": 0}, "prefix_match_unit=0 must be an integer >= 1"),
        ("M*", {"prefix_match_unit": 5}, r"=5 does not divide the block sizes \[16\]"),
        ("M*", {"mamba_cache_mode": "all"}, "=4 is for mamba_cache_mode align, not all"),
        ("M*", {"mamba_cache_mode": None}, "=4 is for mamba_cache_mode align, not none"),
        ("**", {}, "=4 is for models with states"),
    ],
)
def test_a_unit_that_means_nothing_is_refused(
    layers: str, options: dict[str, Any], named: str
) -> None:
    with pytest.raises(ConfigError, match=named):
        engine(layers, **options)


def test_attention_copies_a_part_of_a_whole_block_and_states_do_not() -> None:
    pool = BlockPool(10)
    ids = pool.allocate(2)
    assert ids is not None
    chain = [bytes([i]) * 16 for i in range(6)]
    kinds = LogicalBlockRules(attention(8), 4), LogicalBlockRules(states(8), 4)
    for index, block in enumerate(ids.tolist()):
        pool.publish((index, chain[3]), block)
    found = [tail_source(index, group, chain, 12, pool) for index, group in enumerate(kinds)]
    assert found == [ids[0], None]
    assert tail_source(0, kinds[0], chain[:3], 12, pool) is None  # The block's end is not known.


def test_the_resume_point_is_where_a_prefill_leaves_partial_blocks() -> None:
    groups = [LogicalBlockRules(spec, 4) for spec in (states(8), attention(16), window(4, 9))]
    partial = PartialBlockManager(4, 16, groups, BlockPool(40), [])
    points = [partial.resume_point(n) for n in (1, 4, 5, 9, 16, 17, 18, 33)]
    assert points == [0, 0, 4, 8, 12, 0, 0, 0]
    assert [partial.due(0, end, 30) for end in (27, 28, 30)] == [0, 28, 28]
    assert partial.due(28, 30, 30) == 0
    assert [partial.groups_of(n) for n in (4, 8, 28)] == [[0, 1], [0, 1], [0, 1]]

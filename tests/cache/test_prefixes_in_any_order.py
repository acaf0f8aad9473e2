"""In any order of requests, a hit restores what its text needs, byte for byte.

From the device and from the host.

The machine is the scheduler and the model at once. Of a block it writes a stamp of all tokens up to
its end where the model would write K and V, or the state after them, and reads that stamp where the
model would read. A block that is another request's, one that is published too early, or a prefix of
another salt has another stamp.
"""

from __future__ import annotations

from dataclasses import dataclass
from hashlib import blake2b

import torch
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from hybrid_kv.cache.block_hash import BlockHashes
from hybrid_kv.cache.manager import KVCacheManager
from hybrid_kv.cache.offload import KVOffload
from hybrid_kv.cache.request_blocks import NewBlocks
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

PAGE, LONGEST = 128, 48  # bytes, tokens
K = 2
BUDGET = (3, 8, 64)  # tokens of a step


def attention(block_size: int) -> FullAttentionSpec:
    return FullAttentionSpec(block_size, 1, PAGE // (4 * block_size), torch.float16)


def mamba(mode: str) -> MambaSpec:
    return MambaSpec(
        4,
        (StatePart("state", (8,), torch.float16),),
        PAGE,
        mamba_cache_mode=mode,
        rollback=SlotsSpec(K),
    )


LAYOUTS: tuple[tuple[KVCacheSpec, ...], ...] = (
    (attention(4),),
    (mamba("all"), attention(4)),
    (attention(8), mamba("align")),
    (mamba("align"), mamba("align"), attention(8), attention(4)),
    (attention(4), mamba("all"), attention(8)),
)


@dataclass
class Running:
    tokens: list[int]
    salt: str
    hashes: BlockHashes
    logical_blocks: list[list[int]]
    computed: int = 0


class Prefixes(RuleBasedStateMachine):
    @initialize(
        layout=st.sampled_from(LAYOUTS),
        num_blocks=st.integers(8, 60),
        host=st.sampled_from([0, 600, 1 << 20]),
    )
    def start(self, layout: tuple[KVCacheSpec, ...], num_blocks: int, host: int) -> None:
        config = KVCacheConfig(
            num_blocks, tuple(KVCacheGroupSpec((str(i),), spec) for i, spec in enumerate(layout))
        )
        self.specs, self.raw = layout, torch.zeros(num_blocks, PAGE, dtype=torch.uint8)
        self.manager = KVCacheManager(config, enable_prefix_caching=True, max_model_len=LONGEST)
        if host:
            self.manager.offload = KVOffload(config, [self.raw], 4, host_bytes=host)
        self.running: dict[str, Running] = {}
        self.texts: list[list[int]] = [[1] * LONGEST, [1, 2] * (LONGEST // 2)]
        self.number = 0

    # What the model does.

    def stamp(self, one: Running, end: int, group: int) -> torch.Tensor:
        text = repr((group, one.salt, one.tokens[:end])).encode()
        return torch.tensor(list(blake2b(text, digest_size=64).digest() * 2), dtype=torch.uint8)

    def write(self, one: Running, begin: int, end: int, is_decode: bool) -> None:
        """K and V of these tokens, and the states that a step leaves behind them."""
        for group, spec in enumerate(self.specs):
            size, logical_blocks = spec.block_size, one.logical_blocks[group]
            ends = [n for n in range(begin + 1, end + 1) if n % size == 0]
            if isinstance(spec, MambaSpec):
                inside = is_decode or spec.mode.keeps_inside
                ends = [*(ends if inside else []), end]
            for n in ends:
                block = logical_blocks[(n - 1) // size]
                assert block, (
                    f"group {group} writes the state or the block after {n} tokens nowhere"
                )
                assert self.manager.pool.key_of(block) is None, (
                    f"group {group} writes a block that lookups find"
                )
                self.raw[block] = self.stamp(one, n, group)

    def read(self, one: Running, end: int) -> None:
        """What the next step needs of the first `end` tokens."""
        for group, spec in enumerate(self.specs):
            size, logical_blocks = spec.block_size, one.logical_blocks[group]
            ends = [end] if isinstance(spec, MambaSpec) else range(size, end + 1, size)
            for n in ends:
                block = logical_blocks[(n - 1) // size]
                assert block and torch.equal(self.raw[block], self.stamp(one, n, group)), (
                    f"group {group}, {n} tokens"
                )

    # What the scheduler does.

    def take(self, one: Running, new: NewBlocks) -> None:
        for logical_blocks, part in zip(one.logical_blocks, new.per_group(), strict=True):
            logical_blocks += part.tolist()

    def chunk(self, name: str, budget: int) -> bool:
        """Run a prompt's next tokens, or the first after the hit; return False without room."""
        one, manager = self.running[name], self.manager
        is_new = not one.computed
        hit = manager.find_longest_cache_hit(one.hashes, one.tokens, use_offload=True)
        begin = hit.num_tokens if is_new else one.computed
        end = manager.chunk_end(begin, min(begin + budget, len(one.tokens)), len(one.tokens))
        if end <= begin:
            return not is_new
        given = {"hit": hit} if is_new else {}
        self.forget_given_back(one)
        new = manager.allocate_slots(
            name, begin, end - begin, is_decode=False, num_seen_tokens=begin, **given
        )
        if new is None:
            return not is_new
        self.take(one, new)
        if begin:
            self.read(one, begin)
        self.write(one, begin, end, is_decode=False)
        one.computed = end
        manager.cache_blocks(name, one.hashes, one.tokens, StateProgress(end, end), is_decode=False)
        return True

    def forget_given_back(self, one: Running) -> None:
        """States before the one that the next step reads are given back, with or without room."""
        for spec, logical_blocks in zip(self.specs, one.logical_blocks, strict=True):
            if isinstance(spec, MambaSpec) and spec.mode.gives_back and one.computed:
                first = spec.mode.first_needed(one.computed, spec.block_size)
                logical_blocks[:first] = [0] * len(logical_blocks[:first])

    @precondition(lambda self: len(self.running) < 4)
    @rule(data=st.data(), salt=st.sampled_from(["", "", "a"]), budget=st.sampled_from(BUDGET))
    def admit(self, data: st.DataObject, salt: str, budget: int) -> None:
        base = data.draw(st.sampled_from(self.texts))
        shared = data.draw(st.integers(1, min(len(base), LONGEST - 6)))
        tail = data.draw(st.lists(st.integers(1, 3), max_size=5))
        self.number += 1
        name, tokens = str(self.number), [*base[:shared], *tail]
        self.running[name] = Running(tokens, salt, BlockHashes(salt), [[] for _ in self.specs])
        if not self.chunk(name, budget):
            del self.running[name]

    @precondition(lambda self: self.running)
    @rule(
        data=st.data(),
        budget=st.sampled_from(BUDGET),
        accepted=st.integers(0, K),
        drafts=st.integers(0, K),
    )
    def step(self, data: st.DataObject, budget: int, accepted: int, drafts: int) -> None:
        name = data.draw(st.sampled_from(sorted(self.running)))
        one = self.running[name]
        if one.computed < len(one.tokens):
            self.chunk(name, budget)
            return
        begin, end = one.computed, one.computed + 1 + drafts
        if end >= LONGEST:
            return
        self.forget_given_back(one)
        new = self.manager.allocate_slots(
            name, begin, 1 + drafts, is_decode=True, num_seen_tokens=begin
        )
        if new is None:
            return
        self.take(one, new)
        self.read(one, begin)
        one.tokens += data.draw(
            st.lists(st.integers(1, 2), min_size=1 + min(accepted, drafts), max_size=1 + drafts)
        )
        one.computed = len(one.tokens)
        self.write(one, begin, one.computed, is_decode=True)
        self.manager.cache_blocks(
            name, one.hashes, one.tokens, StateProgress(one.computed, one.computed), is_decode=True
        )

    @precondition(lambda self: self.running)
    @rule(data=st.data())
    def end(self, data: st.DataObject) -> None:
        """Its text may come again, as a second turn or because it was preempted."""
        name = data.draw(st.sampled_from(sorted(self.running)))
        self.texts.append(self.running.pop(name).tokens)
        self.manager.free(name)

    @rule()
    def reset(self) -> None:
        self.manager.reset_prefix_cache()

    @invariant()
    def is_whole(self) -> None:
        self.manager.check_integrity(tuple(self.running))
        for name, one in self.running.items():
            held = [
                [block for block in logical_blocks if block]
                for logical_blocks in one.logical_blocks
            ]
            assert [ids.tolist() for ids in self.manager.block_ids(name)] == held


TestPrefixes = Prefixes.TestCase
TestPrefixes.settings = settings(
    max_examples=settings.default.max_examples * 5 // 2, stateful_step_count=40
)

"""Predicted capacity is what a manager that allocates step by step gives."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from hybrid_kv.attention.rollback import RecomputeSpec
from hybrid_kv.cache.capacity import block_steps, capacity, most_blocks
from hybrid_kv.cache.manager import KVCacheManager
from hybrid_kv.cache.ranks import over_context
from hybrid_kv.cache.spec import (
    FullAttentionSpec,
    KVCacheConfig,
    KVCacheGroupSpec,
    KVCacheSpec,
    MambaSpec,
    SlidingWindowSpec,
    SlotsSpec,
    StatePart,
)
from hybrid_kv.config import ConfigError
from hybrid_kv.kernels.common.integers import cdiv
from hybrid_kv.kernels.recompute.ring import shortest_ring_len

PARTS = (StatePart("state", (8,), torch.float16),)


def attention(block_size: int) -> FullAttentionSpec:
    return FullAttentionSpec(block_size, num_kv_heads=1, head_size=8, dtype=torch.float16)


def mamba(block_size: int, mode: str, k: int = 0) -> MambaSpec:
    return MambaSpec(block_size, PARTS, mamba_cache_mode=mode, rollback=SlotsSpec(k))


def config_of(*specs: KVCacheSpec, num_blocks: int = 1000) -> KVCacheConfig:
    return KVCacheConfig(
        num_blocks, tuple(KVCacheGroupSpec((str(i),), spec) for i, spec in enumerate(specs))
    )


def ints(*values: int) -> np.ndarray[tuple[int], np.dtype[np.int64]]:
    return np.array(values, dtype=np.int64)


class Served:
    """A request at a manager, from its first chunk to its last token."""

    def __init__(
        self, manager: KVCacheManager, name: str, prompt: int, output: int, k: int
    ) -> None:
        self.manager, self.name, self.k = manager, name, k
        self.prompt, self.last = prompt, prompt + output - 1
        self.computed = 0
        self.held: list[int] = []  # after each step that gave a token
        # by the state that the next step reads
        self.num_seen: Callable[[int], int] = lambda computed: computed

    def step(self) -> bool:
        """The next chunk or decode; False if the pool is too full for it."""
        is_decode = self.computed >= self.prompt
        if is_decode:
            end = min(self.computed + 1 + self.k, self.last)
        else:
            end = self.manager.chunk_end(self.computed, self.prompt, self.prompt)
        made = self.manager.allocate_slots(
            self.name,
            self.computed,
            end - self.computed,
            is_decode,
            num_seen_tokens=self.num_seen(self.computed),
        )
        if made is None:
            return False
        self.computed = self.computed + 1 if is_decode else end
        if self.computed >= self.prompt:
            self.held.append(
                sum(int(np.count_nonzero(ids)) for ids in self.manager.block_ids(self.name))
            )
        return True

    def run(self) -> bool:
        while self.computed < self.last:
            if not self.step():
                return False
        return True


@settings(max_examples=200)
@given(
    mode=st.sampled_from(["none", "align", "all"]),
    k=st.integers(0, 3),
    ranks=st.integers(1, 3),
    sizes=st.tuples(st.sampled_from([4, 8, 12]), st.sampled_from([4, 8])),
    lengths=st.lists(st.tuples(st.integers(1, 60), st.integers(1, 40)), min_size=1, max_size=4),
)
@example(mode="align", k=0, ranks=1, sizes=(4, 1), lengths=[(1, 5)])
def test_blocks_of_all_steps_are_those_that_a_manager_gives(
    mode: str, k: int, ranks: int, sizes: tuple[int, int], lengths: list[tuple[int, int]]
) -> None:
    config = over_context(
        config_of(attention(sizes[0]), attention(sizes[0]), mamba(sizes[1], mode, k)), ranks
    )
    held = []
    for prompt, output in lengths:
        request = Served(KVCacheManager(config, mode != "none"), "a", prompt, output, k)
        assert request.run()
        held.append(request.held)
    assert [len(steps) for steps in held] == [output for _, output in lengths]
    prompts, outputs = (
        ints(*(prompt for prompt, _ in lengths)),
        ints(*(output for _, output in lengths)),
    )
    assert block_steps(config, prompts, outputs, k).tolist() == [sum(steps) for steps in held]
    most = most_blocks(config, prompts, outputs).tolist()
    found = capacity(config, prompts, outputs, 10**6, k)
    assert (found.num_refused, found.most_blocks) == (0, sum(most) / len(most))
    assert found.running_blocks == sum(map(sum, held)) / outputs.sum()
    for steps, bound in zip(held, most, strict=True):
        assert max(steps) <= bound
        # In mode `align` only a decode across a boundary meets it, in the others the last one.
        assert mode == "align" or len(steps) == 1 or steps[-1] == bound


@given(
    k=st.integers(0, 3),
    size=st.sampled_from([4, 8]),
    window=st.integers(1, 30),
    lengths=st.tuples(st.integers(1, 60), st.integers(1, 40)),
)
def test_blocks_before_a_window_are_counted_as_given_back(
    k: int, size: int, window: int, lengths: tuple[int, int]
) -> None:
    spec = SlidingWindowSpec(size, 1, 4, torch.float32, window, None)
    config = config_of(attention(4), spec)
    request = Served(KVCacheManager(config, enable_prefix_caching=False), "a", *lengths, k)
    assert request.run()
    prompt, output = lengths
    assert block_steps(config, ints(prompt), ints(output), k).tolist() == [sum(request.held)]


@pytest.mark.parametrize("mode", ["none", "all"])
@pytest.mark.parametrize("k", [0, 2])
def test_a_pool_takes_as_many_requests_to_their_ends_as_counted(mode: str, k: int) -> None:
    lengths = [(10, 20), (37, 5), (8, 3), (64, 2), (21, 30)]
    prompts, outputs = ints(*(p for p, _ in lengths)), ints(*(o for _, o in lengths))
    for num_blocks in range(20, 60):
        config = config_of(attention(8), mamba(8, mode, k), num_blocks=num_blocks)
        manager, served = KVCacheManager(config, mode != "none"), 0
        while Served(manager, str(served), *lengths[served % len(lengths)], k).run():
            served += 1
        assert capacity(config, prompts, outputs, 1000, k).num_fit == served


@pytest.mark.parametrize("k", [0, 2])
def test_equal_requests_in_step_meet_their_most_in_mode_align_too(k: int) -> None:
    for num_blocks in range(9, 40):
        config = config_of(attention(8), mamba(8, "align", k), num_blocks=num_blocks)
        found = capacity(config, ints(10), ints(20), 1000, k)

        def all_run(count: int, config: KVCacheConfig = config) -> bool:
            manager = KVCacheManager(config, enable_prefix_caching=True)
            requests = [Served(manager, str(i), 10, 20, k) for i in range(count)]
            return all(
                request.step()
                for _ in range(21)
                for request in requests
                if request.computed < request.last
            )

        assert all_run(found.num_fit)
        assert not all_run(found.num_fit + 1)


def test_requests_that_the_engine_rejects_are_left_out_and_long_answers_cut() -> None:
    """Limit 12: a prompt of 12 is rejected, one of 10 gets 2 tokens: 11 computed, 3 blocks."""
    config = config_of(attention(4), num_blocks=10)
    found = capacity(config, ints(12, 10), ints(1, 90), 12, 0)
    assert (found.num_refused, found.num_fit, found.most_blocks) == (1, 3, 3.0)
    # 9 blocks hold 36 tokens; the second computes 37.
    found = capacity(config, ints(4, 30), ints(1, 8), 1000, 0)
    assert (found.num_refused, found.num_fit) == (1, 9)
    with pytest.raises(
        ConfigError, match="none of 2 requests has a prompt below 4 tokens and fits in 9 blocks"
    ):
        capacity(config, ints(4, 30), ints(1, 8), 4, 0)


@given(
    k=st.integers(0, 3), size=st.integers(4, 8), more=st.integers(0, 16), output=st.integers(2, 40)
)
def test_states_that_are_written_late_are_counted_at_the_latest(
    k: int, size: int, more: int, output: int
) -> None:
    """A step lags a state by the ring's tokens at most, or a block's rest and two steps."""
    ring_len = shortest_ring_len(1 + k) + more
    state = MambaSpec(size, (), mamba_cache_mode="align", rollback=RecomputeSpec(k, ring_len))
    config = config_of(attention(size), state)
    behind = cdiv(min(ring_len, size - 1 + 2 * (1 + k)), size)
    # A longer prompt has freed some of its logical blocks by its own chunks.
    request = Served(KVCacheManager(config, enable_prefix_caching=True), "a", 1, output, k)
    request.num_seen = lambda computed: max(1, (computed // size - behind) * size + 1)
    assert request.run()
    assert block_steps(config, ints(1), ints(output), k).tolist() == [sum(request.held)]

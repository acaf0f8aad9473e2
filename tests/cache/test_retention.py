"""Sparse retention: what stays is what a hit at a kept boundary reads."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from hybrid_kv import LLM, SamplingParams
from hybrid_kv.cache.block_hash import BlockHashes
from hybrid_kv.cache.block_pool import BlockKey
from hybrid_kv.cache.manager import KVCacheManager
from hybrid_kv.cache.observe import CacheObserver
from hybrid_kv.cache.request_blocks import LogicalBlockRules
from hybrid_kv.cache.retention import Retention
from hybrid_kv.cache.spec import (
    FullAttentionSpec,
    KVCacheConfig,
    KVCacheGroupSpec,
    KVCacheSpec,
    MambaSpec,
    SlidingWindowSpec,
    StatePart,
    StateProgress,
)
from hybrid_kv.check.guard.scenario import answer_book
from hybrid_kv.config import ConfigError


def state_spec(block_size: int, mode: str = "align") -> MambaSpec:
    parts = (StatePart("ssm", (4,), torch.float32),)
    return MambaSpec(block_size, parts, mamba_cache_mode=mode)


def full_spec(block_size: int) -> FullAttentionSpec:
    return FullAttentionSpec(block_size, 1, 4, torch.float32)


def window_spec(block_size: int, window: int) -> SlidingWindowSpec:
    return SlidingWindowSpec(block_size, 1, 4, torch.float32, window, None)


def is_read(spec: KVCacheSpec, block_idx: int, boundary: int) -> bool:
    """Return whether a hit that ends at a boundary reads a block, token by token."""
    first = {SlidingWindowSpec: boundary - 1, MambaSpec: boundary - 1}.get(type(spec), 0)
    if isinstance(spec, SlidingWindowSpec):
        first = max(0, boundary - spec.sliding_window + 1)
    return block_idx in {token // spec.block_size for token in range(first, boundary)}


@given(st.data())
def test_a_block_stays_if_a_hit_at_a_kept_boundary_reads_it(data: st.DataObject) -> None:
    block_size = data.draw(st.sampled_from([2, 4, 8]))
    spec = data.draw(
        st.one_of(
            st.just(state_spec(block_size)),
            st.builds(window_spec, st.just(block_size), st.integers(2, 30)),
        )
    )
    unit = data.draw(st.sampled_from([8, 16]))
    interval = data.draw(st.integers(0, 70))
    points = data.draw(st.lists(st.integers(0, 90), max_size=3))
    first = data.draw(st.integers(0, 80 // block_size))
    blocks = range(first, data.draw(st.integers(first, 88 // block_size)))
    marks = {*points, *(range(0, 200, interval) if interval else ())}
    kept = {mark // unit * unit for mark in marks}
    due = [i for i in blocks if any(is_read(spec, i, boundary) for boundary in kept)]
    tail = LogicalBlockRules(spec).num_tail_blocks
    assert list(Retention(interval, unit).kept_blocks(blocks, block_size, tail, points)) == due


@given(st.integers(0, 200), st.integers(0, 70), st.lists(st.integers(0, 200), max_size=3))
def test_the_longest_kept_prefix(num_tokens: int, interval: int, points: list[int]) -> None:
    marks = {*points, *(range(0, 400, interval) if interval else ())}
    kept = {mark // 8 * 8 for mark in marks if mark // 8 * 8 <= num_tokens}
    assert Retention(interval, 8).longest_kept(num_tokens, points) == max(kept, default=0)


@pytest.mark.parametrize("interval", [None, 0, 16])
def test_full_attention_and_dense_retention_keep_all(interval: int | None) -> None:
    assert list(Retention(interval, 8).kept_blocks(range(2, 5), 8, None, ())) == [2, 3, 4]
    assert list(Retention(None, 8).kept_blocks(range(2, 5), 8, 1, ())) == [2, 3, 4]


def managed(interval: int | None, *specs: KVCacheSpec) -> KVCacheManager:
    groups = tuple(KVCacheGroupSpec((f"layer {i}",), spec) for i, spec in enumerate(specs))
    return KVCacheManager(
        KVCacheConfig(500, groups), enable_prefix_caching=True, retention_interval=interval
    )


def run_prompt(manager: KVCacheManager, name: str, tokens: list[int], budget: int = 10**6) -> int:
    """Run a prompt in chunks as the scheduler does; return the tokens of its hit."""
    hashes = BlockHashes()
    hit = manager.find_longest_cache_hit(hashes, tokens, use_offload=False)
    start = hit.num_tokens
    points = len(tokens) - 1, hit.junction
    while start < len(tokens):
        end = manager.chunk_end(start, min(len(tokens), start + budget), len(tokens), hit.junction)
        taken = hit if start == hit.num_tokens else replace(hit, num_tokens=0)
        new = manager.allocate_slots(
            name, start, end - start, is_decode=False, hit=taken, num_seen_tokens=start
        )
        assert new is not None
        manager.cache_blocks(
            name, hashes, tokens, StateProgress(end, end), is_decode=False, resume_points=points
        )
        start = end
    manager.free(name)
    return hit.num_tokens


@pytest.mark.parametrize("mode", ["align", "all"])
@pytest.mark.parametrize("interval", [None, 0, 32])
def test_a_shared_prefix_is_kept_once_two_prompts_have_it(mode: str, interval: int | None) -> None:
    """Attention has 48 tokens of the second prompt, states none: the third one hits there."""
    manager = managed(interval, full_spec(16), state_spec(16, mode))
    shared = list(range(50))
    prompts = [[*shared, *range(100 * i, 100 * i + 60)] for i in range(1, 5)]
    hits = [run_prompt(manager, str(i), prompt) for i, prompt in enumerate(prompts)]
    dense_hit = 48 if mode == "all" and interval is None else 0
    periodic_hit = 32 if mode == "all" and interval == 32 else 0
    assert hits == [0, dense_hit or periodic_hit, 48, 48]
    assert run_prompt(manager, "again", prompts[0]) == (len(prompts[0]) - 1) // 16 * 16


def test_a_prefix_of_1590_tokens_is_hit_up_to_its_block_of_1568() -> None:
    """The count that vLLM printed for Qwen3.6-27B: blocks of 1,568 tokens, 1,590 shared ones."""
    manager = managed(0, full_spec(1568), state_spec(1568))
    shared = list(range(1590))
    prompts = [[*shared, *range(5000 * i, 5000 * i + 1700)] for i in range(1, 4)]
    assert [run_prompt(manager, str(i), prompt) for i, prompt in enumerate(prompts)] == [0, 0, 1568]


def test_sparse_retention_leaves_fewer_published_blocks() -> None:
    """Chunks of 32 tokens leave 6 states of 200 tokens; of these the last boundary's stays."""
    tokens = list(range(200))
    counts = []
    for interval in (None, 64, 0):
        manager = managed(interval, full_spec(16), state_spec(16))
        run_prompt(manager, "0", tokens, budget=32)
        counts.append(manager.pool.num_published_blocks)
        manager.check_integrity()
    assert counts == [12 + 6, 12 + 3, 12 + 1]


def test_an_engine_hits_the_junction_of_an_earlier_prompt() -> None:
    """Three prompts share 64 tokens: the third takes them from the cache, and all are right."""
    book = answer_book("M*M~*")
    llm = LLM(
        book.model,
        block_size=8,
        num_blocks=400,
        max_model_len=128,
        max_num_batched_tokens=128,
        device="cpu",
        mamba_cache_mode="align",
        prefix_cache_retention_interval=0,
    )
    unit = llm.manager.hit_granularity
    shared = [3 * i % 31 for i in range(64)]
    prompts = [[*shared, *(7 * i % 29 for i in range(k, k + 30))] for k in (1, 2, 4)]
    outputs = [llm.generate([prompt], SamplingParams(max_tokens=4))[0] for prompt in prompts]
    answers = [book.answer(prompt, SamplingParams(max_tokens=4), 128) for prompt in prompts]
    assert [output.token_ids for output in outputs] == answers
    assert [output.cached_tokens for output in outputs] == [0, 0, 64 // unit * unit]


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({"prefix_cache_retention_interval": -1}, "-1"),
        ({"prefix_cache_retention_interval": 0}, "enable_prefix_caching"),
    ],
)
def test_an_interval_that_means_nothing_is_refused(options: dict[str, int], named: str) -> None:
    with pytest.raises(ConfigError, match=named):
        LLM(answer_book("M*").model, block_size=8, num_blocks=90, device="cpu", **options)


class Published(CacheObserver):
    def __init__(self) -> None:
        self.calls: list[tuple[int, list[int]]] = []

    def on_publish(
        self,
        request_id: str,
        group: int,
        logical_blocks: Sequence[int],
        blocks: Sequence[tuple[BlockKey, int]],
    ) -> None:
        assert len(blocks) == len(logical_blocks)
        self.calls.append((group, list(logical_blocks)))


def test_a_step_reports_what_it_publishes_of_a_group_at_once() -> None:
    """The window's tails at 16, 32 and 36 are apart: two offload batches would not be one."""
    manager = managed(16, full_spec(4), window_spec(4, 6))
    seen = Published()
    manager.observers = [seen]
    run_prompt(manager, "0", list(range(38)))
    assert seen.calls == [(0, list(range(9))), (1, [2, 3, 6, 7, 8])]

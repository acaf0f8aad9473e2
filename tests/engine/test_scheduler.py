"""The scheduler, rule by rule and without a model; the guard checks all rules at once."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

import numpy as np
import pytest
import torch

from hybrid_kv.cache.backend import BackendContext, TorchBackend
from hybrid_kv.cache.block_pool import BlockKey
from hybrid_kv.cache.manager import KVCacheManager
from hybrid_kv.cache.offload import Page
from hybrid_kv.cache.plan import CachePlan, plan_cache
from hybrid_kv.cache.spec import (
    FullAttentionSpec,
    KVCacheConfig,
    KVCacheGroupSpec,
    MambaSpec,
    SlotsSpec,
    StatePart,
)
from hybrid_kv.config import CacheConfig, ConfigError, SchedulerConfig
from hybrid_kv.engine.scheduler import Scheduler
from hybrid_kv.kernels.common.integers import cdiv
from hybrid_kv.models.exact import ExactConfig, ExactModel
from hybrid_kv.request import Request, ScheduledRequest
from hybrid_kv.sampling import SamplingParams

Result = tuple[ScheduledRequest, list[int], list[int]]

MODES = ("none", "align", "all")
MAX_MODEL_LEN = 40


@dataclass(frozen=True)
class Limits:
    """Tokens of a step, requests, and tokens of a request."""

    budget: int = 16
    seqs: int = 4
    limit: int = MAX_MODEL_LEN


class Host:
    """The engine without a model: sampled tokens and right drafts come from each request's text.

    Args:
        limits: see `Limits`.
        late: a step's tokens are known when the next one has been scheduled, as with
            `async_scheduling`.

    Attributes:
        highest: the most blocks that were held at once, by request and group.
    """

    def __init__(
        self,
        mode: str,
        k: int = 0,
        sizes: tuple[int, int] = (4, 4),
        num_blocks: int = 60,
        late: bool = False,
        seed: int = 0,
        **limits: int,
    ) -> None:
        limits = Limits(**limits)
        self.k, self.late, self.rng = k, late, np.random.default_rng(seed)
        mamba, attention = sizes
        self.specs = [
            MambaSpec(
                mamba,
                (StatePart("state", (1,), torch.int32),),
                mamba_cache_mode=mode,
                rollback=SlotsSpec(k),
            ),
            FullAttentionSpec(attention, 1, 1, torch.int32),
        ]
        groups = tuple(KVCacheGroupSpec((str(i),), spec) for i, spec in enumerate(self.specs))
        self.manager = KVCacheManager(
            KVCacheConfig(num_blocks, groups), mode != "none", max_model_len=limits.limit
        )
        config = SchedulerConfig(limits.seqs, max(limits.budget, limits.seqs), limits.limit)
        self.scheduler = Scheduler(config, self.manager, k)
        self.texts, self.known, self.drafts = {}, {}, {}
        self.highest = Counter()
        self.output = []

    def add(self, text: list[int], length: int, max_tokens: int, salt: str = "") -> Request:
        """`text` has at least `max_model_len + K` tokens, of which `length` are the prompt."""
        name = str(len(self.texts))
        request = Request(
            name, text[:length], SamplingParams(max_tokens=max_tokens, cache_salt=salt), seed=0
        )
        self.scheduler.add(request)
        self.texts[name] = text
        return request

    def step(self) -> list[ScheduledRequest]:
        """One step as `LLM.step` does it; returns what was scheduled."""
        scheduled = self.scheduler.schedule()
        for request in self.scheduler.running:
            for group, ids in enumerate(self.manager.block_ids(request.request_id)):
                key = request.request_id, group
                self.highest[key] = max(self.highest[key], len(ids))
        previous, self.output = self.output, [self.run(item) for item in scheduled]
        self.process(previous if self.late else self.output)
        if self.late:
            for item in scheduled:
                if not item.request.is_finished:
                    item.request.in_flight = item
        return scheduled

    def run(self, item: ScheduledRequest) -> Result:
        """The item as the runner resolves it, what it sampled, and the drafts behind that."""
        request, name = item.request, item.request.request_id
        text = self.texts[name]
        if item.overwrite:
            self.known[name] = request.num_tokens
        if item.awaits_drafts:
            known = self.known[name]
            most = min(
                request.params.max_tokens + len(request.prompt_token_ids),
                self.scheduler.config.max_model_len,
            )
            drafts = self.drafts[name][: max(0, min(item.num_drafts, most - known - 1))]
            count = 1 + len(drafts)
            resolved = {
                "num_computed_tokens": known - 1,
                "num_tokens": count,
                "drafts": tuple(drafts),
            }
            item = replace(item, awaits_drafts=False, **resolved)
        new, self.drafts[name] = [], []
        if item.samples:
            known = item.num_computed_tokens + item.num_tokens - len(item.drafts)
            good = next(
                (j for j, draft in enumerate(item.drafts) if draft != text[known + j]),
                len(item.drafts),
            )
            new = text[known : known + good + 1]
            end = self.known[name] = known + len(new)
            good, count = self.rng.integers(self.k + 1, size=2).tolist()
            self.drafts[name] = [
                token if j < good else 9 for j, token in enumerate(text[end : end + count])
            ]
        return item, new, self.drafts[name]

    def process(self, output: list[Result]) -> None:
        for item, new, drafts in output:
            request = item.request
            request.in_flight = None
            if request.is_finished:
                continue
            room = request.params.max_tokens - len(request.output_token_ids)
            room = min(room, self.scheduler.config.max_model_len - request.num_tokens)
            self.scheduler.update(item, new, min(len(new), room))
            request.draft_token_ids = drafts if not item.is_stale else []
            if len(new) >= room:
                self.scheduler.finish(request)

    def drain(self, bound: int) -> None:
        """Run until nothing is left, at most `bound` steps."""
        for _ in range(bound):
            if not self.scheduler.has_requests:
                break
            self.step()
        assert not self.scheduler.has_requests, "the traffic does not end"
        self.scheduler.check_integrity()
        assert self.manager.pool.num_free_blocks == self.manager.pool.num_blocks - 1


def plan(mode: str, k: int, limit: int, block_size: int = 4, num_blocks: int = 200) -> CachePlan:
    specs = ExactModel(ExactConfig(pattern="M*"), k).layer_specs
    cache = CacheConfig(block_size=block_size, num_blocks=num_blocks, mamba_cache_mode=mode)
    return plan_cache(
        specs, cache, TorchBackend, BackendContext("cpu", float32_ssm_state=False), limit, 4
    )


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("k", [0, 1, 3])
@pytest.mark.parametrize("budget", [3, 7, 64])
def test_a_request_of_the_greatest_length_holds_what_the_plan_says(
    mode: str, k: int, budget: int
) -> None:
    """Chunked, with any number of drafts, no hits: exactly `max_blocks_per_request` a group."""
    for limit in (18, 26, 31, 36):
        made = plan(mode, k, limit)
        specs = [group.spec for group in made.config.groups]
        (mamba,) = [spec for spec in specs if isinstance(spec, MambaSpec)]
        (attention,) = [spec for spec in specs if not isinstance(spec, MambaSpec)]
        sizes = mamba.block_size, attention.block_size
        highest = Counter()
        for seed in range(6):
            target = Host(
                mode, k, sizes, num_blocks=200, budget=budget, seqs=1, limit=limit, seed=seed
            )
            text = np.random.default_rng(seed).integers(0, 2, limit + 8).tolist()
            target.add(text, 5 + seed, limit)
            target.drain(3 * limit)
            highest |= target.highest
        # The last token is sampled, never cached: these limits need no block for it alone.
        assert cdiv(limit - 1, 4) == cdiv(limit, 4)
        bounds = [spec.max_blocks_per_request(limit) for spec in (mamba, attention)]
        assert [highest["0", 0], highest["0", 1]] == bounds
        for spec in specs:
            assert (
                spec.max_memory_usage_bytes(limit)
                == spec.max_blocks_per_request(limit) * spec.page_size_bytes
            )
        assert made.blocks_per_request == sum(bounds)


@pytest.mark.parametrize("mode", ["align", "all"])
@pytest.mark.parametrize("length", [4, 5, 8, 11, 12])
@pytest.mark.parametrize("budget", [1, 3, 5, 64])
def test_a_prompt_that_is_sent_twice_hits_its_last_boundary(
    mode: str, length: int, budget: int
) -> None:
    """Whole blocks too (vllm#50235), for all chunks, from the first repetition (vllm#53504)."""
    target = Host(mode, 0, (4, 2), budget=budget, seqs=1)
    text = np.random.default_rng(length).integers(0, 2, 48).tolist()
    first = target.add(text, length, 1)
    target.drain(40)
    second = target.add(text, length, 1)
    target.drain(40)
    assert (first.hit.num_tokens, second.hit.num_tokens) == (0, (length - 1) // 4 * 4)


def chunks(target: Host, request: Request) -> list[int]:
    ends = []
    for _ in range(len(request.prompt_token_ids)):
        if request.output_token_ids:
            break
        ends += [item.num_computed_tokens + item.num_tokens for item in target.step()]
    return ends


@pytest.mark.parametrize(
    ("budget", "length", "expected"),
    [
        (64, 24, [16, 24]),  # the last boundary that a repetition may use, then the rest
        (64, 25, [24, 25]),
        (64, 7, [7]),
        (64, 8, [8]),
        (12, 30, [8, 16, 24, 30]),
        (20, 41, [16, 32, 40, 41]),
        (3, 17, [3, 6, 8, 11, 14, 16, 17]),
        (1, 10, [1, 2, 3, 4, 5, 6, 7, 8, 9, 10]),
    ],
)
def test_align_chunks_end_on_boundaries(budget: int, length: int, expected: list[int]) -> None:
    target = Host("align", 0, (8, 4), budget=budget, seqs=1, limit=48)
    request = target.add([1] * 60, length, 1)
    assert chunks(target, request) == expected


def test_align_chunks_return_to_the_grid_after_another_requests_share() -> None:
    """vllm!51763: stops are on the grid, not relative to where a chunk or a hit began."""
    target = Host("align", 0, (8, 4), budget=20, seqs=2, limit=48)
    first, second = target.add([1] * 60, 13, 1), target.add([0] * 60, 30, 1)
    ends = [
        [(i.request.request_id, i.num_computed_tokens + i.num_tokens) for i in target.step()]
        for _ in range(4)
    ]
    assert ends == [[("0", 8), ("1", 8)], [("0", 13), ("1", 16)], [("1", 24)], [("1", 30)]]
    assert first.is_finished
    assert second.is_finished


@pytest.mark.parametrize("mode", MODES)
def test_drafts_starve_no_request(mode: str) -> None:
    """The first request's drafts must not use the budget that others need for a token each."""
    k = 3
    target = Host(mode, k, budget=6, seqs=4)
    requests = [target.add([i % 2] * 60, 1, 20) for i in range(4)]
    target.step()
    assert all(one.output_token_ids for one in requests)
    most = 0
    for _ in range(4):
        for one in requests:
            one.draft_token_ids = [9] * k
        scheduled = target.step()
        assert [item.request for item in scheduled] == requests
        most = max(most, *(len(item.drafts) for item in scheduled))
        assert sum(item.num_tokens for item in scheduled) <= 6
    assert most == 1


def test_drafts_share_the_budget() -> None:
    """Four equal requests draft alike; what one does not need is left to those behind it."""
    target = Host("none", 4, budget=16, seqs=4)
    requests = [target.add([i % 2] * 60, 1, 30) for i in range(4)]
    target.step()
    for wanted, expected in (
        ([4, 4, 4, 4], [3, 3, 3, 3]),
        ([0, 4, 4, 4], [0, 4, 4, 4]),
        ([4, 4, 1, 4], [3, 3, 1, 4]),
        ([1, 1, 1, 4], [1, 1, 1, 4]),
    ):
        for one, count in zip(requests, wanted, strict=True):
            one.draft_token_ids = [9] * count
        assert [len(item.drafts) for item in target.step()] == expected
    target.scheduler.config = replace(target.scheduler.config, max_num_batched_tokens=7)
    for one in requests:
        one.draft_token_ids = [9] * 4
    assert [len(item.drafts) for item in target.step()] == [1, 1, 1, 0]


@pytest.mark.parametrize(
    ("stop", "kept", "accepted"), [(None, 4, 3), (3, 4, 3), (2, 3, 3), (1, 2, 2), (0, 1, 1)]
)
def test_accepted_drafts_behind_the_end_do_not_count(
    stop: int | None, kept: int, accepted: int
) -> None:
    """Three right drafts and a token more; the request ends with the token of index `stop`."""
    target = Host("none", 3, seqs=1)
    one = target.add([1] * 60, 4, 30)
    target.step()
    one.draft_token_ids = [1] * 3
    (item,) = target.scheduler.schedule()
    target.scheduler.update(item, [1] * 4, 4 if stop is None else stop + 1)
    assert (one.num_draft_tokens, one.num_accepted_draft_tokens) == (3, accepted)
    assert len(one.output_token_ids) == 1 + kept
    target.scheduler.update(replace(item, drafts=()), [], 0)
    assert one.num_accepted_draft_tokens == accepted


def test_a_prefill_starves_no_running_request_behind_it() -> None:
    """In mode align a chunk may end early: a later request is admitted during the prompt."""
    target = Host("align", 0, (8, 8), budget=16, seqs=3, limit=60)
    target.add([0] * 70, 2, 2)
    long = target.add([1] * 70, 50, 1)
    short = target.add([0, 1] * 35, 3, 9)
    target.step()
    assert (long.num_computed_tokens, len(short.output_token_ids)) == (8, 1)
    for known in range(2, 5):
        target.step()
        assert len(short.output_token_ids) == known
    assert long.num_computed_tokens == 32


def test_the_youngest_is_preempted_and_starts_again_from_its_first_token() -> None:
    target = Host("none", num_blocks=1 + 2 * 2 + 1, budget=64)
    old, young = target.add([1] * 60, 4, 9), target.add([1] * 60, 4, 4)
    for _ in range(6):
        target.step()
        if young.num_preemptions:
            break
    assert (old.num_preemptions, young.num_preemptions) == (0, 1)
    assert young.row == -1
    assert young.num_computed_tokens == 0
    assert target.scheduler.waiting[0] is young


def test_a_preempted_request_recomputes_its_output_in_one_prefill() -> None:
    target = Host("none")
    one = target.add([1] * 60, 5, 9)
    target.step()
    target.step()
    one.draft_token_ids = [3, 4]
    target.scheduler.preempt(one)
    (item,) = target.scheduler.schedule()
    assert (item.num_tokens, item.num_computed_tokens, item.overwrite, item.is_decode) == (
        7,
        0,
        True,
        False,
    )
    assert item.samples
    assert (item.drafts, one.draft_token_ids) == ((), [])


class Tier:
    """An offload tier that keeps everything and counts its calls."""

    def __init__(self) -> None:
        self.blocks, self.bad = set(), set()
        self.contained, self.fetched, self.loaded = 0, [], []

    def check_integrity(self) -> None:
        pass

    def store(self, published: Iterable[tuple[BlockKey, int]]) -> None:
        self.blocks |= {key for key, _ in published}

    def contains(self, key: BlockKey) -> bool:
        self.contained += 1
        return key in self.blocks

    def fetch(self, keys: Sequence[BlockKey]) -> list[Page] | None:
        self.fetched.append(list(keys))
        if self.bad & set(keys):
            self.blocks -= self.bad
            return None
        return [Page(key, torch.zeros(1)) for key in keys]

    def load(self, pages: Sequence[Page], block_ids: Sequence[int]) -> None:
        assert len(pages) == len(block_ids)
        self.loaded += [page.key for page in pages]


def waiting_for_room(lasts: int) -> tuple[Host, Tier, Request]:
    """Return a tier with a prompt of 8 blocks a group, and a request for it without room yet.

    The request before it leaves no room for that many steps.
    """
    target = Host("all", 0, (4, 4), num_blocks=1 + 18, budget=64, seqs=2)
    tier = target.manager.offload = Tier()
    text = [0, 1, 1] * 20
    target.add(text, 33, 1)
    target.drain(5)
    target.manager.reset_prefix_cache()
    if lasts:
        target.add([1] * 60, 20, lasts)
    return target, tier, target.add(text, 33, 1)


def test_who_waits_for_room_neither_reads_nor_looks_again() -> None:
    target, tier, one = waiting_for_room(16)
    target.step()
    looks = tier.contained
    for _ in range(14):
        target.step()
    assert one in target.scheduler.waiting
    assert 0 < looks == tier.contained
    assert (tier.fetched, tier.loaded) == ([], [])
    target.drain(5)
    assert [len(keys) for keys in tier.fetched] == [8 + 1]
    assert tier.loaded == tier.fetched[0]
    assert one.hit.num_tokens == 32
    assert one.hit.chains == ()


def test_who_waits_looks_again_when_one_of_its_blocks_is_published() -> None:
    """There is room for the prompt once, and for a request that needs but its last token."""
    target = Host("all", 0, (4, 4), num_blocks=1 + 22, budget=80, seqs=2)
    first, second = (target.add([0, 1, 1] * 20, 33, lasts) for lasts in (4, 1))
    target.step()
    assert target.scheduler.running == [first]
    target.step()
    assert second.is_finished
    assert second.hit.num_tokens == 32
    assert not first.is_finished
    target.drain(5)


def test_a_bad_file_costs_the_tier_for_one_look() -> None:
    target, tier, one = waiting_for_room(0)
    tier.bad = {(1, one.block_hashes.chain(4, one.token_ids, 32)[3])}
    target.step()
    assert [len(keys) for keys in tier.fetched] == [8 + 1]
    assert (tier.loaded, one.hit.num_tokens) == ([], 0)
    again = target.add([0, 1, 1] * 20, 33, 1)
    target.drain(20)
    assert again.hit.num_tokens == 32


def starts(target: Host) -> list[list[tuple[int, int, int]]]:
    """Return the prefills of each step: the request's number, its first token and how many."""
    found = []
    while target.scheduler.has_requests:
        prefills = [item for item in target.step() if not item.is_decode]
        found.append(
            [
                (int(item.request.request_id), item.num_computed_tokens, item.num_tokens)
                for item in prefills
            ]
        )
    return [prefills for prefills in found if prefills]


def test_a_prompt_waits_for_the_step_that_computes_its_prefix() -> None:
    """kvcached#362: nothing is a hit in the step that computes it; the second prompt waits."""
    target = Host("all", 0, (4, 4), budget=64)
    for text in ([1] * 60, [1] * 60, [1] * 7 + [0] * 53, [0] * 60):
        target.add(text, 14, 3)
    # The third shares a block, not two; the fourth nothing, but it is behind those that wait.
    assert starts(target) == [[(0, 0, 14)], [(1, 12, 2), (2, 4, 10), (3, 0, 14)]]


def test_no_prompt_waits_for_a_prefix_that_is_there_or_of_no_use() -> None:
    target = Host("all", 0, (4, 4), budget=64, seqs=8)
    target.add([1] * 60, 14, 3)
    target.drain(20)
    target.add([1] * 12 + [0] * 48, 20, 3)
    target.add([1] * 60, 12, 3)  # it computes its last block once more, …
    target.add([1] * 60, 14, 3)  # … which this one finds
    target.add([1] * 60, 14, 3, salt="other")
    target.add([0] * 60, 4, 3)
    target.add([0] * 60, 4, 3)  # its only block is of no use: its last token is computed
    assert starts(target) == [[(1, 12, 8), (2, 8, 4), (3, 12, 2), (4, 0, 14), (5, 0, 4), (6, 0, 4)]]


def test_a_prompt_waits_for_a_step_in_flight() -> None:
    target = Host("all", 0, (4, 4), budget=64, late=True)
    target.add([1] * 60, 14, 3)
    assert [item.num_tokens for item in target.step()] == [14]
    target.add([1] * 60, 14, 3)
    assert starts(target) == [[(1, 12, 2)]]


def test_a_prompt_waits_as_long_as_chunks_of_another_serve_it() -> None:
    target = Host("all", 0, (4, 4), budget=8)
    target.add([1] * 60, 20, 3)
    target.add([1] * 60, 18, 3)
    assert starts(target) == [[(0, 0, 8)], [(0, 8, 8)], [(0, 16, 4), (1, 16, 2)]]


def test_who_is_waited_for_may_be_dropped() -> None:
    """vllm!56525: hashes are published after the step, never when it is scheduled."""
    target = Host("all", 0, (4, 4), budget=64)
    one, two = target.add([1] * 60, 13, 3), target.add([1] * 60, 13, 3)
    target.scheduler.schedule()
    target.scheduler.finish(one)
    assert starts(target) == [[(1, 0, 13)]]
    assert two.hit.num_tokens == 0


@pytest.mark.parametrize(
    ("length", "max_tokens", "num_blocks", "match"),
    [
        (0, 1, 60, "request 1: the prompt is empty"),
        (40, 1, 60, "the prompt has 40 tokens, max_model_len is 40"),
        (30, 9, 6, "38 tokens never fit in 5 cache blocks; lower max_tokens"),
    ],
)
def test_impossible_requests_are_refused_and_the_others_go_on(
    length: int, max_tokens: int, num_blocks: int, match: str
) -> None:
    target = Host("none", num_blocks=num_blocks)
    good = target.add([1] * 60, 3, 4)
    with pytest.raises(ConfigError, match=match):
        target.add([1] * 60, length, max_tokens)
    target.drain(20)
    assert len(good.output_token_ids) == 4


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("late", [False, True], ids=["", "async"])
def test_the_longest_request_that_is_let_in_ends_in_a_pool_of_its_size(
    mode: str, late: bool
) -> None:
    """vllm!47272, trt!17162: what is admitted runs, drafts included; a block less is refused."""
    for k, length, max_tokens in ((0, 5, 9), (3, 7, 20), (3, 20, 1), (2, 12, 28)):
        for num_blocks in range(2, 40):
            target = Host(mode, k, (4, 4), num_blocks, budget=8, seqs=1, late=late)
            try:
                one = target.add([0, 1, 1] * 20, length, max_tokens)
            except ConfigError:
                continue
            target.drain(200)
            assert len(one.output_token_ids) == min(max_tokens, MAX_MODEL_LEN - length)
            assert late or one.num_preemptions == 0
            break
        assert late or target.highest["0", 0] + target.highest["0", 1] <= num_blocks - 1
        longest = min(length + max_tokens, MAX_MODEL_LEN) - 1
        assert num_blocks - 1 == sum(spec.max_blocks_per_request(longest) for spec in target.specs)


def test_abort_of_running_and_waiting_requests() -> None:
    target = Host("none", seqs=2, budget=3)
    requests = [target.add([1] * 60, 7, 4) for _ in range(4)]
    for _ in range(4):
        target.step()
    assert len(target.scheduler.running) == 2
    for victim in (requests[0], requests[3]):
        target.scheduler.finish(victim)
        target.scheduler.check_integrity()
    target.drain(20)
    assert [len(one.output_token_ids) == 4 for one in requests] == [False, True, True, False]

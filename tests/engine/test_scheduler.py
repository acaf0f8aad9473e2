"""The scheduler under random traffic: budgets, order, drafts, hits, preemption, what each block holds, and an end."""

from collections import Counter
from dataclasses import dataclass, field, replace

import numpy as np
import pytest
import torch

from hybrid_kv.cache.backend import BackendContext, TorchBackend
from hybrid_kv.cache.block_pool import NULL_BLOCK
from hybrid_kv.cache.manager import KVCacheManager
from hybrid_kv.cache.offload import Page
from hybrid_kv.cache.plan import plan_cache
from hybrid_kv.cache.spec import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec, MambaSpec, StatePart, UndoSpec
from hybrid_kv.config import CacheConfig, ConfigError, SchedulerConfig
from hybrid_kv.engine.scheduler import Scheduler
from hybrid_kv.kernels.common.integers import cdiv
from hybrid_kv.models.exact import ExactConfig, ExactModel
from hybrid_kv.request import Request
from hybrid_kv.sampling import SamplingParams

MODES = ("none", "align", "all")
MAX_MODEL_LEN = 40


@dataclass
class Row:
    """What the runner knows of a request: its tokens, its columns, and where its state is."""

    tokens: list[int]
    columns: list[list[int]]
    prev: int
    accepted: int = 1
    drafts: list[int] = field(default_factory=list)


class Simulation:
    """The engine without a model. A text is fixed for each request; each slot and state is named by the prefix of
    tokens that it stands for, so that what is read and what is published can be compared with what it should be.

    Args:
        check: compare contents and the rules of every step; without it only blocks are counted.
    """

    def __init__(
        self, seed, mode, k, sizes=(4, 4), num_blocks=60, budget=16, seqs=4, limit=MAX_MODEL_LEN, late=False, check=True
    ):
        self.rng = np.random.default_rng(seed)
        self.mode, self.k, self.late, self.check = mode, k, late, check
        mamba, attention = sizes
        self.specs = [
            MambaSpec(mamba, (StatePart("state", (1,), torch.int32),), mamba_cache_mode=mode, undo=UndoSpec(k)),
            FullAttentionSpec(attention, 1, 1, torch.int32),
        ]
        groups = tuple(KVCacheGroupSpec((str(i),), spec) for i, spec in enumerate(self.specs))
        self.manager = KVCacheManager(KVCacheConfig(num_blocks, groups), mode != "none", max_model_len=limit)
        self.pool = self.manager.pool
        config = SchedulerConfig(seqs, max(budget, seqs), limit)
        self.scheduler = Scheduler(config, self.manager, k)
        self.texts, self.rows, self.stops = {}, {}, {}
        self.prefixes = {}
        self.content = np.full((num_blocks, max(sizes)), -1)
        allocate = self.pool.allocate

        def poisoned(count):
            ids = allocate(count)
            if ids is not None:
                self.content[ids] = -1
            return ids

        self.pool.allocate = poisoned
        self.abort_rate = 0.0  # of steps that lose a request between scheduling and running
        self.seen = Counter()
        self.highest = Counter()  # blocks by request and group
        self.output = None
        self.num_steps = 0

    def add(self, text, length, max_tokens, stop=None, salt=""):
        """`text` has at least `max_model_len + K` tokens, of which `length` are the prompt; it ends at token `stop`."""
        name = str(len(self.texts))
        request = Request(name, text[:length], SamplingParams(max_tokens=max_tokens, cache_salt=salt), seed=0)
        self.scheduler.add(request)
        self.texts[name], self.stops[name] = text, stop
        return request

    def named(self, request, tokens):
        """The prefixes of `tokens`, the empty one included."""
        names = [self.prefixes.setdefault((-1, request.params.cache_salt), len(self.prefixes))]
        for token in tokens:
            names.append(self.prefixes.setdefault((names[-1], token), len(self.prefixes)))
        return np.array(names)

    def step(self):
        """One step as `LLM.step` does it; returns what was scheduled."""
        scheduler = self.scheduler
        before, old = list(scheduler.running), {id(r): r.num_preemptions for r in scheduler.running}
        drafts = {r.request_id: list(r.draft_token_ids) for r in before}
        scheduled = scheduler.schedule()
        self.num_steps += 1
        if self.check:
            self.check_step(scheduled, before, old, drafts)
        for request in scheduler.running:
            for group, ids in enumerate(self.manager.block_ids(request.request_id)):
                key = request.request_id, group
                self.highest[key] = max(self.highest[key], len(ids))
        if scheduled and self.rng.random() < self.abort_rate:
            victim = scheduled.pop(int(self.rng.integers(len(scheduled))))  # after it was scheduled, before it ran
            scheduler.finish(victim.request)
            self.seen["aborted"] += 1
        output = [self.run(item) for item in self.read(scheduled)]
        if not self.late:
            self.process(output)
            return scheduled
        previous, self.output = self.output, output
        self.process(previous or [])
        for item in scheduled:
            if not item.request.is_finished:
                item.request.in_flight = item
        return scheduled

    def check_step(self, scheduled, before, preemptions, drafts):
        scheduler, limit = self.scheduler, self.scheduler.config.max_model_len
        running = [item.request for item in scheduled]
        assert len(set(map(id, running))) == len(running) <= scheduler.config.max_num_seqs
        assert sum(item.num_tokens for item in scheduled) <= scheduler.config.max_num_batched_tokens
        arrival = [int(r.request_id) for r in [*scheduler.running, *scheduler.waiting]]
        assert arrival == sorted(arrival), "first come, first served, preempted requests included"
        for request in before:
            if request.num_preemptions > preemptions[id(request)]:
                self.seen["preempted"] += 1
                assert request.draft_token_ids == []
                assert (request.row, request.num_computed_tokens) == (-1, 0)
            elif request.in_flight is None:
                assert request in running, "a running request was starved"
        if not self.late:
            assert bool(scheduled) == scheduler.has_requests
        for item in scheduled:
            request, room = item.request, item.request.params.max_tokens - len(item.request.output_token_ids)
            assert item.num_tokens >= 1
            assert item.num_computed_tokens + item.num_tokens < limit
            if item.drafts:
                assert len(item.drafts) < room
                assert list(item.drafts) == drafts[request.request_id][: len(item.drafts)]
                assert item.is_decode
                assert item.samples
            if item.overwrite:
                self.seen["hit"] += item.num_computed_tokens > 0
                assert item.num_computed_tokens < request.num_tokens
                self.seen["resumed on a hit"] += item.num_computed_tokens > 0 and request.num_preemptions > 0
            if self.mode == "align" and not item.is_decode and item.drafts is not None:
                size = self.specs[0].block_size
                start, end = item.num_computed_tokens, item.num_computed_tokens + item.num_tokens
                unit = scheduler.manager.hit_unit
                last = (request.num_tokens - 1) // unit * unit
                assert not start < last < end, "the last boundary that a hit may use was passed over"
                for grid in (unit, size):
                    assert end % grid == 0 or end // grid == start // grid or start >= last
                    if end % unit == 0:
                        break  # a boundary of the states alone may lie before it
                self.seen["jumped over a column"] += end // size > start // size + 1
                self.seen["chunk inside a block"] += end % size != 0 and end < request.num_tokens
        for request in scheduler.running:
            for spec, ids in zip(self.specs, self.manager.block_ids(request.request_id), strict=True):
                assert len(ids) <= spec.max_blocks_per_request(limit) + self.slack(spec)

    def slack(self, spec):
        """The drafts of a step in flight may be rejected or not: columns for both, which may be one block more."""
        is_short = isinstance(spec, MambaSpec) and spec.block_size < 1 + 2 * self.k
        return int(self.late and self.mode == "align" and is_short)

    def read(self, scheduled):
        """Resolve, stage and read all rows, before any of them writes."""
        resolved = []
        for item in scheduled:
            request, name = item.request, item.request.request_id
            if item.overwrite:
                start = max(0, item.num_computed_tokens // self.specs[0].block_size - 1)
                self.rows[name] = Row(request.token_ids, [[], []], 0 if self.mode == "none" else start)
            row = self.rows[name]
            if item.drafts is None:
                known = len(row.tokens)
                room = min(
                    request.params.max_tokens - (known - len(request.prompt_token_ids)),
                    self.scheduler.config.max_model_len - known,
                )
                drafts = tuple(row.drafts[: max(0, min(item.num_drafts, room - 1))])
                item = replace(item, num_computed_tokens=known - 1, num_tokens=1 + len(drafts), drafts=drafts)
            resolved.append(item)
            if len(item.new_blocks.ids):
                for columns, ids in zip(row.columns, item.new_blocks.per_group(), strict=True):
                    columns += ids.tolist()
            n = item.num_computed_tokens
            if not self.check or not n:
                continue
            names = self.named(request, row.tokens[:n])
            (states, slots), size = row.columns, self.specs[1].block_size
            got = self.content[slots[: cdiv(n, size)], :size].reshape(-1)[:n]
            assert (got == names[1:]).all(), "a slot holds something else than the request's token"
            source = states[row.prev + row.accepted - 1]
            assert source != NULL_BLOCK
            assert self.content[source, 0] == -2 - names[n], "the state is not that after the last token"
        return resolved

    def run(self, item):
        """Write what the step computes; returns the item and what it sampled."""
        request, row = item.request, self.rows[item.request.request_id]
        n, q, drafts = item.num_computed_tokens, item.num_tokens, list(item.drafts)
        known = n + q - len(drafts)
        text = self.texts[request.request_id]
        new = []
        if item.samples:
            wrong = (j for j, draft in enumerate(drafts) if draft != text[known + j])
            good = next(wrong, len(drafts))
            new = text[known : known + good + 1]
            self.seen["rejected"] += good < len(drafts)
            self.seen["accepted"] += good > 0
        if self.check:
            self.write(item, row, self.named(request, row.tokens[:known] + drafts), max(1, len(new)))
        row.tokens = row.tokens[:known] + new if item.samples else row.tokens
        row.drafts = []
        if new:
            end = known + len(new)
            good = int(self.rng.integers(self.k + 1))
            count = int(self.rng.integers(self.k + 1))
            row.drafts = [t if j < good else 9 for j, t in enumerate(text[end : end + count])]
        return item, new, list(row.drafts)

    def write(self, item, row, names, accepted):
        n, q, (states, slots) = item.num_computed_tokens, item.num_tokens, row.columns
        size, state_size = self.specs[1].block_size, self.specs[0].block_size
        for position in range(n, n + q):
            block = slots[position // size]
            assert block != NULL_BLOCK
            assert self.pool.key_of(block) is None, "a published block is written"
            self.content[block, position % size] = names[position + 1]

        def keep(column, prefix):
            assert states[column] != NULL_BLOCK
            assert self.pool.key_of(states[column]) is None, "a published state is written"
            self.content[states[column], 0] = -2 - names[prefix]

        anchor = 0 if self.mode == "none" else (n + q - 1) // state_size
        row.prev, row.accepted = anchor, 1
        if not item.is_decode:
            if self.mode == "all":
                for end in range(n // state_size * state_size + state_size, n + q, state_size):
                    keep(end // state_size - 1, end)
            keep(anchor, n + q)
            return
        for j in range(q):
            keep(anchor + j, n + j + 1)
        row.accepted = accepted
        for j in range(accepted if self.mode != "none" else 0):
            home = (n + j + 1) // state_size - 1
            if (n + j + 1) % state_size == 0 and anchor + j != home:
                keep(home, n + j + 1)
                self.seen["brought home"] += 1
                if j + 1 == accepted:
                    row.prev, row.accepted = home, 1

    def process(self, output):
        for item, new, drafts in output:
            request = item.request
            request.in_flight = None
            if request.is_finished:
                continue
            kept, ended = 0, False
            for kept in range(1, len(new) + 1):
                length = request.num_tokens + kept
                ended = (
                    length - len(request.prompt_token_ids) >= request.params.max_tokens
                    or length >= self.scheduler.config.max_model_len
                    or length - 1 == self.stops[request.request_id]
                )
                if ended:
                    break
            self.seen["ended inside accepted drafts"] += kept < len(new)
            old = request.num_computed_tokens
            self.scheduler.update(item, new, kept)
            if self.check and not item.is_stale:
                computed = request.num_tokens - 1 if new else item.num_computed_tokens + item.num_tokens
                assert request.num_computed_tokens == computed
                self.check_published(request, old)
            request.draft_token_ids = drafts if not item.is_stale else []
            if ended:
                self.scheduler.finish(request)

    def check_published(self, request, old):
        """What a step has published is what its key says."""
        if self.mode == "none":
            return
        names = self.named(request, request.token_ids[: request.num_computed_tokens])
        for group, spec in enumerate(self.specs):
            size = spec.block_size
            chain = request.block_hashes.chain(size, (), 0)
            for column in range(old // size, request.num_computed_tokens // size):
                block = self.pool.lookup((group, chain[column]))
                assert block is not None or (group == 0 and self.mode == "align")
                if block is None:
                    continue
                end = (column + 1) * size
                if group == 0:
                    assert self.content[block, 0] == -2 - names[end]
                else:
                    assert (self.content[block, :size] == names[end - size + 1 : end + 1]).all()

    def drain(self, bound):
        """Run until nothing is left, at most `bound` steps."""
        for _ in range(bound):
            if not self.scheduler.has_requests:
                break
            self.step()
        assert not self.scheduler.has_requests, "the traffic does not end"
        self.scheduler.check_integrity()
        assert self.pool.num_free_blocks == self.pool.num_blocks - 1


def random_text(rng, roots):
    """Few roots and few tokens, so that prefixes are often equal."""
    text = list(roots[rng.integers(len(roots))])
    at = int(rng.integers(len(text)))
    return text[:at] + rng.integers(0, 2, len(text) - at).tolist() if rng.random() < 0.5 else text


def random_traffic(seed, mode, late):
    rng = np.random.default_rng(seed)
    k = int(rng.integers(0, 4))
    sizes = int(rng.integers(1 + k, 7)), int(rng.choice([1, 2, 3, 4, 6]))
    limit = int(rng.integers(12, 32))
    seqs = int(rng.integers(1, 5))
    # Enough for one request of the greatest length, seldom for all.
    alone = sum(
        spec.max_blocks_per_request(limit)
        for spec in (
            MambaSpec(sizes[0], (StatePart("state", (1,), torch.int32),), mamba_cache_mode=mode, undo=UndoSpec(k)),
            FullAttentionSpec(sizes[1], 1, 1, torch.int32),
        )
    )
    blocks = 1 + alone + int(rng.integers(0, alone * seqs))
    target = Simulation(seed, mode, k, sizes, blocks, int(rng.integers(1, 20)), seqs, limit, late)
    target.abort_rate = 0.0 if late else 0.02
    roots = rng.integers(0, 2, (2, limit + 8)).tolist()
    bound = 0
    for _ in range(int(rng.integers(2, 8))):
        length, max_tokens = int(rng.integers(1, limit)), int(rng.integers(1, 12))
        stop = length + int(rng.integers(12)) if rng.random() < 0.3 else None
        target.add(random_text(rng, roots), length, max_tokens, stop, salt="s" if rng.random() < 0.1 else "")
        # Each step computes a token of the oldest request, and nobody older can take its blocks.
        bound += length + max_tokens
    return target, bound * (2 if late else 1)


@pytest.mark.parametrize("late", [False, True], ids=["", "async"])
@pytest.mark.parametrize("mode", MODES)
def test_random_traffic(mode, late):
    """In each step: no empty one, the budget, the order, nobody starved, every block what it should be; and an end."""
    seen = Counter()
    for seed in range(200):
        target, bound = random_traffic(seed, mode, late)
        target.drain(bound)
        seen += target.seen
    required = {"preempted", "rejected", "accepted", "ended inside accepted drafts"}
    if not late:
        required |= {"aborted"}
    if mode != "none":
        required |= {"hit", "resumed on a hit", "brought home"}
    if mode == "align":
        required |= {"jumped over a column", "chunk inside a block"}
    assert {name for name in required if seen[name] < 10} == set()


def plan(mode, k, limit, block_size=4, num_blocks=200):
    specs = ExactModel(ExactConfig(pattern="M*"), k).layer_specs
    cache = CacheConfig(block_size=block_size, num_blocks=num_blocks, mamba_cache_mode=mode)
    return plan_cache(specs, cache, TorchBackend, BackendContext("cpu", False), limit, 4)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("k", [0, 1, 3])
@pytest.mark.parametrize("budget", [3, 7, 64])
def test_a_request_of_the_greatest_length_holds_what_the_plan_says(mode, k, budget):
    """Chunked, with every number of drafts, without hits: exactly `max_blocks_per_request`, in each group."""
    for limit in (18, 26, 31, 36):
        made = plan(mode, k, limit)
        specs = [group.spec for group in made.config.groups]
        (mamba,) = [spec for spec in specs if isinstance(spec, MambaSpec)]
        (attention,) = [spec for spec in specs if not isinstance(spec, MambaSpec)]
        sizes = mamba.block_size, attention.block_size
        highest = Counter()
        for seed in range(6):
            target = Simulation(seed, mode, k, sizes, 200, budget, 1, limit)
            text = np.random.default_rng(seed).integers(0, 2, limit + 8).tolist()
            target.add(text, 5 + seed, limit)
            target.drain(3 * limit)
            highest |= target.highest
        # The last token is sampled, never cached: these limits need no block for it alone.
        assert cdiv(limit - 1, 4) == cdiv(limit, 4)
        bounds = [spec.max_blocks_per_request(limit) for spec in (mamba, attention)]
        assert [highest["0", 0], highest["0", 1]] == bounds
        for spec in specs:
            assert spec.max_memory_usage_bytes(limit) == spec.max_blocks_per_request(limit) * spec.page_size_bytes
        assert made.blocks_per_request == sum(bounds)


@pytest.mark.parametrize("mode", MODES)
def test_nothing_leaks_in_a_hundred_thousand_requests(mode):
    """Ended, stopped inside drafts, preempted, aborted while waiting or running, with hits and without."""
    rng = np.random.default_rng(1)
    target = Simulation(1, mode, 1, (4, 4), 40, 24, 12, 24, check=False)
    scheduler, roots = target.scheduler, rng.integers(0, 2, (2, 32)).tolist()
    lengths, ends, victims = (rng.integers(1, high, 40_000).tolist() for high in (9, 3, 40))
    preemptions = 0
    for i in range(34_000):
        root = roots[i % 2]
        text = root if victims[i] % 2 else [i % 3, *root]
        request = target.add(text, lengths[i], ends[i])
        if victims[i] < 24:  # most of them never run: what is cheap is what may be many
            scheduler.finish(request)
            continue
        if victims[i] == 30 and scheduler.running:
            scheduler.finish(scheduler.running[victims[i - 1] % len(scheduler.running)])
        if i % 500 == 0:
            for one in reversed(scheduler.running[:]):
                scheduler.preempt(one)
                preemptions += 1
        while len(scheduler.waiting) > 6:
            target.step()
        if i % 2_000 == 0:
            scheduler.check_integrity()
    target.drain(10_000)


@pytest.mark.parametrize("mode", ["align", "all"])
@pytest.mark.parametrize("length", [4, 5, 8, 11, 12])
@pytest.mark.parametrize("budget", [1, 3, 5, 64])
def test_a_prompt_that_is_sent_twice_hits_its_last_boundary(mode, length, budget):
    """Also one of whole blocks (vllm#50235), whatever the chunks (vllm#53504: no first repetition in vain)."""
    target = Simulation(0, mode, 0, (4, 2), budget=budget, seqs=1)
    text = np.random.default_rng(length).integers(0, 2, 48).tolist()
    first = target.add(text, length, 1)
    target.drain(40)
    second = target.add(text, length, 1)
    target.drain(40)
    assert (first.hit.num_tokens, second.hit.num_tokens) == (0, (length - 1) // 4 * 4)


def chunks(target, request):
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
def test_align_chunks_end_on_boundaries(budget, length, expected):
    target = Simulation(0, "align", 0, (8, 4), budget=budget, seqs=1, limit=48)
    request = target.add([1] * 60, length, 1)
    assert chunks(target, request) == expected


def test_align_chunks_return_to_the_grid_after_another_requests_share():
    """vllm!51763: stops are on the grid, not relative to where a chunk or a hit began."""
    target = Simulation(0, "align", 0, (8, 4), budget=20, seqs=2, limit=48)
    first, second = target.add([1] * 60, 13, 1), target.add([0] * 60, 30, 1)
    ends = [[(i.request.request_id, i.num_computed_tokens + i.num_tokens) for i in target.step()] for _ in range(4)]
    assert ends == [[("0", 8), ("1", 8)], [("0", 13), ("1", 16)], [("1", 24)], [("1", 30)]]
    assert first.is_finished
    assert second.is_finished


@pytest.mark.parametrize("mode", MODES)
def test_drafts_starve_nobody(mode):
    """With budget for one token of each request and a few drafts more, the drafts of the first must not take all."""
    k = 3
    target = Simulation(0, mode, k, budget=6, seqs=4)
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


def test_drafts_share_the_budget():
    """Four equal requests draft alike; what one does not need is left to those behind it."""
    target = Simulation(0, "none", 4, budget=16, seqs=4)
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


@pytest.mark.parametrize(("stop", "kept", "accepted"), [(None, 4, 3), (3, 4, 3), (2, 3, 3), (1, 2, 2), (0, 1, 1)])
def test_accepted_drafts_behind_the_end_do_not_count(stop, kept, accepted):
    """Three right drafts and a token more; the request ends with the token of index `stop` of them."""
    target = Simulation(0, "none", 3, seqs=1)
    one = target.add([1] * 60, 4, 30)
    target.step()
    one.draft_token_ids = [1] * 3
    (item,) = target.scheduler.schedule()
    target.scheduler.update(item, [1] * 4, 4 if stop is None else stop + 1)
    assert (one.num_draft_tokens, one.num_accepted_draft_tokens) == (3, accepted)
    assert len(one.output_token_ids) == 1 + kept
    target.scheduler.update(replace(item, drafts=()), [], 0)
    assert one.num_accepted_draft_tokens == accepted


def test_a_prefill_starves_no_running_request_behind_it():
    """In mode align a chunk may end early, so that a later request is admitted while the prompt is still running."""
    target = Simulation(0, "align", 0, (8, 8), budget=16, seqs=3, limit=60)
    target.add([0] * 70, 2, 2)
    long = target.add([1] * 70, 50, 1)
    short = target.add([0, 1] * 35, 3, 9)
    target.step()
    assert (long.num_computed_tokens, len(short.output_token_ids)) == (8, 1)
    for known in range(2, 5):
        target.step()
        assert len(short.output_token_ids) == known
    assert long.num_computed_tokens == 32


def scheduler(num_blocks=60, budget=16, seqs=4):
    made = plan("none", 0, MAX_MODEL_LEN, num_blocks=num_blocks)
    return Scheduler(SchedulerConfig(seqs, max(budget, seqs), MAX_MODEL_LEN), KVCacheManager(made.config, False), 0)


def request(name, length, max_tokens=4):
    return Request(str(name), [1] * length, SamplingParams(max_tokens=max_tokens), seed=0)


def advance(target):
    """One step as the engine does it; returns what was scheduled and who finished."""
    scheduled = target.schedule()
    finished = []
    for item in scheduled:
        new = [0] if item.samples else []
        target.update(item, new, len(new))
        if len(item.request.output_token_ids) == item.request.params.max_tokens:
            target.finish(item.request)
            finished.append(item.request)
    return scheduled, finished


def test_the_youngest_is_preempted_and_starts_again_from_its_first_token():
    target = scheduler(num_blocks=1 + 2 * 2 + 1, budget=64)
    old, young = request("old", 4, 9), request("young", 4, 4)
    target.add(old)
    target.add(young)
    for _ in range(6):
        advance(target)
        if young.num_preemptions:
            break
    assert (old.num_preemptions, young.num_preemptions) == (0, 1)
    assert young.row == -1
    assert young.num_computed_tokens == 0
    assert target.waiting[0] is young


def test_a_preempted_request_recomputes_its_output_in_one_prefill():
    target = scheduler()
    one = request("a", 5, 9)
    target.add(one)
    advance(target)
    advance(target)
    one.draft_token_ids = [3, 4]
    target.preempt(one)
    (item,) = target.schedule()
    assert (item.num_tokens, item.num_computed_tokens, item.overwrite, item.is_decode) == (7, 0, True, False)
    assert item.samples
    assert (item.drafts, one.draft_token_ids) == ((), [])


def test_a_preempted_request_resumes_from_what_the_cache_still_holds():
    target = Simulation(0, "all", 2, (4, 4), seqs=2)
    one = target.add([0, 1, 1, 0] * 12, 9, 20)
    for _ in range(5):
        target.step()
    known = one.num_tokens
    target.scheduler.preempt(one)
    target.scheduler.check_integrity()
    (item,) = target.step()
    assert item.num_computed_tokens == (known - 1) // 4 * 4
    assert one.hit.num_tokens == 0, "of the first admission"
    target.drain(40)


class Tier:
    """An offload tier that keeps everything and counts what it is asked."""

    def __init__(self):
        self.blocks, self.bad = set(), set()
        self.contained, self.fetched, self.loaded = 0, [], []

    def check_integrity(self):
        pass

    def store(self, published):
        self.blocks |= {key for key, _ in published}

    def contains(self, key):
        self.contained += 1
        return key in self.blocks

    def fetch(self, keys):
        self.fetched.append(list(keys))
        if self.bad & set(keys):
            self.blocks -= self.bad
            return None
        return [Page(key, torch.zeros(1)) for key in keys]

    def load(self, pages, block_ids):
        assert len(pages) == len(block_ids)
        self.loaded += [page.key for page in pages]


def waiting_for_room(lasts):
    """A tier with a prompt of 8 blocks of each group, and a request for it behind one that leaves it no room for so
    many steps.
    """
    target = Simulation(0, "all", 0, (4, 4), num_blocks=1 + 18, budget=64, seqs=2, check=False)
    tier = target.manager.offload = Tier()
    text = [0, 1, 1] * 20
    target.add(text, 33, 1)
    target.drain(5)
    target.manager.reset_prefix_cache()
    if lasts:
        target.add([1] * 60, 20, lasts)
    return target, tier, target.add(text, 33, 1)


def test_who_waits_for_room_neither_reads_nor_looks_again():
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


def test_who_waits_looks_again_when_one_of_its_blocks_is_published():
    """There is room for the prompt once, and for a request that needs but its last token."""
    target = Simulation(0, "all", 0, (4, 4), num_blocks=1 + 22, budget=80, seqs=2)
    first, second = (target.add([0, 1, 1] * 20, 33, lasts) for lasts in (4, 1))
    target.step()
    assert target.scheduler.running == [first]
    target.step()
    assert second.is_finished
    assert second.hit.num_tokens == 32
    assert not first.is_finished
    target.drain(5)


def test_a_bad_file_costs_the_tier_for_one_look():
    target, tier, one = waiting_for_room(0)
    tier.bad = {(1, one.block_hashes.chain(4, one.token_ids, 32)[3])}
    target.step()
    assert [len(keys) for keys in tier.fetched] == [8 + 1]
    assert (tier.loaded, one.hit.num_tokens) == ([], 0)
    again = target.add([0, 1, 1] * 20, 33, 1)
    target.drain(20)
    assert again.hit.num_tokens == 32


def starts(target):
    """Of each step until the end: the prefills, as the request's number, its first token and how many."""
    found = []
    while target.scheduler.has_requests:
        prefills = [item for item in target.step() if not item.is_decode]
        found.append([(int(item.request.request_id), item.num_computed_tokens, item.num_tokens) for item in prefills])
    return [prefills for prefills in found if prefills]


def test_a_prompt_waits_for_the_step_that_computes_its_prefix():
    """kvcached#362: nothing is a hit in the step that computes it, so the second prompt comes in the step after."""
    target = Simulation(0, "all", 0, (4, 4), budget=64)
    for text in ([1] * 60, [1] * 60, [1] * 7 + [0] * 53, [0] * 60):
        target.add(text, 14, 3)
    # The third shares a block, not two; the fourth nothing, but it is behind those that wait.
    assert starts(target) == [[(0, 0, 14)], [(1, 12, 2), (2, 4, 10), (3, 0, 14)]]


def test_nobody_waits_for_a_prefix_that_is_there_or_of_no_use():
    target = Simulation(0, "all", 0, (4, 4), budget=64, seqs=8)
    target.add([1] * 60, 14, 3)
    target.drain(20)
    target.add([1] * 12 + [0] * 48, 20, 3)
    target.add([1] * 60, 12, 3)  # it computes its last block once more, …
    target.add([1] * 60, 14, 3)  # … which this one finds
    target.add([1] * 60, 14, 3, salt="other")
    target.add([0] * 60, 4, 3)
    target.add([0] * 60, 4, 3)  # its only block is of no use: its last token is computed
    assert starts(target) == [[(1, 12, 8), (2, 8, 4), (3, 12, 2), (4, 0, 14), (5, 0, 4), (6, 0, 4)]]


def test_nobody_waits_for_a_block_that_other_groups_cannot_use():
    target = Simulation(0, "all", 0, (4, 8), budget=64)
    target.add([1] * 60, 9, 3)
    target.drain(20)
    target.add([1] * 60, 14, 3)
    target.add([1] * 60, 14, 3)  # the state after 12 tokens is of no use without attention's second block
    assert starts(target) == [[(1, 8, 6), (2, 8, 6)]]


def test_a_prompt_waits_for_a_step_in_flight():
    target = Simulation(0, "all", 0, (4, 4), budget=64, late=True)
    target.add([1] * 60, 14, 3)
    assert [item.num_tokens for item in target.step()] == [14]
    target.add([1] * 60, 14, 3)
    assert starts(target) == [[(1, 12, 2)]]


def test_nobody_waits_without_a_cache():
    target = Simulation(0, "none", 0, (4, 4), budget=64)
    for _ in range(3):
        target.add([1] * 60, 13, 3)
    assert starts(target) == [[(0, 0, 13), (1, 0, 13), (2, 0, 13)]]


def test_a_prompt_waits_as_long_as_chunks_of_another_serve_it():
    target = Simulation(0, "all", 0, (4, 4), budget=8)
    target.add([1] * 60, 20, 3)
    target.add([1] * 60, 18, 3)
    assert starts(target) == [[(0, 0, 8)], [(0, 8, 8)], [(0, 16, 4), (1, 16, 2)]]


def test_in_align_only_the_end_of_a_chunk_is_worth_waiting_for():
    target = Simulation(0, "align", 0, (4, 4), budget=64)
    target.add([1] * 60, 18, 3)  # chunks of 16 and 2
    target.add([1] * 8 + [0] * 52, 18, 3)  # a state after 8 tokens will not be there
    target.add([1] * 60, 18, 3)
    assert starts(target) == [[(0, 0, 16), (1, 0, 16)], [(0, 16, 2), (1, 16, 2), (2, 16, 2)]]


def test_who_is_waited_for_may_be_dropped():
    target = Simulation(0, "all", 0, (4, 4), budget=64)
    one, two = target.add([1] * 60, 13, 3), target.add([1] * 60, 13, 3)
    target.scheduler.schedule()
    target.scheduler.finish(one)
    assert starts(target) == [[(1, 0, 13)]]
    assert two.hit.num_tokens == 0


def test_a_request_that_is_dropped_before_its_step_runs_leaves_no_hit():
    """vllm!56525: hashes are published after the step, never when it is scheduled."""
    target = Simulation(0, "all", 0, (4, 4), budget=64)
    one = target.add([1] * 60, 13, 3)
    target.scheduler.schedule()
    target.scheduler.finish(one)
    again = target.add([1] * 60, 13, 3)
    target.drain(20)
    assert again.hit.num_tokens == 0


@pytest.mark.parametrize(
    ("length", "max_tokens", "num_blocks", "match"),
    [
        (0, 1, 60, "request bad: the prompt is empty"),
        (40, 1, 60, "the prompt has 40 tokens, max_model_len is 40"),
        (30, 9, 6, "38 tokens never fit in 5 cache blocks; lower max_tokens"),
    ],
)
def test_impossible_requests_are_refused_and_the_others_go_on(length, max_tokens, num_blocks, match):
    target = scheduler(num_blocks)
    target.add(request("good", 3))
    with pytest.raises(ConfigError, match=match):
        target.add(request("bad", length, max_tokens))
    finished = []
    while target.has_requests:
        finished += advance(target)[1]
    assert [one.request_id for one in finished] == ["good"]


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("late", [False, True], ids=["", "async"])
def test_the_longest_request_that_is_let_in_ends_in_a_pool_of_its_size(mode, late):
    """vllm!47272 and trt!17162: what the door lets in must run, drafts included, and one block less is refused."""
    for k, length, max_tokens in ((0, 5, 9), (3, 7, 20), (3, 20, 1), (2, 12, 28)):
        for num_blocks in range(2, 40):
            target = Simulation(0, mode, k, (4, 4), num_blocks, budget=8, seqs=1, late=late)
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


def test_abort_of_running_and_waiting_requests():
    target = scheduler(seqs=2, budget=3)
    requests = [request(i, 7) for i in range(4)]
    for one in requests:
        target.add(one)
    for _ in range(4):
        advance(target)
    assert len(target.running) == 2
    for victim in (requests[0], requests[3]):
        target.finish(victim)
        target.check_integrity()
    finished = []
    while target.has_requests:
        finished += advance(target)[1]
        target.check_integrity()
    assert [one.request_id for one in finished] == ["1", "2"]

"""The scheduler under random traffic: budgets, order, preemption, and an end."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hybrid_kv.cache.backend import BackendContext, TorchBackend
from hybrid_kv.cache.manager import KVCacheManager
from hybrid_kv.cache.plan import plan_cache
from hybrid_kv.config import CacheConfig, ConfigError, SchedulerConfig
from hybrid_kv.engine.sampling import SamplingParams
from hybrid_kv.engine.scheduler import Request, Scheduler
from hybrid_kv.models.exact import ExactConfig, ExactModel

MAX_MODEL_LEN = 40


def scheduler(num_blocks=60, budget=16, seqs=4, pattern="M*"):
    specs = ExactModel(ExactConfig(pattern=pattern)).layer_specs
    cache = CacheConfig(block_size=4, num_blocks=num_blocks)
    plan = plan_cache(specs, cache, TorchBackend, BackendContext(), MAX_MODEL_LEN)
    return Scheduler(SchedulerConfig(seqs, max(budget, seqs), MAX_MODEL_LEN), KVCacheManager(plan.config))


def request(name, length, max_tokens=4):
    return Request(str(name), [1] * length, SamplingParams(max_tokens=max_tokens), seed=0)


def advance(target):
    """One step as the engine does it; returns what was scheduled and who finished."""
    scheduled = target.schedule()
    finished = []
    for item in scheduled:
        item.request.num_computed_tokens += item.num_tokens
        if item.samples:
            item.request.output_token_ids.append(0)
            if len(item.request.output_token_ids) == item.request.params.max_tokens:
                target.finish(item.request)
                finished.append(item.request)
    return scheduled, finished


@given(
    st.lists(st.tuples(st.integers(1, 30), st.integers(1, 9)), min_size=1, max_size=9),
    st.integers(11, 30),
    st.integers(1, 24),
    st.integers(1, 5),
)
def test_random_traffic_ends_within_budget_and_in_order(traffic, num_blocks, budget, seqs):
    target = scheduler(num_blocks, budget, seqs)
    budget = target.config.max_num_batched_tokens
    pending = [request(i, length, max_tokens) for i, (length, max_tokens) in enumerate(traffic)]
    for one in pending:
        target.add(one)
    arrival = {one.request_id: i for i, one in enumerate(pending)}
    # Each step computes a token of the oldest request, and nobody older can take its blocks.
    bound = sum(length + max_tokens for length, max_tokens in traffic)
    ended = 0
    for _ in range(bound):
        before = [one.request_id for one in target.running]
        scheduled, finished = advance(target)
        ended += len(finished)
        target.check_integrity()
        assert scheduled
        assert all(item.num_tokens >= 1 for item in scheduled)
        assert sum(item.num_tokens for item in scheduled) <= budget
        names = [item.request.request_id for item in scheduled]
        assert len(set(names)) == len(names) <= seqs
        # First come, first served, preempted requests included.
        order = [arrival[one.request_id] for one in [*target.running, *target.waiting]]
        assert order == sorted(order)
        assert scheduled[0].request.request_id == (before[0] if before else names[0])
        if not target.has_requests:
            break
    assert ended == len(traffic)
    assert target.manager.pool.num_free_blocks == target.manager.pool.num_blocks - 1


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
    target.preempt(one)
    (item,) = target.schedule()
    assert (item.num_tokens, item.num_computed_tokens, item.overwrite, item.is_decode) == (7, 0, True, False)


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

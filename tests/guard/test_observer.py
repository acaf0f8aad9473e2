"""The rules can be broken, and say so."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from hybrid_kv.attention.undo import Replay, ReplaySpec
from hybrid_kv.cache import manager
from hybrid_kv.cache.block_pool import BlockPool
from hybrid_kv.cache.columns import Columns, PrefixHit, Refusal
from hybrid_kv.cache.manager import KVCacheManager
from hybrid_kv.cache.spec import MambaSpec
from hybrid_kv.engine.llm import LLM
from hybrid_kv.engine.runner import ModelRunner
from hybrid_kv.engine.scheduler import Scheduler
from hybrid_kv.guard.forced import FORCED
from hybrid_kv.guard.observer import Observer
from hybrid_kv.guard.play import Differences, run_scenario
from hybrid_kv.guard.scenario import Event, Scenario, SmallKVFirst, answer_book, cache_options
from hybrid_kv.guard.traffic import draw_scenario
from hybrid_kv.guard.waiting import Waiting
from hybrid_kv.models.exact import ExactModel
from hybrid_kv.sampling import SamplingParams


def scenario(mode: str, K: int = 0, drafts: str = "none", **options: Any) -> Scenario:
    """Three prompts, twice."""
    rng = np.random.default_rng(4)
    prompts = [rng.integers(0, 97, size=length).tolist() for length in (13, 24, 31)]
    options = {
        "attention_backend": SmallKVFirst.name,
        "block_size": 8,
        "num_blocks": 300,
        "max_num_seqs": 4,
        "max_num_batched_tokens": 20,
        "max_model_len": 80,
        "device": "cpu",
        **cache_options(mode, K, drafts),
        **options,
    }
    layers = "**" if mode == "attention" else "M*MM*"
    params = [SamplingParams(max_tokens=14)] * 6
    return Scenario(0, layers, options, prompts * 2, params, (3, 3), drafts)


def wrong(result: Differences) -> str:
    assert len(result.wrong) == 1
    return str(result.wrong[0])


@pytest.mark.parametrize("schedule", [{}, {"async_scheduling": True}, {"pipeline_parallel_size": 3}])
@pytest.mark.parametrize("mode", ["none", "align", "all", "attention"])
def test_clean_traffic_breaks_no_rule(mode: str, schedule: dict[str, Any]) -> None:
    for K, drafts in ((0, "none"), (3, "mixed"), (3, "right"), (2, "ngram")):
        assert run_scenario(scenario(mode, K, drafts, **schedule)).wrong == []


@pytest.mark.parametrize("mode", ["none", "align", "all"])
def test_a_block_too_many(monkeypatch: pytest.MonkeyPatch, mode: str) -> None:
    original: Callable[..., Any] = KVCacheManager.allocate_slots

    def hoard(self: KVCacheManager, name: str, n: int, new: int, *rest: Any) -> Any:
        return original(self, name, n, new + 8, *rest)

    monkeypatch.setattr(KVCacheManager, "allocate_slots", hoard)
    assert "are due" in wrong(run_scenario(scenario(mode)))


def test_ids_that_change_after_they_were_handed_out(monkeypatch: pytest.MonkeyPatch) -> None:
    original = BlockPool.allocate

    def view(self: BlockPool, count: int) -> Any:
        ids = original(self, count)
        end = self._head  # behind what was just taken
        return ids if ids is None or len(ids) != count or end < count else self._ring[end - count : end]

    monkeypatch.setattr(BlockPool, "allocate", view)
    assert "were handed out" in wrong(run_scenario(scenario("none")))


SCHEMES = [("slots", 8, 0), ("slots", 8, 3), ("replay", 8, 0), ("replay", 8, 3)]


@pytest.mark.parametrize(("scheme", "block_size", "K"), SCHEMES)
def test_a_state_that_is_held_too_long_or_not_paid_for(
    monkeypatch: pytest.MonkeyPatch, scheme: str, block_size: int, K: int
) -> None:
    options = {"state_scheme": scheme, "block_size": block_size}
    traffic = scenario("align", K, "right" if K else "none", **options)
    assert run_scenario(traffic).wrong == []
    give_back = Columns.give_back
    with monkeypatch.context() as patch:
        patch.setattr(Columns, "give_back", lambda self, end: give_back(self, max(self.first, end - 1)))
        assert "are due" in wrong(run_scenario(traffic))
    planned = MambaSpec.max_blocks_per_request
    monkeypatch.setattr(MambaSpec, "max_blocks_per_request", lambda self, length: planned(self, length) - 1)
    assert "are planned" in wrong(run_scenario(traffic))


@pytest.mark.parametrize("is_async", [False, True])
def test_a_step_under_way_that_is_not_planned_for(monkeypatch: pytest.MonkeyPatch, is_async: bool) -> None:
    traffic = scenario("align", 3, "right", async_scheduling=is_async, state_scheme="replay")
    assert run_scenario(traffic).wrong == []
    planned = Replay.memory
    for is_wrong, by, said in ((True, 0, "are due"), (False, 1, "tokens may be under way")):

        def other(cache: Any, K: int, late: bool, specs: Any, is_wrong: bool = is_wrong, by: int = by) -> ReplaySpec:
            found = planned(cache, K, late != is_wrong, specs)
            return replace(found, num_uncertain_tokens=found.num_uncertain_tokens + by)

        with monkeypatch.context() as patch:
            patch.setattr(Replay, "memory", staticmethod(other))
            assert said in wrong(run_scenario(traffic))


def test_a_hit_too_short(monkeypatch: pytest.MonkeyPatch) -> None:
    original = KVCacheManager._find

    def shorter(self: KVCacheManager, *arguments: Any) -> PrefixHit:
        hit = original(self, *arguments)
        return replace(hit, num_tokens=max(0, hit.num_tokens - 8))

    monkeypatch.setattr(KVCacheManager, "_find", shorter)
    assert "from the cache, which has" in wrong(run_scenario(scenario("attention")))


def test_a_hit_that_is_put_down_to_another_group(monkeypatch: pytest.MonkeyPatch) -> None:
    traffic = draw_scenario(list(FORCED).index("attention_deeper"))
    assert run_scenario(traffic).wrong == []
    find = KVCacheManager._find
    for lie in (
        lambda hit: {"vetoed_by": None},
        lambda hit: {"vetoed_by": None if hit.vetoed_by is None else hit.vetoed_by + 1},
        lambda hit: {"group_tokens": tuple(min(hit.group_tokens) for _ in hit.group_tokens)},
    ):
        with monkeypatch.context() as patch:
            patch.setattr(KVCacheManager, "_find", lambda *given, lie=lie: replace(hit := find(*given), **lie(hit)))
            assert "hit-groups: request" in wrong(run_scenario(traffic))


def test_a_hit_of_what_was_never_computed(monkeypatch: pytest.MonkeyPatch) -> None:
    original = BlockPool.publish

    def early(self: BlockPool, key: Any, block: int) -> bool:
        return original(self, key, block)

    def eager(self: Scheduler) -> Any:
        items = schedule(self)
        for item in items:
            request = item.request
            end = item.num_computed_tokens + item.num_tokens - item.num_drafts
            self.manager.cache_blocks(
                request.request_id, request.block_hashes, request.token_ids, end, item.is_decode, end
            )
        return items

    schedule = Scheduler.schedule
    monkeypatch.setattr(BlockPool, "publish", early)
    monkeypatch.setattr(Scheduler, "schedule", eager)
    assert "which others may read" in wrong(run_scenario(scenario("attention")))


def test_a_chunk_that_ends_beside_the_boundary(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(KVCacheManager, "chunk_end", lambda manager, start, end, num_tokens: end)
    assert "does not end on one" in wrong(run_scenario(scenario("align")))


def test_a_right_draft_that_is_dropped(monkeypatch: pytest.MonkeyPatch) -> None:
    from hybrid_kv.engine import runner

    original = runner.verify

    def never(*arguments: Any) -> list[list[int]]:
        return [tokens[:1] for tokens in original(*arguments)]

    monkeypatch.setattr(runner, "verify", never)
    assert "are due" in wrong(run_scenario(scenario("none", 3, "right")))


def test_a_running_request_that_starves(monkeypatch: pytest.MonkeyPatch) -> None:
    schedule = Scheduler.schedule

    def skip(self: Scheduler) -> Any:
        items = schedule(self)
        return items[:-1] if len(items) > 2 and not items[-1].overwrite else items

    monkeypatch.setattr(Scheduler, "schedule", skip)
    assert "left out of a step" in wrong(run_scenario(scenario("none")))


def test_a_request_that_waits_without_need(monkeypatch: pytest.MonkeyPatch) -> None:
    admit: Callable[..., Any] = Scheduler._admit

    def one_by_one(self: Scheduler, *arguments: Any) -> Any:
        return None if self.running else admit(self, *arguments)

    monkeypatch.setattr(Scheduler, "_admit", one_by_one)
    for mode in ("none", "attention"):
        assert "left-waiting: request 1 waits with" in wrong(run_scenario(scenario(mode, max_num_batched_tokens=64)))


def test_a_preemption_counts_though_another_request_takes_its_own_along() -> None:
    """Their sum over all requests stays the same."""
    gone, head, running = (
        SimpleNamespace(request_id=name, num_preemptions=n) for name, n in (("a", 1), ("b", 0), ("c", 0))
    )
    scheduler = SimpleNamespace(running=[gone, running], waiting=[head])
    waiting = Waiting.__new__(Waiting)
    waiting._llm = SimpleNamespace(scheduler=scheduler)  # type: ignore[assignment]
    before = waiting._count_preemptions()
    scheduler.running, head.num_preemptions = [running], 1
    assert waiting._count_preemptions() == {"c": 0, "b": 1} and before == {"a": 1, "c": 0, "b": 0}


@pytest.mark.parametrize("mode", ["align", "all", "attention"])
@pytest.mark.parametrize("is_async", [False, True])
def test_a_request_that_does_not_wait_for_its_prefix(
    monkeypatch: pytest.MonkeyPatch, mode: str, is_async: bool
) -> None:
    (prompt,) = scenario(mode).prompts[2:3]
    twins = replace(scenario(mode, async_scheduling=is_async, max_num_batched_tokens=64), prompts=[prompt] * 6)
    assert run_scenario(twins).wrong == []
    monkeypatch.setattr(Scheduler, "_is_under_way", lambda *_: False)
    assert "did-not-wait: request 1 starts after 0 tokens" in wrong(run_scenario(twins))


def test_a_prefix_that_counts_as_used_though_its_request_did_not_get_in(monkeypatch: pytest.MonkeyPatch) -> None:
    find = KVCacheManager.find_longest_cache_hit

    def use(self: KVCacheManager, *given: Any) -> PrefixHit:
        hit = find(self, *given)
        columns = range(hit.num_tokens // self.config.groups[0].spec.block_size)
        blocks = [self.pool.lookup((0, hit.chains[0][column])) for column in columns]
        self.pool.refresh(np.array([block for block in blocks if block is not None], dtype=np.int32))
        return hit

    full = scenario("attention", num_blocks=9)
    assert run_scenario(full).wrong == []
    monkeypatch.setattr(KVCacheManager, "find_longest_cache_hit", use)
    assert "used-by-nobody: free blocks" in wrong(run_scenario(full))


def test_a_refused_prompt_that_is_looked_up_in_every_step(monkeypatch: pytest.MonkeyPatch) -> None:
    full = scenario("attention", num_blocks=9)
    assert run_scenario(full).wrong == []
    monkeypatch.setattr(KVCacheManager, "may_fit", lambda *_: True)
    assert "looked-up-again: a prompt that" in wrong(run_scenario(full))


def test_a_request_that_starts_where_another_had_to_go(monkeypatch: pytest.MonkeyPatch) -> None:
    schedule = Scheduler.schedule

    def admit(self: Scheduler) -> Any:
        before = sum(request.num_preemptions for request in self.running)
        items = schedule(self)
        if self.waiting and sum(one.num_preemptions for one in (*self.running, *self.waiting)) > before:
            item = self._admit(self.waiting[0], 1, items)
            items += [item] if item else []
        return items

    full = scenario("none", num_blocks=10, max_num_batched_tokens=64)
    assert run_scenario(full).wrong == []
    monkeypatch.setattr(Scheduler, "schedule", admit)
    assert "started-anyway: requests" in wrong(run_scenario(full))


def test_a_reset_of_all_that_leaves_requests_running(monkeypatch: pytest.MonkeyPatch) -> None:
    # Three prompts that begin differently: nothing is shared, and step 3 is an odd one.
    alone = replace(scenario("all"), prompts=scenario("all").prompts[:3], waves=(3,), events=(Event("reset", 3),))
    alone = replace(alone, params=alone.params[:3])
    assert run_scenario(alone).wrong == []
    monkeypatch.setattr(Scheduler, "preempt_all", lambda _: None)
    assert "reset-left-running: 3 requests run on" in wrong(run_scenario(alone))


def test_an_engine_that_sleeps_with_its_eyes_open(monkeypatch: pytest.MonkeyPatch) -> None:
    tired = replace(scenario("all", 2, "mixed", state_scheme="replay"), events=(Event("sleep", 3, 4),))
    result = run_scenario(tired)
    assert result.wrong == [] and result.seen["sleep"] > 1
    with monkeypatch.context() as patch:
        kept: list[Any] = []
        free = ModelRunner.free_memory
        patch.setattr(ModelRunner, "free_memory", lambda runner: (kept.extend(runner.raw_buffers), free(runner)))
        assert "sleepless: memory is kept in sleep" in wrong(run_scenario(tired))
    monkeypatch.setattr(LLM, "reset_prefix_cache", lambda llm, reset_running_requests: llm.scheduler.preempt_all())
    assert "hit-length" in wrong(run_scenario(tired))


def test_a_block_that_is_published_late(monkeypatch: pytest.MonkeyPatch) -> None:
    publish = KVCacheManager.cache_blocks

    def late(self: KVCacheManager, request_id: str, hashes: Any, tokens: Any, computed: int, *more: Any) -> None:
        publish(self, request_id, hashes, tokens, computed - 1, *more)

    monkeypatch.setattr(KVCacheManager, "cache_blocks", late)
    assert "published-late: request 0: 8 tokens are in the cache" in wrong(
        run_scenario(scenario("attention", max_num_batched_tokens=8))
    )


@pytest.mark.parametrize("event", ["on_schedule", "on_prepare", "on_step"])
def test_a_step_that_nobody_is_told_of(monkeypatch: pytest.MonkeyPatch, event: str) -> None:
    monkeypatch.setattr(Observer, event, lambda *_: None)
    assert "untold: of a step that ends, watchers were told [" in wrong(run_scenario(scenario("all")))


def test_a_prompt_that_is_not_asked_again_though_more_of_it_was_published(monkeypatch: pytest.MonkeyPatch) -> None:
    once = FORCED["fits_once_published"](0, np.random.default_rng(0))
    result = run_scenario(once)
    assert result.wrong == [] and result.seen["fits_once_published"] == 1
    monkeypatch.setattr(manager, "Refusal", lambda name, room, keys: Refusal(name, room, frozenset()))
    assert "left-waiting: request 2 waits with" in wrong(run_scenario(once))


def test_figures_of_an_output_that_did_not_happen(monkeypatch: pytest.MonkeyPatch) -> None:
    assert run_scenario(deeper()).wrong == []
    output = LLM.output
    for lie in (
        lambda o: {"cached_tokens": max((o.cached_tokens, *o.hit.group_tokens))},  # of one group alone
        lambda o: {"num_draft_tokens": o.num_draft_tokens + 1},
        lambda o: {"num_accepted_draft_tokens": o.num_draft_tokens},
        lambda o: {"num_preemptions": o.num_preemptions + 1},
    ):
        with monkeypatch.context() as patch:
            patch.setattr(LLM, "output", lambda *given, lie=lie: replace(found := output(*given), **lie(found)))
            assert "figures: request" in wrong(run_scenario(deeper()))


def deeper() -> Scenario:
    """Its K/V are cached beyond the last state."""
    found = scenario("align", 3, "mixed", max_num_batched_tokens=64)
    shared = found.prompts[2]
    prompts = [shared, [*shared[:20], 1, 2, 3], *found.prompts[2:]]
    return replace(found, prompts=prompts, waves=(1, 5))


def test_a_livelock(monkeypatch: pytest.MonkeyPatch) -> None:
    # Twenty tokens need two steps of sixteen, and the request is preempted after each first one.
    generate = LLM.generate

    def preempting(self: LLM, prompts: Any, params: Any, progress: bool, on_step: Callable[[LLM], None]) -> Any:
        def disturb(llm: LLM) -> None:
            for request in list(llm.scheduler.running):
                llm.scheduler.preempt(request)
            on_step(llm)

        return generate(self, prompts, params, progress, disturb)

    monkeypatch.setattr(LLM, "generate", preempting)
    options = scenario("none", max_num_batched_tokens=16, max_num_seqs=1).options
    endless = Scenario(0, "M*", options, [[1] * 20], [SamplingParams(max_tokens=2)])
    assert "livelock" in wrong(run_scenario(endless))


def test_rows_that_are_padded_to_another_size(monkeypatch: pytest.MonkeyPatch) -> None:
    padded = scenario("none", captured_batch_sizes=(2, 4))
    assert run_scenario(padded).wrong == []
    for size in (0, 3):
        monkeypatch.setattr(ModelRunner, "padded_size", lambda self, rows, size=size: max(rows, size))
        assert "requests has" in wrong(run_scenario(padded))


def test_a_prompt_refused_without_need(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(KVCacheManager, "can_ever_fit", lambda self, num_tokens: num_tokens < 30)
    assert "never fit" in str(run_scenario(scenario("none")).wrong[0])


def test_an_aborted_request_keeps_a_beginning_of_its_answer() -> None:
    aborting = scenario("all", 3, "mixed")
    aborting = Scenario(
        0, aborting.layers, aborting.options, aborting.prompts, aborting.params, (3, 3), "mixed",
        (Event("abort", 4, 3), Event("drop", 5, 4)),
    )  # fmt: skip
    result = run_scenario(aborting)
    assert result.wrong == []
    assert result.seen["abort_in_flight"]


@pytest.mark.parametrize("events", [["sleep"], ["reset"], ["preempt", "reset"]])
def test_what_a_request_publishes_as_it_leaves_is_forgotten_too(events: list[str]) -> None:
    """Its ring holds the state behind 8 tokens, which it writes when it is preempted, just before all is forgotten."""
    options = {
        "max_model_len": 32, "device": "cpu", "enable_prefix_caching": True, "async_scheduling": True,
        "state_scheme": "replay", "mamba_block_size": 4, "num_blocks": 400,
    }  # fmt: skip
    leaving = Scenario(
        0, "M", options, [[0]], [SamplingParams(max_tokens=10)], events=tuple(Event(what, 9) for what in events)
    )
    assert run_scenario(leaving).wrong == []


def test_the_oracle_book_is_per_model() -> None:
    assert isinstance(answer_book("M*").model, ExactModel)
    assert answer_book("M*") is answer_book("M*") is not answer_book("*M")


@pytest.mark.parametrize("scheme", ["slots", "replay"])
@pytest.mark.parametrize("mode", ["none", "align", "all"])
@pytest.mark.parametrize("layers", ["W*W", "T*M", "V*W"])
def test_layers_of_one_three_and_five_parts_keep_every_rule(layers: str, mode: str, scheme: str) -> None:
    """A short convolution, a window and two states, three windows and two states."""
    for drafts in ("mixed", "right"):
        found = scenario(mode, 3, drafts, state_scheme=scheme, sanitize=True)
        assert run_scenario(replace(found, layers=layers)).wrong == []

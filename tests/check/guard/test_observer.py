"""The rules can be broken, and say so."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from hybrid_kv.cache import manager
from hybrid_kv.cache.block_pool import BlockPool
from hybrid_kv.cache.manager import KVCacheManager
from hybrid_kv.cache.partial_blocks import PartialBlockManager
from hybrid_kv.cache.prefix import LocatedHit
from hybrid_kv.cache.request_blocks import PrefixHit, RequestBlocks
from hybrid_kv.cache.spec import MambaSpec, StateProgress
from hybrid_kv.check.guard.forced import FORCED, Draw
from hybrid_kv.check.guard.play import Differences, run_scenario
from hybrid_kv.check.guard.scenario import Disturbance, Scenario
from hybrid_kv.check.guard.waiting import count_preemptions
from hybrid_kv.engine import runner, step_inputs
from hybrid_kv.engine.llm import LLM
from hybrid_kv.engine.runner import ModelRunner
from hybrid_kv.engine.scheduler import Scheduler
from hybrid_kv.sampling import SamplingParams
from tests.support.scenarios import scenario


def wrong(result: Differences) -> str:
    assert len(result.wrong) == 1
    return str(result.wrong[0])


def with_one_more_block(allocate: Any) -> Any:
    return lambda self, name, known, new, *rest: allocate(self, name, known, new + 8, *rest)


def held_too_long(give_back: Any) -> Any:
    return lambda self, end: give_back(self, max(self.first, end - 1))


def one_less(planned: Any) -> Any:
    return lambda self, length: planned(self, length) - 1


def views(allocate: Any) -> Any:
    """Ids that change after they were handed out."""

    def view(self: BlockPool, count: int) -> Any:
        ids, end = allocate(self, count), self._head  # behind what was just taken
        return (
            ids
            if ids is None or len(ids) != count or end < count
            else self._ring[end - count : end]
        )

    return view


def shorter(find: Any) -> Any:
    return lambda *given: replace(hit := find(*given), num_tokens=max(0, hit.num_tokens - 8))


def eager(schedule: Any) -> Any:
    """Blocks are published before they are computed."""

    def publish(self: Scheduler) -> Any:
        items = schedule(self)
        for item in items:
            own, end = item.request, item.num_computed_tokens + item.num_tokens - item.num_drafts
            self.manager.cache_blocks(
                own.request_id,
                own.block_hashes,
                own.token_ids,
                StateProgress(end, end),
                item.is_decode,
            )
        return items

    return publish


def late(publish: Any) -> Any:
    return lambda self, name, hashes, tokens, known, *more: publish(
        self, name, hashes, tokens, StateProgress(known.computed - 1, known.flushed), *more
    )


def starving(schedule: Any) -> Any:
    def skip(self: Scheduler) -> Any:
        items = schedule(self)
        return items[:-1] if len(items) > 2 and not items[-1].overwrite else items

    return skip


def greedy(schedule: Any) -> Any:
    """A request starts in a step that another was preempted for."""

    def admit(self: Scheduler) -> Any:
        before = sum(request.num_preemptions for request in self.running)
        items = schedule(self)
        if (
            self.waiting
            and sum(one.num_preemptions for one in (*self.running, *self.waiting)) > before
        ):
            item = self._admit(self.waiting[0], 1, items)
            items += [item] if item else []
        return items

    return admit


def refreshing(find: Any) -> Any:
    """A prefix counts as used though its request did not get in."""

    def use(self: KVCacheManager, *given: Any) -> PrefixHit:
        hit = find(self, *given)
        logical_blocks = range(hit.num_tokens // self.config.groups[0].spec.block_size)
        blocks = [self.pool.lookup((0, hit.chains[0][block_idx])) for block_idx in logical_blocks]
        self.pool.refresh(
            np.array([block for block in blocks if block is not None], dtype=np.int32)
        )
        return hit

    return use


def narrow(start: Any) -> Any:
    """Rows of `max_model_len` tokens."""

    def init(self: ModelRunner, *given: Any) -> None:
        start(self, *given)
        rows, width = self.token_ids.shape
        self.token_ids.resize((rows, width - 1), refcheck=False)

    return init


def roomy(by: int) -> Any:
    """The scheduler sees room for another number of tokens."""
    return lambda room: lambda self, request: room(self, request) + by


KEPT: list[Any] = []
STATES = scenario("align", 3, "right", state_scheme="recompute")
FULL = scenario("attention", num_blocks=9)
EQUAL = replace(
    scenario("align", max_num_batched_tokens=64), prompts=[scenario("align").prompts[2]] * 6
)
# Three prompts that begin differently: nothing is shared, and step 3 is an odd one.
RESET = replace(
    scenario("all"),
    prompts=scenario("all").prompts[:3],
    waves=(3,),
    events=(Disturbance("reset", 3),),
)
LATE = FORCED["once_more_at_max_model_len"](Draw(0))
ENDS = FORCED["all_accepted, max_model_len_with_drafts"](Draw(0))
INSIDE = FORCED["hit_inside_block, hit_inside_first_block"](Draw(9))
SLEEP = replace(
    scenario("all", 2, "mixed", state_scheme="recompute"), events=(Disturbance("sleep", 3, 4),)
)


@pytest.mark.parametrize(
    ("owner", "name", "broken", "traffic", "said"),
    [
        (KVCacheManager, "allocate_slots", with_one_more_block, scenario("none"), "blocks-held"),
        (RequestBlocks, "give_back", held_too_long, STATES, "blocks-held"),
        (MambaSpec, "max_blocks_per_request", one_less, STATES, "are planned"),
        (BlockPool, "allocate", views, scenario("none"), "were handed out"),
        (
            KVCacheManager,
            "find_longest_cache_hit",
            shorter,
            scenario("attention"),
            "from the cache, which has",
        ),
        (Scheduler, "schedule", eager, scenario("attention"), "which others may read"),
        (
            KVCacheManager,
            "cache_blocks",
            late,
            scenario("attention", max_num_batched_tokens=8),
            "published-late",
        ),
        (
            KVCacheManager,
            "chunk_end",
            lambda _: lambda self, start, end, n, junction: end,
            scenario("align"),
            "end on one",
        ),
        (
            runner,
            "gained",
            lambda f: lambda *given: [tokens[:1] for tokens in f(*given)],
            scenario("none", 3, "right"),
            "step-tokens",
        ),
        (Scheduler, "schedule", starving, scenario("none"), "left out of a step"),
        (
            Scheduler,
            "schedule",
            greedy,
            scenario("none", num_blocks=10, max_num_batched_tokens=64),
            "started-anyway",
        ),
        (
            Scheduler,
            "_admit",
            lambda f: lambda self, *given: None if self.running else f(self, *given),
            scenario("none", max_num_batched_tokens=64),
            "left-waiting: request 1 waits with",
        ),
        (
            Scheduler,
            "_waits_for_prefix",
            lambda _: lambda *_: False,
            EQUAL,
            "did-not-wait: request 1 starts",
        ),
        (KVCacheManager, "find_longest_cache_hit", refreshing, FULL, "used-unseen: free blocks"),
        (
            LocatedHit,
            "copies",
            lambda f: lambda self: [copy._replace(target=copy.source) for copy in f(self)],
            replace(INSIDE, options=INSIDE.options | {"sanitize": False}),
            "copied-unheld: request ",
        ),
        (
            PartialBlockManager,
            "is_complete",
            lambda _: lambda self, request_id, _: request_id in self.pending,
            INSIDE,
            "published-early: request",
        ),
        (
            manager,
            "Refusal",
            lambda f: lambda name, room, keys: f(name, room, frozenset()),
            FORCED["hit_attention, full_pool"](Draw(0)),
            "left-waiting: request 2 waits with",
        ),
        (
            Scheduler,
            "preempt_all",
            lambda _: lambda _: None,
            replace(RESET, params=RESET.params[:3]),
            "3 requests run",
        ),
        (
            ModelRunner,
            "free_memory",
            lambda f: lambda self: (KEPT.extend(self.raw_buffers), f(self)),
            SLEEP,
            "sleepless: memory is kept",
        ),
        (
            LLM,
            "reset_prefix_cache",
            lambda _: lambda llm, reset_running_requests: llm.scheduler.preempt_all(),
            SLEEP,
            "hit-length",
        ),
        (
            ModelRunner,
            "__init__",
            narrow,
            LATE,
            "known-tokens: a proposer is shown 64 tokens of request",
        ),
        *(
            (Scheduler, "_room", roomy(by), late, "drafts-due: request")
            for by in (1, -1)
            for late in (LATE, ENDS)
        ),
        # The last token is never in flight.
        (
            Scheduler,
            "_room",
            lambda f: lambda *given: max(2, f(*given)),
            FORCED["one_step_late"](Draw(0)),
            "runs-again: request",
        ),
        # The drafts of a request are a quarter of its share.
        (
            Scheduler,
            "_next",
            lambda f: lambda *given: f(*given[:-1], given[-1] // 4),
            FORCED["one_token_left, first_decode_beside_chunk"](Draw(0)),
            "drafts-due: request 0 is to run",
        ),
        # What is no token is verified, too.
        (
            ModelRunner,
            "_usable",
            lambda _: lambda self, drafts: list(drafts),
            FORCED["strange_drafts"](Draw(0)),
            "drafts-due: request",
        ),
    ],
)
def test_a_rule(
    monkeypatch: pytest.MonkeyPatch, owner: Any, name: str, broken: Any, traffic: Any, said: str
) -> None:
    assert run_scenario(traffic).wrong == []
    monkeypatch.setattr(owner, name, broken(getattr(owner, name)))
    assert said in wrong(run_scenario(traffic))


def test_a_preemption_counts_though_another_request_takes_its_own_along() -> None:
    """Their sum over all requests stays the same."""
    gone, head, running = (
        SimpleNamespace(request_id=name, num_preemptions=n)
        for name, n in (("a", 1), ("b", 0), ("c", 0))
    )
    scheduler: Any = SimpleNamespace(running=[gone, running], waiting=[head])
    before = count_preemptions(scheduler)
    scheduler.running, head.num_preemptions = [running], 1
    assert before == {"a": 1, "c": 0, "b": 0}
    assert count_preemptions(scheduler) == {"c": 0, "b": 1}


def test_metrics_of_an_output_that_did_not_happen(monkeypatch: pytest.MonkeyPatch) -> None:
    assert run_scenario(deeper()).wrong == []
    output = LLM.output
    for lie in (
        # of one group alone
        lambda o: {"cached_tokens": max((o.cached_tokens, *o.hit.group_tokens))},
        lambda o: {"num_draft_tokens": o.num_draft_tokens + 1},
        lambda o: {"num_accepted_draft_tokens": o.num_draft_tokens},
        lambda o: {"num_preemptions": o.num_preemptions + 1},
    ):
        with monkeypatch.context() as patch:
            patch.setattr(
                LLM,
                "output",
                lambda *given, lie=lie: replace(found := output(*given), **lie(found)),
            )
            assert "metrics: request" in wrong(run_scenario(deeper()))


def deeper() -> Scenario:
    """Its K/V are cached beyond the last state."""
    found = scenario("align", 3, "mixed", max_num_batched_tokens=64)
    shared = found.prompts[2]
    prompts = [shared, [*shared[:20], 1, 2, 3], *found.prompts[2:]]
    return replace(found, prompts=prompts, waves=(1, 5))


def test_a_livelock(monkeypatch: pytest.MonkeyPatch) -> None:
    # Twenty tokens need two steps of sixteen, and the request is preempted after each first one.
    generate = LLM.generate

    def preempting(
        self: LLM, prompts: Any, params: Any, progress: bool, on_step: Callable[[LLM], None]
    ) -> Any:
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
        monkeypatch.setattr(
            step_inputs, "padded_size", lambda rows, sizes, size=size: max(rows, size)
        )
        assert "requests has" in wrong(run_scenario(padded))


def test_a_prompt_refused_without_need(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(KVCacheManager, "can_ever_fit", lambda self, num_tokens: num_tokens < 30)
    assert "never fit" in str(run_scenario(scenario("none")).wrong[0])


@pytest.mark.parametrize("events", [["sleep"], ["reset"], ["preempt", "reset"]])
def test_what_a_request_publishes_as_it_leaves_is_forgotten_too(events: list[str]) -> None:
    """Its ring's state after 8 tokens is written at preemption, just before all is forgotten."""
    options = {
        "max_model_len": 32,
        "device": "cpu",
        "enable_prefix_caching": True,
        "async_scheduling": True,
        "state_scheme": "recompute",
        "mamba_block_size": 4,
        "num_blocks": 400,
    }
    leaving = Scenario(
        0,
        "M",
        options,
        [[0]],
        [SamplingParams(max_tokens=10)],
        events=tuple(Disturbance(what, 9) for what in events),
    )
    assert run_scenario(leaving).wrong == []


@pytest.mark.parametrize("scheme", ["slots", "recompute"])
@pytest.mark.parametrize("mode", ["none", "align", "all"])
@pytest.mark.parametrize("layers", ["W*W", "T*M", "V*W"])
def test_layers_of_one_three_and_five_parts_keep_every_rule(
    layers: str, mode: str, scheme: str
) -> None:
    """A short convolution, a window and two states, three windows and two states."""
    found = scenario(mode, 3, "mixed", state_scheme=scheme, sanitize=True)
    assert run_scenario(replace(found, layers=layers)).wrong == []

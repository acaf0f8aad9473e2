"""The observer of a scenario: it checks blocks, hits, drafts and steps, and counts patterns.

The rules are re-implemented on purpose, from tokens and answers alone: a check that shares code
with what it checks shares its mistakes. A change of a rule changes both places, and the guard fails
if one is forgotten.

A mode that is not in `SAID_AGAIN` is held to what every mode must keep: right tokens, drafts and
progress, blocks that no other request may read, no more of them than planned, and no hit that mode
`all` would not have.
"""

from __future__ import annotations

from collections.abc import Sequence, Set
from typing import Any

import numpy as np
import torch
from torch.multiprocessing.reductions import StorageWeakRef

from hybrid_kv.attention.mamba import MambaMetadata
from hybrid_kv.attention.rollback import RollbackStep
from hybrid_kv.cache.block_pool import BlockIds
from hybrid_kv.cache.observe import BlockCopy
from hybrid_kv.cache.spec import KVCacheSpec, MambaSpec, window_of
from hybrid_kv.check.guard.blocks import BlockDraftRules
from hybrid_kv.check.guard.drafts import DraftRules
from hybrid_kv.check.guard.kept import KeptBlocks
from hybrid_kv.check.guard.patterns import Patterns
from hybrid_kv.check.guard.poison import StaleBlocks, poison, poison_null_block
from hybrid_kv.check.guard.published import PublishedPrefixes, recompute_of, states_behind
from hybrid_kv.check.guard.scenario import Cell, Scenario
from hybrid_kv.check.guard.step import Prefix, Ran, RuleError, Track, common_prefix, is_prefill
from hybrid_kv.check.guard.waiting import Waiting
from hybrid_kv.engine.llm import LLM, RequestOutput
from hybrid_kv.kernels.common.integers import cdiv
from hybrid_kv.kernels.recompute import RecomputeStep
from hybrid_kv.observe import EngineObserver
from hybrid_kv.request import Request, ScheduledRequest

# Modes whose rules are formulated here and in `guard.published`.
SAID_AGAIN = ("none", "align", "all")


class Observer(EngineObserver):
    """An observer of one engine that disturbs it, and raises `RuleError` at the first broken rule.

    Args:
        sequences: prompt and answer of each request, by number; stop tokens ignored.
        ends: how many tokens of them each request has in the end.
    """

    def __init__(
        self, scenario: Scenario, sequences: Sequence[list[int]], ends: Sequence[int]
    ) -> None:
        self.scenario = scenario
        # The scenario's, once all that it is meant to exercise has happened.
        self.cell: Cell | None = None
        self.aborted: dict[str, int] = {}  # how many tokens each had
        # Each step computes a token of the oldest request, and a request is preempted only for an
        # older one.
        tokens = sum(
            len(prompt) + p.max_tokens
            for prompt, p in zip(scenario.prompts, scenario.params, strict=True)
        )
        self._limit = 10 * tokens * max(1, 1, *(event.every for event in scenario.events))
        self._forced_preemptions = 0
        self._due: list[str] = []
        self._waited: list[str] = []
        requests = zip(sequences, scenario.prompts, ends, scenario.params, strict=True)
        self.tracks = [
            Track(sequence, len(prompt), end, p.cache_salt) for sequence, prompt, end, p in requests
        ]
        self._pending: list[list[Ran]] = []  # steps whose results the engine has not taken yet
        self.previous: list[Ran] = []
        self.patterns = Patterns(scenario, self.tracks)
        # Ids of allocations, and as they were then.
        self._handed_out: list[tuple[BlockIds, BlockIds]] = []
        self.seen = self.patterns.seen

    def watch(self, llm: LLM) -> None:
        """Look at every step of an engine from here on."""
        self._llm = llm
        self._stale = StaleBlocks(llm.runner.block_tables)
        # Of scheme `recompute` the first group with states is looked at.
        self._recomputing = next(iter(llm.runner.builders), None) if llm.runner.row_memory else None
        self.history: RecomputeStep | None = None
        self._kept = KeptBlocks(llm, self.tracks)
        llm.observers += [self._kept, self]
        self.published = PublishedPrefixes(llm)
        self.patterns.watch(llm, self.published.late)
        self._num_late = int(llm.config.async_scheduling)  # steps that may be in flight
        self._knows_mode = llm.config.cache.mamba_cache_mode in SAID_AGAIN
        self._exact_hits = llm.manager.enable_prefix_caching and self._knows_mode
        self._has_forgotten = False  # what running requests have published
        self._is_reset = False  # the device, and not the host
        self._junctions: set[Prefix] = set()
        self._planned = self._check_plan(llm)
        self._waiting = Waiting(llm, self._track, self.published, self._kept.device)
        blocks = None
        if llm.config.speculative.speculative_method == "dflash":
            blocks = BlockDraftRules(self.scenario, self._track, self.seen)
        self._drafts = DraftRules(llm, self._track, blocks)

    def _check_plan(self, llm: LLM) -> list[int]:
        """Return the most blocks of each group that a request is planned to hold."""
        longest = llm.config.scheduler.max_model_len
        is_async = llm.config.async_scheduling
        specs = [group.spec for group in llm.plan.config.groups]
        planned = [spec.max_blocks_per_request(longest) for spec in specs]
        due = [_most_blocks(spec, longest, is_async, _num_ahead(llm)) for spec in specs]
        if self._knows_mode and planned != due:
            raise RuleError(
                "blocks-planned", f"{planned} blocks are planned for a request; {due} are due"
            )
        in_flight = (1 + llm.config.speculative.num_speculative_tokens) * is_async
        rings = [recompute_of(spec) for spec in specs]
        uncertain = {ring.num_uncertain_tokens for ring in rings if ring is not None}
        if uncertain - {in_flight}:
            raise RuleError(
                "blocks-planned",
                f"{uncertain} tokens may be in flight behind what is known; {in_flight} are due",
            )
        return planned

    def __call__(self, llm: LLM) -> None:
        """Check the queue and the pool, and disturb the engine, before every step."""
        scheduler = llm.scheduler
        scheduler.check_integrity()
        self._kept.check()
        queue = [int(request.request_id) for request in (*scheduler.running, *scheduler.waiting)]
        if queue != sorted(queue):
            raise RuleError("queue-order", f"first come, first served is broken: {queue}")
        self._publish()
        self._check_progress()
        self._due += [event.what for event in self.scenario.events if event.is_due(llm.num_steps)]
        self._due = [kind for kind in self._due if not self._disturb(kind)]
        self._waiting.before_step()
        if llm.num_steps > self._limit:
            raise RuleError("livelock", f"no end after {self._limit} steps")

    def _disturb(self, kind: str) -> bool:
        """Disturb the engine; return False to try again before the next step."""
        disturb = {
            "preempt": self._preempt,
            "drop": self._drop,
            "evict": self._evict,
            "reset": self._reset,
            "lose": self._lose,
            "sleep": self._sleep,
        }.get(kind)
        return disturb() if disturb is not None else True

    def _preempt(self) -> bool:
        running = self._llm.scheduler.running
        if not running:
            return False
        request = running[-1]
        # A request that is alone and has gained nothing since its admission would never end.
        has_gained = len(request.output_token_ids) > self._track(request).known_before
        if len(running) == 1 and not has_gained:
            return False
        self.seen["preempted_while_speculating"] += bool(request.draft_token_ids)
        self._llm.scheduler.preempt(request)
        self._forced_preemptions += 1
        return True

    def _drop(self) -> bool:
        known = [*self._llm.scheduler.running, *self._llm.scheduler.waiting]
        if known:
            request = known[len(known) // 2]
            self.aborted.setdefault(request.request_id, len(request.output_token_ids))
            self.seen["abort_waiting"] += request.row < 0
            self._llm.abort(request.request_id)
        return True

    def _evict(self) -> bool:
        pool = self._llm.manager.pool
        idle = int(np.count_nonzero(pool.is_idle(np.arange(pool.num_blocks, dtype=np.int32))))
        # Plain blocks are handed out first.
        taken = pool.allocate(pool.num_free_blocks - idle + 1) if idle else None
        if taken is not None:
            self._kept.device.take(taken.tolist())
            pool.free(taken)
        return True

    def _reset(self) -> bool:
        llm = self._llm
        running = llm.scheduler.running
        if (llm.manager.pool.ref_count > 1).any():
            # The engine's own integrity check takes a shared block without a key for a mistake.
            return False
        self.seen["reset"] += bool(running)
        starts_again = llm.num_steps % 2 == 1
        llm.reset_prefix_cache(reset_running_requests=starts_again)
        if starts_again and running:
            raise RuleError(
                "reset-left-running", f"{len(running)} requests run on behind a reset of all"
            )
        self._forget()
        return True

    def _lose(self) -> bool:
        self._kept.loses = True
        return True

    def _sleep(self) -> bool:
        llm = self._llm
        running = llm.scheduler.running
        self.seen["sleep"] += bool(running)
        memory = [StorageWeakRef(buffer.untyped_storage()) for buffer in llm.runner.raw_buffers]
        llm.sleep()
        if not all(buffer.expired() for buffer in memory) or running or llm.has_work:
            raise RuleError(
                "sleepless", f"memory is kept in sleep, or {len(running)} requests run on"
            )
        llm.wake_up()
        poison(llm)
        self._forget()
        return True

    def _forget(self) -> None:
        """Forget what the device had cached; what an offload tier has of it is not known here.

        A request that left its row before had its last state published before.
        """
        self._end({request.request_id for request in self._llm.scheduler.running})
        self._has_forgotten = True
        if self._llm.manager.offload is None:
            self.published.clear()
        self._is_reset |= self._llm.manager.offload is not None

    def _end(self, running: Set[str]) -> None:
        """End all requests but these: every other one has released its blocks."""
        for request_id in {str(number) for number in range(len(self.tracks))} - running:
            track = self.tracks[int(request_id)]
            self.published.end(track, track.computed)
            track.base = track.computed = track.reach = 0

    def _publish(self) -> None:
        """Publish what the engine has published: not the last steps, which are still in flight."""
        end = max(0, len(self._pending) - self._num_late)
        for step in self._pending[end:]:
            if any(ran.item.request.in_flight is not None for ran in step):
                break
            end += 1
        done = self._pending[:end]
        self._pending = self._pending[end:]
        for step in done:
            for ran in step:
                request = ran.item.request
                ended = ran.track.known >= ran.track.end
                ran.track.known = max(ran.track.known, ran.end + bool(ran.tokens))
                if request.request_id in self.aborted:
                    self._exact_hits = False  # It may have ended before or after it was published.
                elif ended or ran.item.is_stale:
                    continue
                self.published.add(ran)
                self._check_published(ran)
                ran.track.computed = ran.end

    def _check_published(self, ran: Ran) -> None:
        """Check that K/V of a block can be found once the step that completed it is over.

        States may come later.
        """
        if (
            not self._llm.manager.enable_prefix_caching
            or ran.item.request.row < 0
            or self._has_forgotten
        ):
            return
        for group, spec in enumerate(group.spec for group in self._llm.plan.config.groups):
            first = ran.item.num_computed_tokens // spec.block_size
            last = ran.end // spec.block_size
            name = group, ran.track.prefix(last * spec.block_size)
            if (
                not isinstance(spec, MambaSpec)
                and first < last
                and self.published.keeps(ran.track, spec, last * spec.block_size)
                and name not in self._kept.device
            ):
                raise RuleError(
                    "published-late",
                    f"request {ran.item.request.request_id}: {ran.end} tokens are in the cache, "
                    f"and group {group}'s block of {last * spec.block_size} cannot be found",
                )

    def on_allocate(self, request_id: str, logical_blocks: Sequence[BlockIds]) -> None:
        """Keep the ids that are handed out: they are not reused."""
        self._handed_out += ((ids, ids.copy()) for ids in logical_blocks)

    def on_free(self, request_id: str, ids: BlockIds, ended: bool = False) -> None:
        """Note that a request ends; a preemption, or logical blocks given back, need nothing."""
        if ended:
            self._waiting.on_end()

    def on_copy_blocks(self, request_id: str, num_tokens: int, copies: Sequence[BlockCopy]) -> None:
        """Note the blocks that a hit which ends inside of them is copied from."""
        self._waiting.on_copy([copy.source for copy in copies])

    def on_flush(self, request: Request, group: int, step: RollbackStep) -> None:
        """Count a state that is written because its request gives up its row."""
        if (
            group == self._recomputing
            and step.history is not None
            and int(step.history.n_flush.max())
        ):
            aborted = request.request_id in self.aborted
            ended = "finish" if request.is_finished else "preemption"
            self.seen[f"flushed_at_{'abort' if aborted else ended}"] += 1

    def on_schedule(self, scheduled: Sequence[ScheduledRequest]) -> None:
        """Check what a step will run, and disturb it."""
        llm = self._llm
        again = {item.request.request_id for item in scheduled if item.overwrite}
        self._end({request.request_id for request in llm.scheduler.running} - again)
        self._check_schedule(scheduled)
        self._drafts.on_schedule(scheduled, self._waiting.has_preempted())
        if self._knows_mode:
            self._waiting.check(scheduled, self._exact_hits and not self._kept.has_lost)
        self.seen["waiting"] += bool(llm.scheduler.waiting)
        for event in self.scenario.events:
            if event.what == "abort" and event.is_due(llm.num_steps):
                victim = scheduled[len(scheduled) // 2].request
                self.aborted.setdefault(victim.request_id, len(victim.output_token_ids))
                track = self._track(victim)
                self.patterns.aborted_prompts.add(track.prefix(track.prompt))
                self.seen["abort_in_flight"] += 1
                llm.abort(victim.request_id)
        poison_null_block(llm)

    def on_prepare(self, batch: Sequence[ScheduledRequest]) -> None:
        """Make logical blocks that the step does not write unreadable."""
        self._drafts.on_prepare(batch)
        self._stale.poison(batch)

    def on_step(
        self,
        batch: Sequence[ScheduledRequest],
        input_ids: torch.Tensor,
        positions: torch.Tensor,
        metadata: dict[str, Any],
    ) -> None:
        """Check the padding, and keep what `on_commit` needs."""
        self._check_padding(batch, metadata)
        self._batch = batch
        self.history = None
        if self._recomputing is not None:
            self.history = metadata[
                self._llm.runner.groups[self._recomputing].layer_names[0]
            ].rollback.history

    def on_copy(self, *copy: Any) -> None:
        """Note that a verify step may have ended on a boundary."""
        self.patterns.copies = True

    def on_propose(self, *proposal: Any) -> None:
        """Keep what the next step may verify."""
        self._drafts.on_propose(*proposal)

    def on_commit(self, tokens: Sequence[Sequence[int]]) -> None:
        """Check what a step has run, and count its patterns."""
        step = [
            Ran(item, self._track(item.request), list(new))
            for item, new in zip(self._batch, tokens, strict=True)
        ]
        self._check_tokens(step)
        self._check_blocks(step)
        self.patterns.count_step(step, self.history)
        for ran in step:
            item = ran.item
            track = ran.track
            track.reach = item.num_computed_tokens + item.num_tokens
            track.previous_drafts = item.num_drafts if ran.tokens else -1
            track.accepted = max(0, len(ran.tokens) - 1)
            room = track.end - track.reach + item.num_drafts
            if ran.tokens and room > 0:
                track.drafts += item.num_drafts
                track.num_accepted += min(track.accepted, room)
        self.previous = step
        self._pending.append(step)

    def _track(self, request: Request) -> Track:
        return self.tracks[int(request.request_id)]

    def _check_progress(self) -> None:
        """Check that no draft and no chunk starves a running request.

        Each was in the last step, or could not be. With asynchronous scheduling the youngest may
        wait a step, to ask a full pool for what it really needs.
        """
        ran = {r.item.request.request_id for r in self.previous}
        running = self._llm.scheduler.running
        left = [r.request_id for r in running if r.request_id not in ran and r.in_flight is None]
        youngest = [r.request_id for r in running[-1:]]
        waits = self._llm.config.async_scheduling and left == youngest and left != self._waited
        self._waited = left if waits else []
        if left and self.previous and not waits:
            raise RuleError("left-out", f"running requests {left} were left out of a step")

    def _check_schedule(self, scheduled: Sequence[ScheduledRequest]) -> None:
        """Check budget, hits and chunk ends of a step that is about to run."""
        llm = self._llm
        budget = llm.config.scheduler.max_num_batched_tokens
        total = sum(item.num_tokens for item in scheduled)
        if total > budget:
            raise RuleError(
                "over-budget", f"a step of {total} tokens is over the budget of {budget}"
            )
        was_lost = self._is_reset or self._kept.device.num_lost > 0
        self._exact_hits &= not was_lost or self._kept.has_all
        for item in scheduled:
            track = self._track(item.request)
            if item.overwrite:
                self._check_hit(item, was_lost)
            if llm.config.cache.mamba_cache_mode == "align" and is_prefill(item):
                self._check_chunk(item)
            for group, spec in enumerate(group.spec for group in llm.plan.config.groups):
                self._account(item.request, track, item, group, spec)

    def _check_hit(self, item: ScheduledRequest, was_lost: bool) -> None:
        """Check how much an admitted request takes from the cache, and start its track anew.

        Args:
            was_lost: the device has lost a block that was published.
        """
        llm = self._llm
        request = item.request
        track = self._track(request)
        begin = item.num_computed_tokens
        track.cached = track.cached if track.admissions else begin
        track.admissions += 1
        track.hit = begin
        # Only now: what a preempted request left in the same step was kept by its junction before.
        track.junction = self._kept.junctions[request.request_id]
        track.known_before = len(request.output_token_ids)
        track.base = track.computed = begin
        track.most = [0] * len(llm.plan.config.groups)
        track.logical_blocks = [set() for _ in track.most]
        reads = llm.manager.enable_prefix_caching and request.params.reads_prefix_cache
        limit = self.published.hit(track, request.num_tokens) if reads else 0
        kept = self._kept.hits[request.request_id]
        is_exact = self._exact_hits and not self._kept.has_lost
        self.seen["lost_hit"] += self._kept.has_lost
        if begin != kept or begin > limit or (is_exact and begin < limit):
            raise RuleError(
                "hit-length",
                f"request {request.request_id} takes {begin} of {request.num_tokens} tokens from "
                f"the cache, which has {limit if begin == kept else kept} of them",
            )
        self.seen["exact_hit"] += is_exact and begin > 0
        self.seen["exact_hit_of_host"] += is_exact and begin > 0 and was_lost
        self.seen["junction"] += track.junction > 0
        inside = begin % self.published.unit > 0
        self.seen["hit_inside_block"] += inside
        self.seen["hit_inside_first_block"] += inside and begin < self.published.unit
        self.seen["sparse_hit"] += self.published.is_sparse and begin > 0
        self.seen["junction_hit"] += track.prefix(begin) in self._junctions
        if track.junction:
            self._junctions.add(track.prefix(track.junction))
        self.seen["hit_behind_losses"] += begin > 0 and not self._kept.has_all and was_lost

    def _check_chunk(self, item: ScheduledRequest) -> None:
        """Check that a chunk which passes a boundary ends on one, in mode align."""
        size = self._llm.plan.sizes.mamba_block_size
        if size is None:
            return
        request = item.request
        begin = item.num_computed_tokens
        end = item.num_computed_tokens + item.num_tokens - item.num_drafts
        unit = self.published.unit
        last = (request.num_tokens - 1) // unit * unit  # what these tokens can use if repeated
        passes = begin // size < min(end, last) // size
        junction = self._track(request).junction
        if begin < last < end or begin < junction < end or (passes and end % size):
            raise RuleError(
                "chunk-end",
                f"request {request.request_id}: a chunk of tokens {begin} to "
                f"{end} of {request.num_tokens} passes a boundary of {size} "
                f"tokens and does not end on one, the last one being {last}, the junction "
                f"{junction}",
            )

    def _account(
        self, request: Request, track: Track, item: ScheduledRequest, group: int, spec: KVCacheSpec
    ) -> None:
        """Check that a running request holds exactly the blocks of its tokens and drafts.

        And no more than the plan pays for.
        """
        end = item.num_computed_tokens + item.num_tokens
        if item.awaits_drafts and request.in_flight is not None:
            # Certain is only what the step in flight computes without its drafts.
            end = min(end + request.in_flight.num_drafts, self._llm.config.scheduler.max_model_len)
        if isinstance(spec, MambaSpec):
            due = self._states_due(request, track, item, group, spec, end)
        else:
            ahead = min(
                end + self._llm.manager.num_lookahead_tokens,
                self._llm.config.scheduler.max_model_len,
            )
            track.most[group] = max(track.most[group], cdiv(ahead, spec.block_size))
            due = track.most[group] - self._given_back(track, item, spec)
        ids = self._llm.manager.block_ids(request.request_id)[group]
        blocks = f"request {request.request_id} holds {len(ids)} blocks of {type(spec).__name__}"
        if len(ids) != due and (self._knows_mode or not isinstance(spec, MambaSpec)):
            raise RuleError(
                "blocks-held",
                f"{blocks} in a step of {item.num_tokens} tokens after "
                f"{item.num_computed_tokens}; {due} are due",
            )
        most = self._planned[group]
        if len(ids) > most:
            raise RuleError("blocks-planned", f"{blocks}, {most} are planned")
        self.patterns.count_blocks(request.request_id, ids.tolist())

    def _given_back(self, track: Track, item: ScheduledRequest, spec: KVCacheSpec) -> int:
        """Return how many blocks no query from this step on sees.

        A block that a step in flight completes is kept until then.
        """
        window = window_of(spec)
        if window is None:
            return 0
        begin = item.num_computed_tokens
        last = begin - window  # the last token that this step's first query does not see
        due = max(0, last + 1) // spec.block_size
        if self._llm.manager.enable_prefix_caching:
            due = min(due, (begin if item.overwrite else track.computed) // spec.block_size)
        return due

    def _states_due(
        self,
        request: Request,
        track: Track,
        item: ScheduledRequest,
        group: int,
        spec: MambaSpec,
        end: int,
    ) -> int:
        """Return how many state slots a request holds, and note its logical blocks.

        Args:
            end: tokens that the step reaches for certain.
        """
        drafts = spec.num_speculative_blocks
        if spec.mamba_cache_mode == "none":
            return 1 + drafts
        before = track.most[group]
        is_decode = not is_prefill(item)
        track.most[group] = max(before, cdiv(end, spec.block_size) + drafts * is_decode)
        if spec.mamba_cache_mode != "align":
            return track.most[group] - max(0, track.hit // spec.block_size - 1)
        blocks = track.logical_blocks[group]
        if item.overwrite:
            before = cdiv(track.hit, spec.block_size)
            blocks |= {before - 1} & set(range(before))
        else:
            flight = request.in_flight
            is_settled = flight is None or not is_prefill(flight)
            reads_base = recompute_of(spec) is not None and is_settled
            used = track.base if reads_base else item.num_computed_tokens
            blocks -= set(range(max(0, used - 1) // spec.block_size))
        # A chunk leaves a state where it ends, and none where it only passes.
        first = before if is_decode else max(before, track.most[group] - 1)
        blocks |= set(range(first, track.most[group]))
        if len(blocks) > 1 + states_behind(spec, self._llm.config.async_scheduling) + drafts:
            raise RuleError(
                "states-due",
                f"request {request.request_id} is due {len(blocks)} states in mode align",
            )
        return len(blocks)

    def _check_padding(self, batch: Sequence[ScheduledRequest], metadata: dict[str, Any]) -> None:
        """Check that a step of decodes has as many rows as the next captured size.

        Each other step has its requests' rows.
        """
        config = self._llm.config
        due = len(batch)
        if not any(map(is_prefill, batch)):
            sizes = [
                size
                for size in config.captured_batch_sizes
                if due <= size <= config.scheduler.max_num_seqs
            ]
            due = min(sizes, default=due)
        num_tokens = sum(item.num_tokens for item in batch)
        for group in self._llm.runner.groups:
            built = metadata[group.layer_names[0]]
            is_ssm = isinstance(built, MambaMetadata)
            rows = (
                len(built.window_indices)
                if is_ssm
                else len(batch) + len(built.positions) - num_tokens
            )
            if rows != due:
                raise RuleError(
                    "padding",
                    f"a step of {len(batch)} requests has {rows} "
                    f"rows in group {group.group_id}; {due} are due",
                )

    def _check_tokens(self, step: Sequence[Ran]) -> None:
        """Check that right drafts are accepted, all and only those, and that the answer goes on."""
        for ran in step:
            item = ran.item
            track = ran.track
            new = ran.tokens
            first = item.num_computed_tokens + item.num_tokens - item.num_drafts
            rest = track.sequence[first:]
            if not new or not rest:
                continue  # With asynchronous scheduling a request may run once more after its end.
            drafts = item.drafts or ()
            right = common_prefix(drafts, rest)
            if len(rest) > right and new != rest[: right + 1]:
                raise RuleError(
                    "step-tokens",
                    f"request {item.request.request_id} gets {new} after {first} "
                    f"tokens with drafts {list(drafts)}; {rest[: right + 1]} are due",
                )

    def _check_blocks(self, step: Sequence[Ran]) -> None:
        """Check that no block that a step writes can be found by others or has another owner."""
        llm = self._llm
        pool = llm.manager.pool
        for group in llm.runner.groups:
            table = llm.runner.block_tables.input_tables[group.group_id].numpy()
            size = group.spec.block_size
            spec = group.spec
            for row, ran in enumerate(step):
                begin = ran.item.num_computed_tokens
                last = ran.item.num_computed_tokens + ran.item.num_tokens - 1
                if not isinstance(spec, MambaSpec):
                    split = size // group.kernel_block_size
                    blocks = (
                        table[row, begin // size * split : last // size * split + 1 : split]
                        // split
                    )
                else:
                    recomputes = recompute_of(spec) is not None
                    states = 1 if ran.is_prefill or recomputes else ran.item.num_tokens
                    passes = spec.mamba_cache_mode == "all" and (ran.is_prefill or not recomputes)
                    blocks = table[row, (begin if passes else last) // size : last // size + states]
                    if spec.mamba_cache_mode == "none":
                        blocks = table[row, :states]
                if (pool.ref_count[blocks] != 1).any() or any(
                    pool.key_of(block) for block in blocks.tolist()
                ):
                    raise RuleError(
                        "write-findable",
                        f"request {ran.item.request.request_id} writes blocks "
                        f"{blocks.tolist()} of group {group.group_id}, which others may read",
                    )

    def never_fits(self, llm: LLM, number: int) -> bool:
        """Return whether a request needs more blocks than there are even when it is alone."""
        scenario = self.scenario
        longest = len(scenario.prompts[number]) + scenario.params[number].max_tokens
        # The last token is never cached.
        tokens = min(llm.config.scheduler.max_model_len, longest) - 1
        due = sum(
            _most_blocks(group.spec, tokens, llm.config.async_scheduling, _num_ahead(llm))
            for group in llm.plan.config.groups
        )
        if self.published.match_unit is not None:
            due += 2 * len(llm.plan.config.groups)
        return due > llm.manager.pool.num_blocks - 1

    def _check_metrics(self, outputs: Sequence[RequestOutput]) -> None:
        """Check what a user reads of a request against what the steps ran."""
        for track, output in zip(self.tracks, outputs, strict=True):
            if (
                output.finish_reason == "abort"
                and len(output.token_ids) != self.aborted[output.request_id]
            ):
                raise RuleError(
                    "abort-tokens",
                    f"request {output.request_id} had {self.aborted[output.request_id]} "
                    f"tokens when it was aborted, and ends with {len(output.token_ids)}",
                )
            if output.finish_reason in ("abort", "error"):
                continue  # Of its last step it may or may not have heard.
            reported = (
                output.cached_tokens,
                output.num_draft_tokens,
                output.num_accepted_draft_tokens,
            )
            due = track.cached, track.drafts, track.num_accepted
            # Where steps are known late its last one may end while it waits to start again.
            starts = output.num_preemptions + 1 - track.admissions
            if reported != due or starts not in (0, self._num_late):
                raise RuleError(
                    "metrics",
                    f"request {output.request_id} says (cached tokens, drafts, "
                    f"accepted) {reported}, preempted {output.num_preemptions} "
                    f"times; {due} ran, in {track.admissions} admissions",
                )

    def finish(self, llm: LLM, outputs: Sequence[RequestOutput]) -> None:
        """Check and count what only the end shows."""
        llm.scheduler.check_integrity()
        self._kept.check()
        for ids, before in self._handed_out:
            if not np.array_equal(ids, before):
                raise RuleError(
                    "ids-stay", f"ids {before.tolist()} were handed out and are {ids.tolist()} now"
                )
        self._check_metrics(outputs)
        self.seen["strange_drafts"] += self._drafts.num_strange
        self.seen["drafting_begins"] += self._drafts.num_begun
        self.patterns.count_end()
        self.patterns.count_outputs(outputs)
        cell = self.scenario.cell
        happened = {
            "none": True,
            "ngram": self.seen["rejected_draft"],
            "right": self.seen["accepted_draft"],
            "wrong": self.seen["rejected_draft"],
            "mixed": self.seen["accepted_draft"] and self.seen["rejected_draft"],
            "boundary": self.seen["accepted_draft"],
        }
        if (
            cell
            and happened[cell["drafts"]]
            and (cell["preemption"] == "unforced" or self._forced_preemptions)
            and (cell["budget"] == "large" or self.seen["chunked_prefill"])
        ):
            self.cell = cell


def _num_ahead(llm: LLM) -> int:
    """Return how many tokens may be scheduled or written after a request's computed ones."""
    steps = 2 if llm.config.async_scheduling else 1
    return steps * llm.config.scheduler.max_num_batched_tokens + llm.manager.num_lookahead_tokens


def _most_blocks(spec: KVCacheSpec, num_tokens: int, is_async: bool, num_ahead: int) -> int:
    """Return the most blocks of a group that a request holds until it has so many tokens.

    Args:
        num_ahead: tokens that may be scheduled after those that are known to be computed.
    """
    logical_blocks = cdiv(num_tokens, spec.block_size)
    window = window_of(spec)
    if window is not None:
        # From anywhere in a block on: what its first query sees, and the steps that may be in
        # flight.
        span = window - 1 + num_ahead
        return min(logical_blocks, 1 + cdiv(span - 1, spec.block_size))
    if not isinstance(spec, MambaSpec):
        return logical_blocks
    held = {
        "none": 1,
        "align": min(1 + states_behind(spec, is_async), logical_blocks),
        "all": logical_blocks,
    }
    return (
        held.get(spec.mamba_cache_mode, spec.mode.held_at_most(logical_blocks, 1))
        + spec.num_speculative_blocks
    )

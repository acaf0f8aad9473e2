"""What happens in a scenario: which patterns, and whether blocks, hits, drafts and steps are what they must be.

The rules are re-implemented on purpose, from tokens and answers alone: a check that shares code with what it checks
shares its mistakes. A change of a rule changes both places, and the guard fails if one is forgotten.

A mode that is not in `SAID_AGAIN` is held to what every mode must keep: right tokens, drafts and progress, blocks that
no other request may read, no more of them than planned, and no hit that mode `all` would not have.
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
from hybrid_kv.cache.spec import KVCacheSpec, MambaSpec, window_of
from hybrid_kv.check.guard.drafts import Drafts
from hybrid_kv.check.guard.kept import Kept
from hybrid_kv.check.guard.patterns import Patterns
from hybrid_kv.check.guard.poison import StaleBlocks, poison, poison_null_block
from hybrid_kv.check.guard.published import Published, recompute_of, states_behind
from hybrid_kv.check.guard.scenario import Cell, Scenario
from hybrid_kv.check.guard.step import Ran, RuleError, Track, common_prefix, is_prefill
from hybrid_kv.check.guard.waiting import Waiting
from hybrid_kv.engine.llm import LLM, RequestOutput
from hybrid_kv.kernels.common.integers import cdiv
from hybrid_kv.kernels.recompute import RecomputeStep
from hybrid_kv.observe import EngineObserver
from hybrid_kv.request import Request, ScheduledRequest

SAID_AGAIN = (
    "none",
    "align",
    "all",
)  # modes whose rules are formulated here and in `guard.published`


class Observer(EngineObserver):
    """Watches one engine through a scenario, disturbs it, and raises `RuleError` at the first broken rule.

    Args:
        sequences: prompt and answer of each request, by number; stop tokens ignored.
        ends: how many tokens of them each request has in the end.
    """

    def __init__(
        self, scenario: Scenario, sequences: Sequence[list[int]], ends: Sequence[int]
    ) -> None:
        self.scenario = scenario
        self.cell: Cell | None = (
            None  # of the scenario, once all that it is meant to exercise has happened
        )
        self.aborted: dict[str, int] = {}  # how many tokens each had
        # Each step computes a token of the oldest request, and a request is preempted only for an older one.
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
        self._handed_out: list[
            tuple[BlockIds, BlockIds]
        ] = []  # ids of allocations, and as they were then
        self.seen = self.patterns.seen

    def watch(self, llm: LLM) -> None:
        """Look at every step of an engine from here on."""
        self._llm = llm
        self._stale = StaleBlocks(llm.runner.block_tables)
        # Of scheme `recompute` the first group with states is looked at.
        self._recomputing = next(iter(llm.runner.builders), None) if llm.runner.row_memory else None
        self.history: RecomputeStep | None = None
        self._kept = Kept(llm, self.tracks)
        llm.observers += [self._kept, self]
        self.published = Published(llm)
        self.patterns.watch(llm, self.published.late)
        self._num_late = int(llm.config.async_scheduling)  # steps that may be in flight
        self._knows_mode = llm.config.cache.mamba_cache_mode in SAID_AGAIN
        self._exact_hits = llm.manager.enable_prefix_caching and self._knows_mode
        self._has_forgotten = False  # what running requests have published
        self._is_reset = False  # the device, and not the host
        self._planned = self._check_plan(llm)
        self._waiting = Waiting(llm, self._track, self.published, self._kept.device)
        self._drafts = Drafts(llm, self._track)

    def _check_plan(self, llm: LLM) -> list[int]:
        """The blocks of each group that a request is planned to hold at most."""
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
        found = {
            history.num_uncertain_tokens
            for spec in specs
            if (history := recompute_of(spec)) is not None
        }
        if found - {in_flight}:
            raise RuleError(
                "blocks-planned",
                f"{found} tokens may be in flight behind what is known; {in_flight} are due",
            )
        return planned

    def __call__(self, llm: LLM) -> None:
        """Before every step."""
        scheduler = llm.scheduler
        scheduler.check_integrity()
        self._kept.check()
        queue = [int(request.request_id) for request in (*scheduler.running, *scheduler.waiting)]
        if queue != sorted(queue):
            raise RuleError("queue-order", f"first come, first served is broken: {queue}")
        self._publish()
        self._check_progress()
        self._due += [event.what for event in self.scenario.events if event.is_due(llm.num_steps)]
        self._due = [what for what in self._due if not self._disturb(what)]
        self._waiting.before_step()
        if llm.num_steps > self._limit:
            raise RuleError("livelock", f"no end after {self._limit} steps")

    def _disturb(self, what: str) -> bool:
        """Whether it could be done: if not, it is tried again before the next step."""
        llm = self._llm
        running = self._llm.scheduler.running
        if what == "preempt":
            if not running:
                return False
            request = running[-1]
            # A request that is alone and has gained nothing since its admission would never end.
            if (
                len(running) == 1
                and len(request.output_token_ids) <= self._track(request).known_before
            ):
                return False
            self.seen["preempted_while_speculating"] += bool(request.draft_token_ids)
            llm.scheduler.preempt(request)
            self._forced_preemptions += 1
        elif what == "drop" and (known := [*running, *llm.scheduler.waiting]):
            request = known[len(known) // 2]
            self.aborted.setdefault(request.request_id, len(request.output_token_ids))
            self.seen["abort_waiting"] += request.row < 0
            llm.abort(request.request_id)
        elif what == "evict":
            pool = llm.manager.pool
            idle = int(np.count_nonzero(pool.is_idle(np.arange(pool.num_blocks, dtype=np.int32))))
            # Plain blocks are handed out first.
            taken = pool.allocate(pool.num_free_blocks - idle + 1) if idle else None
            if taken is not None:
                self._kept.device.take(taken.tolist())
                pool.free(taken)
        elif what == "reset":
            if (llm.manager.pool.ref_count > 1).any():
                return False  # The engine's own integrity check takes a shared block without a key for a mistake.
            self.seen["reset"] += bool(running)
            starts_again = llm.num_steps % 2 == 1
            llm.reset_prefix_cache(reset_running_requests=starts_again)
            if starts_again and running:
                raise RuleError(
                    "reset-left-running", f"{len(running)} requests run on behind a reset of all"
                )
            self._forget()
        elif what == "lose":
            self._kept.loses = True
        elif what == "sleep":
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
        """The device has forgotten what it cached; what an offload tier has of it is not known here.

        Who left its row before that had its last state published before that.
        """
        self._end({request.request_id for request in self._llm.scheduler.running})
        self._has_forgotten = True
        if self._llm.manager.offload is None:
            self.published.clear()
        self._is_reset |= self._llm.manager.offload is not None

    def _end(self, running: Set[str]) -> None:
        """Who is not among these has given up its blocks."""
        for request_id in {str(number) for number in range(len(self.tracks))} - running:
            track = self.tracks[int(request_id)]
            self.published.end(track, track.computed)
            track.base = track.computed = track.reach = 0

    def _publish(self) -> None:
        """Take over what the engine has taken over: not those of the last steps that are still in flight."""
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
        """K/V of a block can be found once the step that has completed it is over; states may come later."""
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
            if not isinstance(spec, MambaSpec) and first < last and name not in self._kept.device:
                raise RuleError(
                    "published-late",
                    f"request {ran.item.request.request_id}: {ran.end} tokens are in the cache, and group {group}'s "
                    f"block of {last * spec.block_size} cannot be found",
                )

    def on_allocate(self, request_id: str, logical_blocks: Sequence[BlockIds]) -> None:
        """Ids that are handed out are not reused."""
        self._handed_out += ((ids, ids.copy()) for ids in logical_blocks)

    def on_free(self, request_id: str, ids: BlockIds, ended: bool = False) -> None:
        """A request ends or is preempted, or logical blocks are given back."""
        if ended:
            self._waiting.on_end()

    def on_flush(self, request: Request, group: int, step: RollbackStep) -> None:
        """A state is written because its request gives up its row."""
        if (
            group == self._recomputing
            and step.history is not None
            and int(step.history.n_flush.max())
        ):
            aborted = request.request_id in self.aborted
            self.seen[
                f"flushed_at_{'abort' if aborted else 'finish' if request.is_finished else 'preemption'}"
            ] += 1

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
        """Logical blocks that the step does not write must not be read."""
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
        """A verify step may have ended on a boundary."""
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
            if ran.tokens and (room := track.end - track.reach + item.num_drafts) > 0:
                track.drafts += item.num_drafts
                track.num_accepted += min(track.accepted, room)
        self.previous = step
        self._pending.append(step)

    def _track(self, request: Request) -> Track:
        return self.tracks[int(request.request_id)]

    def _check_progress(self) -> None:
        """No draft and no chunk may starve a running request: each was in the last step, or could not be.

        With asynchronous scheduling the youngest may wait a step, to ask a full pool for what it really needs.
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
        """Budget, hits and chunk ends of a step that is about to run."""
        llm = self._llm
        budget = llm.config.scheduler.max_num_batched_tokens
        if (total := sum(item.num_tokens for item in scheduled)) > budget:
            raise RuleError(
                "over-budget", f"a step of {total} tokens is over the budget of {budget}"
            )
        was_lost = self._is_reset or self._kept.device.num_lost > 0
        self._exact_hits &= not was_lost or self._kept.has_all
        for item in scheduled:
            track = self._track(item.request)
            request = item.request
            begin = item.num_computed_tokens
            end = item.num_computed_tokens + item.num_tokens - item.num_drafts
            if item.overwrite:
                track.cached = track.cached if track.admissions else begin
                track.admissions += 1
                track.hit = begin
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
                        f"request {request.request_id} takes {begin} of {request.num_tokens} tokens from the cache, "
                        f"which has {limit if begin == kept else kept} of them",
                    )
                self.seen["exact_hit"] += is_exact and begin > 0
                self.seen["exact_hit_of_host"] += is_exact and begin > 0 and was_lost
                self.seen["hit_behind_losses"] += begin > 0 and not self._kept.has_all and was_lost
            size = llm.plan.sizes.mamba_block_size
            if (
                size is not None
                and llm.config.cache.mamba_cache_mode == "align"
                and is_prefill(item)
            ):
                unit = self.published.unit
                last = (
                    (request.num_tokens - 1) // unit * unit
                )  # what a repetition of these tokens can use
                passes = begin // size < min(end, last) // size
                if begin < last < end or (passes and end % size):
                    raise RuleError(
                        "chunk-end",
                        f"request {request.request_id}: a chunk of tokens {begin} to {end} of {request.num_tokens} "
                        f"passes a boundary of {size} tokens and does not end on one, the last one being {last}",
                    )
            for group, spec in enumerate(group.spec for group in llm.plan.config.groups):
                self._account(request, track, item, group, spec)

    def _account(
        self, request: Request, track: Track, item: ScheduledRequest, group: int, spec: KVCacheSpec
    ) -> None:
        """A running request holds exactly the blocks of its tokens and drafts, and no more than the plan pays for."""
        n = item.num_computed_tokens
        end = item.num_computed_tokens + item.num_tokens
        size = spec.block_size
        if item.awaits_drafts and request.in_flight is not None:
            # Certain is only what the step in flight computes without its drafts.
            end = min(end + request.in_flight.num_drafts, self._llm.config.scheduler.max_model_len)
        skipped = 0
        if isinstance(spec, MambaSpec):
            drafts = spec.num_speculative_blocks
            is_decode = not is_prefill(item)
            if spec.mamba_cache_mode == "none":
                due = 1 + drafts
            else:
                before = track.most[group]
                track.most[group] = max(before, cdiv(end, size) + drafts * is_decode)
                skipped = max(0, track.hit // size - 1)
                due = track.most[group] - skipped
                if spec.mamba_cache_mode == "align":
                    own = track.logical_blocks[group]
                    used = n
                    flight = request.in_flight
                    if recompute_of(spec) is not None and (
                        flight is None or not is_prefill(flight)
                    ):
                        used = track.base
                    if item.overwrite:
                        before = track.hit // size
                        own |= {before - 1} & set(range(before))
                    else:
                        own -= set(range(max(0, used - 1) // size))
                    # A chunk leaves a state where it ends, and none where it only passes.
                    first = before if is_decode else max(before, track.most[group] - 1)
                    own |= set(range(first, track.most[group]))
                    due = len(own)
                    if due > 1 + states_behind(spec, self._llm.config.async_scheduling) + drafts:
                        raise RuleError(
                            "states-due",
                            f"request {request.request_id} is due {due} states in mode align",
                        )
        else:
            ahead = min(
                end + self._llm.manager.num_lookahead_tokens,
                self._llm.config.scheduler.max_model_len,
            )
            track.most[group] = max(track.most[group], cdiv(ahead, size))
            due = track.most[group] - self._given_back(track, item, group, spec)
        ids = self._llm.manager.block_ids(request.request_id)[group]
        if len(ids) != due and (self._knows_mode or not isinstance(spec, MambaSpec)):
            raise RuleError(
                "blocks-held",
                f"request {request.request_id} holds {len(ids)} blocks of {type(spec).__name__} in a step of "
                f"{item.num_tokens} tokens after {n}; {due} are due",
            )
        if len(ids) > (most := self._planned[group]):
            raise RuleError(
                "blocks-planned",
                f"request {request.request_id} holds {len(ids)} blocks of {type(spec).__name__}, {most} are planned",
            )
        self.patterns.count_blocks(request.request_id, ids.tolist())

    def _given_back(
        self, track: Track, item: ScheduledRequest, group: int, spec: KVCacheSpec
    ) -> int:
        """How many blocks no query from this step on sees; a block that a step in flight completes is kept until then."""
        window, begin, size = window_of(spec), item.num_computed_tokens, spec.block_size
        if window is None:
            return 0
        last = begin - window  # the last token that this step's first query does not see
        due = max(0, last + 1) // size
        if self._llm.manager.enable_prefix_caching:
            due = min(due, (begin if item.overwrite else track.computed) // size)
        return due

    def _check_padding(self, batch: Sequence[ScheduledRequest], metadata: dict[str, Any]) -> None:
        """A step of decodes alone has as many rows as the next captured size says, each other one its requests'."""
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
                    f"a step of {len(batch)} requests has {rows} rows in group {group.group_id}; {due} are due",
                )

    def _check_tokens(self, step: Sequence[Ran]) -> None:
        """Right drafts are accepted, all and only those; what a step gives is the answer's next tokens."""
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
                    f"request {item.request.request_id} gets {new} after {first} tokens with drafts {list(drafts)}; "
                    f"{rest[: right + 1]} are due",
                )

    def _check_blocks(self, step: Sequence[Ran]) -> None:
        """No block that a step writes can be found by others or has another owner."""
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
                        f"request {ran.item.request.request_id} writes blocks {blocks.tolist()} of group "
                        f"{group.group_id}, which others may read",
                    )

    def never_fits(self, llm: LLM, number: int) -> bool:
        """Whether a request needs more blocks than there are even when it is alone."""
        scenario = self.scenario
        longest = len(scenario.prompts[number]) + scenario.params[number].max_tokens
        tokens = (
            min(llm.config.scheduler.max_model_len, longest) - 1
        )  # the last one is never cached
        due = sum(
            _most_blocks(group.spec, tokens, llm.config.async_scheduling, _num_ahead(llm))
            for group in llm.plan.config.groups
        )
        return due > llm.manager.pool.num_blocks - 1

    def _check_metrics(self, outputs: Sequence[RequestOutput]) -> None:
        """What a user reads of a request, re-counted from what the steps ran."""
        for track, output in zip(self.tracks, outputs, strict=True):
            if (
                output.finish_reason == "abort"
                and len(output.token_ids) != self.aborted[output.request_id]
            ):
                raise RuleError(
                    "abort-tokens",
                    f"request {output.request_id} had {self.aborted[output.request_id]} tokens when it was aborted, "
                    f"and ends with {len(output.token_ids)}",
                )
            if output.finish_reason in ("abort", "error"):
                continue  # Of its last step it may or may not have heard.
            said = output.cached_tokens, output.num_draft_tokens, output.num_accepted_draft_tokens
            due = track.cached, track.drafts, track.num_accepted
            # Where steps are known late its last one may end while it waits to start again.
            starts = output.num_preemptions + 1 - track.admissions
            if said != due or starts not in (0, self._num_late):
                raise RuleError(
                    "metrics",
                    f"request {output.request_id} says (cached tokens, drafts, accepted) {said}, preempted "
                    f"{output.num_preemptions} times; {due} ran, in {track.admissions} admissions",
                )

    def finish(self, llm: LLM, outputs: Sequence[RequestOutput]) -> None:
        """Count what only the end shows."""
        llm.scheduler.check_integrity()
        self._kept.check()
        for ids, before in self._handed_out:
            if not np.array_equal(ids, before):
                raise RuleError(
                    "ids-stay", f"ids {before.tolist()} were handed out and are {ids.tolist()} now"
                )
        self._check_metrics(outputs)
        self.seen["strange_drafts"] += self._drafts.num_strange
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
    """How many tokens may be scheduled or written behind those of a request that are known to be computed."""
    steps = 2 if llm.config.async_scheduling else 1
    return steps * llm.config.scheduler.max_num_batched_tokens + llm.manager.num_lookahead_tokens


def _most_blocks(spec: KVCacheSpec, num_tokens: int, is_async: bool, num_ahead: int) -> int:
    """How many a request holds at most, in a group, until it has so many tokens.

    Args:
        num_ahead: tokens that may be scheduled behind those that are known to be computed.
    """
    logical_blocks = cdiv(num_tokens, spec.block_size)
    if (window := window_of(spec)) is not None:
        # From anywhere in a block on: what its first query sees, and the steps that may be in flight.
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

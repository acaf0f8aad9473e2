"""Which tokens of which requests run in the next step.

First come, first served. Running requests go first, so that a decode is never starved by a prefill;
a prompt longer than the rest of the token budget is prefilled in chunks. When the pool is empty the
youngest running request is preempted: its blocks return to the pool, its tokens (generated ones
included) are recomputed when it is admitted again, except for what the prefix cache still holds.
The oldest running request can thus always grow, and requests that cannot fit alone are refused at
the door: no livelock. A prompt whose prefix another one is just computing waits for it.

In cache mode `align` a chunk that reaches a boundary of all groups
(`KVCacheManager.hit_granularity`) ends on the last one that it reaches, and none passes the last
one of the prompt that a hit may use, nor a junction (`cache.retention`). Where block sizes are
unequal, a chunk before that may reach none of these: then it ends on a boundary of the states alone
if it reaches one. After the last boundary of all groups a chunk may pass those of the states:
nothing could use them. A chunk that cannot reach a boundary still runs: every step makes progress
(vllm!51582).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import chain

from hybrid_kv.cache.manager import HitLostError, KVCacheManager
from hybrid_kv.cache.request_blocks import NO_HIT, NewBlocks, PrefixHit
from hybrid_kv.cache.spec import StateProgress
from hybrid_kv.config import ConfigError, SchedulerConfig
from hybrid_kv.kernels.common.integers import cdiv
from hybrid_kv.request import Request, ScheduledRequest


class Scheduler:
    """Owns the queues, the rows and, through the manager, the blocks.

    Args:
        num_speculative_tokens: the most drafts that a step proposes for a request.
        flush: writes the state of a running request at the last block boundary of its tokens, if
            the rollback scheme has not written it yet.
        drafts_after: K of the drafts that a step of so many requests proposes; None: always the
            most.
    """

    def __init__(
        self,
        config: SchedulerConfig,
        manager: KVCacheManager,
        num_speculative_tokens: int,
        flush: Callable[[Request], None] | None = None,
        drafts_after: Callable[[int], int] | None = None,
    ) -> None:
        self.config = config
        self.flush = flush
        self.rollback = manager.rollback
        self._states_block_size = manager.states_block_size
        self._num_drafts = num_speculative_tokens  # that the last step proposes for a request
        self._drafts_after = drafts_after
        self.manager = manager
        self.waiting: deque[Request] = deque()
        self.running: list[Request] = []
        self._ids: set[str] = set()  # of requests that wait or run
        self._free_rows = list(range(config.max_num_seqs - 1, -1, -1))

    def add(self, request: Request) -> None:
        """Queue a request.

        Raises:
            ConfigError: its id is in the queue already, it has ended, it is empty, longer than
                `max_model_len`, or can never fit in the pool.
        """
        if request.request_id in self._ids or request.is_finished:
            raise ConfigError(
                f"request {request.request_id} was added before; make a new request for each run"
            )
        length = request.num_tokens
        limit = self.config.max_model_len
        if length == 0:
            raise ConfigError(
                f"request {request.request_id}: the prompt is empty; give it at least one token"
            )
        if length >= limit:
            raise ConfigError(
                f"request {request.request_id}: the prompt has {length} tokens, max_model_len is "
                f"{limit}, one of them for the answer; shorten the prompt or raise max_model_len"
            )
        # The last token is sampled, never cached.
        longest = min(limit, len(request.prompt_token_ids) + request.params.max_tokens) - 1
        if not self.manager.can_ever_fit(longest):
            raise ConfigError(
                f"request {request.request_id}: {longest} tokens never fit in "
                f"{self.manager.pool.num_blocks - 1} cache blocks; lower max_tokens or give the "
                "cache more memory"
            )
        self._ids.add(request.request_id)
        self.waiting.append(request)

    @property
    def has_requests(self) -> bool:
        return bool(self.waiting or self.running)

    def schedule(self) -> list[ScheduledRequest]:
        """Return the next step.

        It is empty only if no request is left or all wait for the step in flight.
        """
        scheduled: list[ScheduledRequest] = []
        budget, is_full = self._schedule_running(scheduled, self.config.max_num_batched_tokens)
        # A preempted request would only take its blocks again.
        if not is_full:
            self._schedule_waiting(scheduled, budget)
        if scheduled and self._drafts_after is not None:
            self._num_drafts = self._drafts_after(len(scheduled))
        return scheduled

    def _schedule_running(self, scheduled: list[ScheduledRequest], budget: int) -> tuple[int, bool]:
        """Give running requests their tokens.

        Returns:
            The tokens that are left of the budget, and whether the pool was too full for a request.
        """
        is_full = False
        index = 0
        while index < len(self.running) and budget > 0:
            # One token is left for each running request after this one: neither drafts nor a chunk
            # starve a request. Split the rest of the budget evenly among drafts; older requests get
            # the remainder.
            num_left = len(self.running) - index
            item = self._next(
                self.running[index], budget - num_left + 1, cdiv(budget - num_left, num_left)
            )
            if item is None:
                index += 1
                continue
            new = self._allocate(item)
            if new is None:
                is_full = True
                new = self._preempt_for(item)
            if new is None:
                break
            item.new_blocks = new
            scheduled.append(item)
            budget -= item.num_tokens
            index += 1
        return budget, is_full

    def _preempt_for(self, item: ScheduledRequest) -> NewBlocks | None:
        """Preempt the youngest requests until a running one has room for its step.

        Returns:
            Its new blocks; None if it is the youngest itself.
        """
        new: NewBlocks | None = None
        while new is None:
            victim = self.running[-1]
            if victim is item.request and item.awaits_drafts:
                return None  # It may need less: that depends on the step in flight.
            self.preempt(victim)
            if victim is item.request:
                return None
            new = self._allocate(item)
        return new

    def _schedule_waiting(self, scheduled: list[ScheduledRequest], budget: int) -> None:
        """Admit waiting requests, first come, first served, as long as there is room."""
        while self.waiting and budget > 0 and self._free_rows:
            request = self.waiting[0]
            if request.in_flight is not None:
                break
            # Alone it fits: no other request is left to preempt.
            if self.running and not self.manager.may_fit(request.request_id):
                break
            item = self._admit(request, budget, scheduled)
            if item is None:
                break
            scheduled.append(item)
            budget -= item.num_tokens

    def _admit(
        self, request: Request, budget: int, scheduled: Sequence[ScheduledRequest]
    ) -> ScheduledRequest | None:
        """Return the first chunk of the first waiting request, after what the cache has of it.

        None if it must wait.
        """
        try:
            return self._try_to_admit(request, budget, scheduled)
        except HitLostError:
            # Retry without offload: a hit is restored as a whole or not at all.
            return self._try_to_admit(request, budget, scheduled, use_offload=False)

    def _try_to_admit(
        self,
        request: Request,
        budget: int,
        scheduled: Sequence[ScheduledRequest],
        use_offload: bool = True,
    ) -> ScheduledRequest | None:
        if request.arrival is not None:
            return self._receive_request(request)
        hit = NO_HIT
        if request.params.reads_prefix_cache:
            hit = self.manager.find_longest_cache_hit(
                request.block_hashes, request.token_ids, use_offload
            )
            if self._waits_for_prefix(request, hit.num_tokens, scheduled):
                return None
        request.junction = hit.junction
        item = self._chunk(request, hit.num_tokens, budget, overwrite=True)
        new = self._allocate(item, hit)
        if new is None:
            return None
        self._start(request, item, new)
        request.progress = StateProgress(hit.num_tokens, hit.num_tokens)
        if not request.num_preemptions:
            request.hit = replace(hit, chains=())  # an output may live long
        return item

    def _receive_request(self, request: Request) -> ScheduledRequest | None:
        """Return the first step of a request that another engine has begun.

        It is that of a request whose hit leaves one token.
        """
        assert request.arrival is not None
        start = request.num_tokens - 1
        item = ScheduledRequest(
            request=request,
            num_tokens=1,
            num_computed_tokens=start,
            overwrite=True,
            samples=True,
        )
        new = self.manager.adopt(request.request_id, start)
        if new is None:
            return None
        self._start(request, item, new)
        request.progress = StateProgress(start, start)
        request.arrival(request, new)
        request.arrival = None  # it may be preempted, and then has nothing but its tokens
        # Now, not after the step: with one in flight, mode align gives the boundary's logical
        # block back before that.
        self._cache_blocks(request, is_decode=False)
        return item

    def _start(self, request: Request, item: ScheduledRequest, new: NewBlocks) -> None:
        """Let the first waiting request run from this step on."""
        item.new_blocks = new
        self.waiting.popleft()
        self.running.append(request)
        request.row = self._free_rows.pop()

    def _waits_for_prefix(
        self, request: Request, num_cached: int, scheduled: Sequence[ScheduledRequest]
    ) -> bool:
        """Return whether a prefill of this step, or of that in flight, makes a waiting hit longer.

        Then it waits, and so do those behind it: at once, both would compute the same blocks. No
        wait is endless, since those it waits for run.
        """
        if not self.manager.enable_prefix_caching:
            return False
        flights = (other.in_flight for other in self.running)
        for item in chain((flight for flight in flights if flight is not None), scheduled):
            other = item.request
            end = item.num_computed_tokens + item.num_tokens
            if item.is_decode:
                continue
            shared = self.manager.shared_tokens(
                request.block_hashes, request.token_ids, other.block_hashes, other.token_ids, end
            )
            if shared > num_cached:
                if item.partial is not None and num_cached < item.partial.num_tokens <= shared:
                    return True
                kept = self.manager.longest_kept(shared, other.resume_points)
                if kept > num_cached and (self.manager.keeps_inside or kept == end):
                    return True
        return False

    def _allocate(self, item: ScheduledRequest, hit: PrefixHit = NO_HIT) -> NewBlocks | None:
        request = item.request
        flight = item.request.in_flight
        end = item.num_computed_tokens + item.num_tokens
        if item.awaits_drafts:
            assert flight is not None
            end = min(end + flight.num_drafts, self.config.max_model_len)
        # A prefill in flight leaves a state after its last token.
        is_prefill = flight is not None and not flight.is_decode
        start = item.num_computed_tokens
        seen = start if is_prefill else self.rollback.num_seen(request.progress, start)
        partial = self.manager.partial
        due = 0
        if partial is not None and not item.is_decode:
            due = partial.due(start, end, len(request.prompt_token_ids))
        new = self.manager.allocate_slots(
            request.request_id, start, end - start, item.is_decode, hit, seen, due
        )
        if new is not None and partial is not None and due:
            item.partial = partial.pending[request.request_id]
        return new

    def _next(self, request: Request, budget: int, draft_budget: int) -> ScheduledRequest | None:
        """Return the next step of a running request; None if the step in flight is its last."""
        flight = request.in_flight
        start = request.progress.computed
        if flight is not None:
            # Its drafts may be rejected: only the other tokens count (vllm!33997).
            start += flight.num_tokens - flight.num_drafts
            if flight.samples:
                room = self._room(request) - 1
                if room <= 0:
                    return None
                drafts = max(0, min(self._num_drafts, draft_budget, room - 1))
                return ScheduledRequest(
                    request=request,
                    num_tokens=1 + drafts,
                    num_computed_tokens=start,
                    samples=True,
                    awaits_drafts=True,
                    num_drafts=drafts,
                )
        if request.num_tokens - start > 1 or start == 0:
            return self._chunk(request, start, budget)
        known_drafts: tuple[int, ...] = ()
        if request.draft_token_ids:
            room = max(0, min(draft_budget, self._room(request) - 1))
            known_drafts = tuple(request.draft_token_ids[:room])
        return ScheduledRequest(
            request=request,
            num_tokens=1 + len(known_drafts),
            num_computed_tokens=start,
            samples=True,
            drafts=known_drafts,
        )

    def _room(self, request: Request) -> int:
        """Return how many more tokens a request can get."""
        left = request.params.max_tokens - len(request.output_token_ids)
        return min(left, self.config.max_model_len - request.num_tokens)

    def _chunk(
        self, request: Request, start: int, budget: int, overwrite: bool = False
    ) -> ScheduledRequest:
        """Return a step of known tokens of a request from `start` on."""
        total = request.num_tokens
        end = self.manager.chunk_end(start, min(total, start + budget), total, request.junction)
        return ScheduledRequest(
            request=request,
            num_tokens=end - start,
            num_computed_tokens=start,
            overwrite=overwrite,
            samples=end == total,
        )

    def preempt(self, request: Request) -> None:
        """Take a running request's blocks and row.

        It is first in the queue and starts again from its first token.
        """
        self._release(request)
        request.progress = StateProgress()
        request.draft_token_ids = []
        request.num_preemptions += 1
        self.waiting.appendleft(request)

    def preempt_all(self) -> None:
        """Preempt every running request; they start again in the order in which they came."""
        for request in reversed(self.running.copy()):
            self.preempt(request)

    def update(self, item: ScheduledRequest, sampled: list[int], num_kept: int) -> None:
        """Account for a step that has run, and publish the blocks that it completed.

        Drafts beyond `sampled` were rejected; the next step overwrites their K/V and states.

        Args:
            sampled: the tokens that the step gave, accepted drafts first.
            num_kept: how many of them the request keeps: none after a stop token. Drafts that were
                right but are not kept have saved no step: they do not count as accepted.
        """
        # The last kept token is not in the cache yet: the next step computes it.
        request = item.request
        request.output_token_ids += sampled[:num_kept]
        request.num_verifications += item.num_drafts > 0
        request.num_draft_tokens += item.num_drafts
        request.num_accepted_draft_tokens += max(0, min(len(sampled) - 1, num_kept))
        if not item.is_stale:
            progress = request.progress
            computed = progress.computed + item.num_tokens - item.num_drafts + max(0, num_kept - 1)
            if item.is_decode:
                self.rollback.advance(
                    progress,
                    item.num_computed_tokens,
                    item.num_tokens,
                    computed,
                    self._states_block_size,
                )
            else:
                progress.computed = progress.flushed = computed
            self._cache_blocks(request, item.is_decode)

    def _cache_blocks(self, request: Request, is_decode: bool) -> None:
        # One step in `block_size` completes a block; the others need not gather the request's
        # tokens.
        progress = request.progress
        if self.manager.completes_blocks(request.request_id, progress):
            self.manager.cache_blocks(
                request.request_id,
                request.block_hashes,
                request.token_ids,
                progress,
                is_decode,
                request.resume_points,
            )

    def finish(self, request: Request, publish: bool = True) -> None:
        """Forget a request, running or waiting.

        Args:
            publish: also the last block that it has completed, if that takes a last write; not
                after an error.
        """
        request.is_finished = True
        self._ids.discard(request.request_id)
        if request.row >= 0:
            self._release(request, publish)
        else:
            self.waiting.remove(request)

    def publish_flushed(self, request: Request) -> None:
        """Publish the last block that a running request has completed, if it takes a last write."""
        if self.flush is None or not self.rollback.writes_late:
            return
        progress = StateProgress(request.num_computed_tokens, request.num_computed_tokens)
        if self.manager.completes_blocks(request.request_id, progress):
            self.flush(request)
            request.progress = progress
            self._cache_blocks(request, is_decode=True)

    def _release(self, request: Request, publish: bool = True) -> None:
        if publish:
            self.publish_flushed(request)
        self.running.remove(request)
        self.manager.free(request.request_id)
        self._free_rows.append(request.row)
        request.row = -1

    def check_integrity(self) -> None:
        """Raise AssertionError unless rows and blocks belong to exactly the running requests."""
        self.manager.check_integrity([request.request_id for request in self.running])
        rows = [request.row for request in self.running]
        assert sorted(rows + self._free_rows) == list(range(self.config.max_num_seqs)), (
            "a row is lost or shared"
        )

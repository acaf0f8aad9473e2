"""Which tokens of which requests run in the next step.

First come, first served. Running requests go first, so that a decode is never starved by a prefill; a prompt longer
than the rest of the token budget is prefilled in chunks. When the pool is empty the youngest running request is
preempted: its blocks return to the pool, its tokens (generated ones included) are recomputed when it is admitted again,
except for what the prefix cache still holds. The oldest running request can thus always grow, and requests that cannot
fit alone are refused at the door: no livelock.

In cache mode `align` a chunk ends on a block boundary whenever it reaches one, and the last chunk of a prompt begins at
its last boundary that a hit may use. A chunk that cannot reach a boundary still runs: every step makes progress
(vllm!51582).
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

from hybrid_kv.cache.block_hash import BlockHashes
from hybrid_kv.cache.manager import NO_HIT, KVCacheManager, NewBlocks, PrefixHit
from hybrid_kv.config import ConfigError, SchedulerConfig
from hybrid_kv.engine.sampling import SamplingParams


@dataclass(eq=False)
class Request:
    """A request and how far it is. `num_computed_tokens` tokens are in the cache, all of them accepted."""

    request_id: str
    prompt_token_ids: list[int]
    params: SamplingParams
    seed: int
    output_token_ids: list[int] = field(default_factory=list)
    draft_token_ids: list[int] = field(default_factory=list)  # proposals for the tokens after the last known one
    num_computed_tokens: int = 0
    num_preemptions: int = 0
    num_draft_tokens: int = 0  # verified so far …
    num_accepted_draft_tokens: int = 0  # … and found right
    hit: PrefixHit = NO_HIT  # of the first admission
    num_cached_tokens: int = 0  # taken from the cache, in all admissions
    row: int = -1  # of the block tables; -1 while waiting

    def __post_init__(self) -> None:
        self.block_hashes = BlockHashes(self.params.cache_salt)

    @property
    def num_tokens(self) -> int:
        return len(self.prompt_token_ids) + len(self.output_token_ids)

    @property
    def token_ids(self) -> list[int]:
        return self.prompt_token_ids + self.output_token_ids


@dataclass(frozen=True)
class ScheduledRequest:
    """`num_tokens` tokens of one request, from `num_computed_tokens` on; the last `len(drafts)` of them are drafts."""

    request: Request
    num_tokens: int
    num_computed_tokens: int
    new_blocks: NewBlocks
    overwrite: bool  # the row has a new owner
    drafts: tuple[int, ...] = ()

    @property
    def is_decode(self) -> bool:
        return self.num_computed_tokens > 0 and self.num_tokens == 1 + len(self.drafts)

    @property
    def samples(self) -> bool:
        """Whether this step computes the request's last known token, so that its logits give the next one."""
        return self.num_computed_tokens + self.num_tokens - len(self.drafts) == self.request.num_tokens


class Scheduler:
    """Owns the queues, the rows and, through the manager, the blocks.

    Args:
        align_to: Mamba block size in cache mode `align`.
    """

    def __init__(self, config: SchedulerConfig, manager: KVCacheManager, align_to: int | None = None) -> None:
        self.config = config
        self.manager = manager
        self.align_to = align_to
        self.waiting: deque[Request] = deque()
        self.running: list[Request] = []
        self._free_rows = list(range(config.max_num_seqs - 1, -1, -1))

    def add(self, request: Request) -> None:
        """Queue a request.

        Raises:
            ConfigError: it is empty, longer than `max_model_len`, or can never fit in the pool.
        """
        length = len(request.prompt_token_ids)
        limit = self.config.max_model_len
        if length == 0:
            raise ConfigError(f"request {request.request_id}: the prompt is empty; give it at least one token")
        if length >= limit:
            raise ConfigError(
                f"request {request.request_id}: the prompt has {length} tokens, max_model_len is {limit}, one of them "
                "for the answer; shorten the prompt or raise max_model_len"
            )
        # The last token is sampled, never cached.
        longest = min(limit, length + request.params.max_tokens) - 1
        if not self.manager.can_ever_fit(longest):
            raise ConfigError(
                f"request {request.request_id}: {longest} tokens never fit in {self.manager.pool.num_blocks - 1} cache "
                "blocks; lower max_tokens or give the cache more memory"
            )
        self.waiting.append(request)

    @property
    def has_requests(self) -> bool:
        return bool(self.waiting or self.running)

    def schedule(self) -> list[ScheduledRequest]:
        """The next step; empty only if no request is left."""
        budget = self.config.max_num_batched_tokens
        scheduled: list[ScheduledRequest] = []
        preempted = False
        index = 0
        while index < len(self.running) and budget > 0:
            request = self.running[index]
            num_tokens = self._chunk(request, request.num_computed_tokens, budget)
            # One token is left for each running request behind this one: drafts must not starve anybody.
            drafts = self._drafts(request, budget - (len(self.running) - index))
            is_decode = num_tokens == 1 and request.num_computed_tokens > 0
            num_tokens += len(drafts)
            while (
                new := self.manager.allocate_slots(
                    request.request_id, request.num_computed_tokens, num_tokens, is_decode
                )
            ) is None:
                preempted = True
                victim = self.running[-1]
                self.preempt(victim)
                if victim is request:
                    break
            if new is None:
                break
            scheduled.append(
                ScheduledRequest(request, num_tokens, request.num_computed_tokens, new, overwrite=False, drafts=drafts)
            )
            budget -= num_tokens
            index += 1
        # A preempted request would only take back what it was made to give.
        while self.waiting and not preempted and budget > 0 and self._free_rows:
            request = self.waiting[0]
            hit = self.manager.find_longest_cache_hit(request.block_hashes, request.token_ids)
            num_tokens = self._chunk(request, hit.num_tokens, budget)
            is_decode = num_tokens == 1 and hit.num_tokens > 0
            new = self.manager.allocate_slots(
                request.request_id, hit.num_tokens, num_tokens, is_decode, hit, request.block_hashes
            )
            if new is None:
                break
            self.waiting.popleft()
            self.running.append(request)
            request.row = self._free_rows.pop()
            request.num_computed_tokens = hit.num_tokens
            request.num_cached_tokens += hit.num_tokens
            if not request.num_preemptions:
                request.hit = hit
            scheduled.append(ScheduledRequest(request, num_tokens, hit.num_tokens, new, overwrite=True))
            budget -= num_tokens
        return scheduled

    def _chunk(self, request: Request, start: int, budget: int) -> int:
        """How many known tokens of a request to run from `start` on."""
        total = request.num_tokens
        end = min(total, start + budget)
        if self.align_to is None or total - start == 1:
            return end - start
        # The state that a repeated prompt can use: its last token is always computed.
        last_boundary = (total - 1) // self.align_to * self.align_to
        if start < last_boundary:
            end = min(end, last_boundary)
            boundary = end // self.align_to * self.align_to
            if boundary > start:
                end = boundary
        return end - start

    def _drafts(self, request: Request, budget: int) -> tuple[int, ...]:
        """The proposals that this step verifies: as many as can matter and as the budget has room for."""
        if not request.draft_token_ids:
            return ()
        room = min(
            request.params.max_tokens - len(request.output_token_ids),
            self.config.max_model_len - request.num_tokens,
        )
        return tuple(request.draft_token_ids[: max(0, min(budget, room - 1))])

    def preempt(self, request: Request) -> None:
        """Take a running request's blocks and row; it is first in the queue and starts again from its first token."""
        self._release(request)
        request.num_computed_tokens = 0
        request.draft_token_ids = []
        request.num_preemptions += 1
        self.waiting.appendleft(request)

    def update(self, item: ScheduledRequest, sampled: list[int], num_kept: int) -> None:
        """Account for a step that has run.

        Drafts beyond `sampled` were rejected; the next step overwrites their K/V and states.

        Args:
            sampled: the tokens that the step gave, accepted drafts first.
            num_kept: how many of them the request keeps: none after a stop token.
        """
        request = item.request
        request.num_computed_tokens += item.num_tokens - len(item.drafts) + max(0, num_kept - 1)
        request.output_token_ids += sampled[:num_kept]
        request.num_draft_tokens += len(item.drafts)
        request.num_accepted_draft_tokens += max(0, len(sampled) - 1)

    def cache_blocks(self, item: ScheduledRequest) -> None:
        """Publish the blocks that a step completed."""
        request = item.request
        self.manager.cache_blocks(
            request.request_id,
            request.block_hashes,
            request.token_ids,
            request.num_computed_tokens,
            item.is_decode,
        )

    def finish(self, request: Request) -> None:
        """Forget a request, running or waiting."""
        if request.row >= 0:
            self._release(request)
        else:
            self.waiting.remove(request)

    def _release(self, request: Request) -> None:
        self.running.remove(request)
        self.manager.free(request.request_id)
        self._free_rows.append(request.row)
        request.row = -1

    def check_integrity(self) -> None:
        """Raise AssertionError unless rows and blocks belong to exactly the running requests."""
        self.manager.check_integrity([request.request_id for request in self.running])
        rows = [request.row for request in self.running]
        assert sorted(rows + self._free_rows) == list(range(self.config.max_num_seqs)), "a row is lost or shared"

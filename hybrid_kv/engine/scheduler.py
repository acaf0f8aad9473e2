"""Which tokens of which requests run in the next step.

First come, first served. Running requests go first, so that a decode is never starved by a prefill; a prompt longer
than the rest of the token budget is prefilled in chunks. When the pool is empty the youngest running request is
preempted: its blocks return to the pool, its tokens (generated ones included) are recomputed when it is admitted again.
The oldest running request can thus always grow, and requests that cannot fit alone are refused at the door: no
livelock.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

from hybrid_kv.cache.manager import KVCacheManager, NewBlocks
from hybrid_kv.config import ConfigError, SchedulerConfig
from hybrid_kv.engine.sampling import SamplingParams


@dataclass(eq=False)
class Request:
    """A request and how far it is. `num_computed_tokens` tokens are in the cache."""

    request_id: str
    prompt_token_ids: list[int]
    params: SamplingParams
    seed: int
    output_token_ids: list[int] = field(default_factory=list)
    num_computed_tokens: int = 0
    num_preemptions: int = 0
    row: int = -1  # of the block tables; -1 while waiting

    @property
    def num_tokens(self) -> int:
        return len(self.prompt_token_ids) + len(self.output_token_ids)

    @property
    def token_ids(self) -> list[int]:
        return self.prompt_token_ids + self.output_token_ids


@dataclass(frozen=True)
class ScheduledRequest:
    """`num_tokens` tokens of one request, from `num_computed_tokens` on."""

    request: Request
    num_tokens: int
    num_computed_tokens: int
    new_blocks: NewBlocks
    overwrite: bool  # the row has a new owner

    @property
    def is_decode(self) -> bool:
        return self.num_tokens == 1 and self.num_computed_tokens > 0

    @property
    def samples(self) -> bool:
        """Whether this step computes the request's last known token, so that its logits give the next one."""
        return self.num_computed_tokens + self.num_tokens == self.request.num_tokens


class Scheduler:
    """Owns the queues, the rows and, through the manager, the blocks."""

    def __init__(self, config: SchedulerConfig, manager: KVCacheManager) -> None:
        self.config = config
        self.manager = manager
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
            num_tokens = min(request.num_tokens - request.num_computed_tokens, budget)
            while (new := self._allocate(request, num_tokens)) is None:
                preempted = True
                victim = self.running[-1]
                self.preempt(victim)
                if victim is request:
                    break
            if new is None:
                break
            scheduled.append(ScheduledRequest(request, num_tokens, request.num_computed_tokens, new, overwrite=False))
            budget -= num_tokens
            index += 1
        # A preempted request would only take back what it was made to give.
        while self.waiting and not preempted and budget > 0 and self._free_rows:
            request = self.waiting[0]
            num_tokens = min(request.num_tokens, budget)
            new = self._allocate(request, num_tokens)
            if new is None:
                break
            self.waiting.popleft()
            self.running.append(request)
            request.row = self._free_rows.pop()
            scheduled.append(ScheduledRequest(request, num_tokens, 0, new, overwrite=True))
            budget -= num_tokens
        return scheduled

    def _allocate(self, request: Request, num_tokens: int) -> NewBlocks | None:
        return self.manager.allocate_slots(request.request_id, request.num_computed_tokens + num_tokens)

    def preempt(self, request: Request) -> None:
        """Take a running request's blocks and row; it is first in the queue and starts again from its first token."""
        self._release(request)
        request.num_computed_tokens = 0
        request.num_preemptions += 1
        self.waiting.appendleft(request)

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

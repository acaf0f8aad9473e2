"""Rules of waiting: when a request must start and when it must wait, from tokens and lengths."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import numpy as np

from hybrid_kv.cache.request_blocks import NO_IDS
from hybrid_kv.cache.spec import MambaSpec, window_of
from hybrid_kv.check.guard.kept import Device
from hybrid_kv.check.guard.published import PublishedPrefixes
from hybrid_kv.check.guard.step import RuleError, Track, common_prefix, is_prefill
from hybrid_kv.engine.llm import LLM
from hybrid_kv.engine.scheduler import Scheduler
from hybrid_kv.kernels.common.integers import cdiv
from hybrid_kv.request import Request, ScheduledRequest

# Modes in which a prefill leaves something to hit at each boundary that it passes.
KEEPS_INSIDE = ("all",)


def count_preemptions(scheduler: Scheduler) -> dict[str, int]:
    """Return the preemptions of each request that has not ended."""
    return {
        request.request_id: request.num_preemptions
        for request in (*scheduler.running, *scheduler.waiting)
    }


class Waiting:
    """The rules of one engine's queue.

    The first waiting request is in the step if a row and budget are free, the pool has all blocks
    that it could ever need, no running request went without, and no prefill in flight makes its hit
    longer. If one does, it waits. A request that does not get in leaves its prefix as old as it
    was.
    """

    def __init__(
        self,
        llm: LLM,
        track_of: Callable[[Request], Track],
        published: PublishedPrefixes,
        device: Device,
    ) -> None:
        self._llm = llm
        self._track = track_of
        self._published = published
        self._device = device
        self._specs = [group.spec for group in llm.plan.config.groups]
        states = [spec for spec in self._specs if isinstance(spec, MambaSpec)]
        self._keeps_inside = all(spec.mamba_cache_mode in KEEPS_INSIDE for spec in states)
        self._preemptions: dict[str, int] = {}  # of each request, before the step
        self._idle = NO_IDS

    def before_step(self) -> None:
        """Remember the preemptions and the free blocks before the next step."""
        self._preemptions = count_preemptions(self._llm.scheduler)
        self._idle = self._llm.manager.pool.idle_blocks() if self._llm.scheduler.waiting else NO_IDS

    def on_end(self) -> None:
        """Forget the order of free blocks: those that an ended request frees count as used now."""
        self._idle = NO_IDS

    def on_copy(self, sources: Sequence[int]) -> None:
        """Note that free blocks are used by copying from them."""
        self._idle = self._idle[~np.isin(self._idle, sources)]

    def check(self, scheduled: Sequence[ScheduledRequest], is_exact: bool) -> None:
        """Check which requests start in a step, and which wait.

        Args:
            is_exact: hits are exactly those of `published`.

        Raises:
            RuleError: `left-waiting`, `did-not-wait`, `started-anyway` or `used-unseen`.
        """
        llm = self._llm
        starting = [item.request.request_id for item in scheduled if item.overwrite]
        if starting and self.has_preempted():
            raise RuleError(
                "started-anyway",
                f"requests {starting} start in a step that others were preempted for",
            )
        if is_exact:
            for i, item in enumerate(scheduled):
                if item.overwrite and any(
                    self._helps(item.request, item.num_computed_tokens, scheduled[:i])
                ):
                    raise RuleError(
                        "did-not-wait",
                        f"request {item.request.request_id} starts after "
                        f"{item.num_computed_tokens} tokens though a "
                        "prefill in flight computes more of its prefix",
                    )
        if not llm.scheduler.waiting:
            return
        self._check_order()
        head = llm.scheduler.waiting[0]
        limits = llm.config.scheduler
        budget = limits.max_num_batched_tokens - sum(item.num_tokens for item in scheduled)
        in_step = {item.request.request_id for item in scheduled}
        left_out = [
            request for request in llm.scheduler.running if request.request_id not in in_step
        ]
        if (
            budget <= 0
            or len(llm.scheduler.running) == limits.max_num_seqs
            or head.in_flight is not None
        ):
            return
        if left_out or self.has_preempted():
            return  # The pool was too full for the running requests.
        reads = is_exact and head.params.reads_prefix_cache
        known = self._published.hit(self._track(head), head.num_tokens) if reads else 0
        most = self._most_blocks(head) - self._num_held(head, known)
        if llm.manager.pool.num_free_blocks < most:
            return
        if llm.manager.enable_prefix_caching and any(self._helps(head, known, scheduled)):
            return
        raise RuleError(
            "left-waiting",
            f"request {head.request_id} waits with {budget} tokens of budget, a row and "
            f"{llm.manager.pool.num_free_blocks} blocks free; it needs {most} at most",
        )

    def _check_order(self) -> None:
        """Check that blocks which stay free are lost in the order in which they were free."""
        now = self._llm.manager.pool.idle_blocks()
        now = now[np.isin(now, self._idle)]
        before = self._idle[np.isin(self._idle, now)]
        moved = before[before != now].tolist()
        if moved:
            raise RuleError(
                "used-unseen",
                f"free blocks {moved} count as used later, though no request took them",
            )

    def has_preempted(self) -> bool:
        """Return whether a request lost its blocks for the step."""
        before = self._preemptions
        now = count_preemptions(self._llm.scheduler)
        return any(count > before.get(name, 0) for name, count in now.items())

    def _most_blocks(self, request: Request) -> int:
        """Return the blocks of all tokens of a request, shared ones too."""
        ahead = min(
            request.num_tokens + self._llm.manager.num_lookahead_tokens,
            self._llm.config.scheduler.max_model_len,
        )
        due = 0
        for spec in self._specs:
            drafts = spec.num_speculative_blocks if isinstance(spec, MambaSpec) else 0
            due += cdiv(ahead, spec.block_size) + drafts
        if self._published.match_unit is not None:
            # What its hit is copied from, and what it leaves inside of blocks.
            due += 2 * len(self._specs)
        return due

    def _num_held(self, request: Request, num_known: int) -> int:
        """Return how many K/V blocks of a request's prefix another request holds.

        It gets them without a free block.
        """
        track = self._track(request)
        pool = self._llm.manager.pool
        names = (
            (group, track.prefix(end))
            for group, spec in enumerate(self._specs)
            if not isinstance(spec, MambaSpec)
            for end in range(spec.block_size, num_known + 1, spec.block_size)
            if end > num_known - (window_of(spec) or num_known + 1) + 1
        )
        blocks = [self._device.found(name) for name in names]
        cached = [block for block in blocks if block is not None]
        return int(np.count_nonzero(pool.ref_count[cached]))

    def _helps(
        self, request: Request, num_known: int, others: Sequence[ScheduledRequest]
    ) -> Iterator[bool]:
        """Yield for each prefill in flight whether it makes a hit of `num_known` tokens longer."""
        track = self._track(request)
        if not request.params.reads_prefix_cache:
            return
        flights = [
            other_track.in_flight
            for other_track in self._llm.scheduler.running
            if other_track.in_flight is not None
        ]
        for item in (*flights, *others):
            if item.request is request or not is_prefill(item):
                continue
            other_track = self._track(item.request)
            end = item.num_computed_tokens + item.num_tokens
            if track.salt != other_track.salt:
                continue
            unit = self._published.unit
            same = common_prefix(track.sequence, other_track.sequence)
            shared = min(same, end, request.num_tokens - 1) // unit * unit
            while shared and not self._published.is_resumed_at(other_track, shared):
                shared -= unit
            yield shared > num_known and (self._keeps_inside or shared == end)
            inside = self._published.left_inside(other_track)
            longest = min(same, request.num_tokens - 1)
            yield (max(num_known, item.num_computed_tokens) < inside <= min(end, longest))

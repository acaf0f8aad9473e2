"""What a step may run while others are under way in a pipeline: said once more, from rows and requests alone."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from hybrid_kv.engine.llm import LLM
from hybrid_kv.guard.step import RuleError
from hybrid_kv.kernels.common.integers import cdiv
from hybrid_kv.request import ScheduledRequest


class Pipeline:
    """The steps of one engine with several stages. Takes the place of its scheduler's `schedule`.

    A step has its share of the rows at most, and nobody who is in another one. It is empty (a bubble) only if all who
    run are in others, and nobody who waits could start.

    Args:
        on_bubble: called for each step without requests: watchers are not told of it.

    Attributes:
        away: who was in another step when the last one was made.
        num_beside: steps that were made while others were under way; `num_bubbles`: those without requests.
    """

    def __init__(self, llm: LLM, on_bubble: Callable[[], None]) -> None:
        self._scheduler, self._on_bubble = llm.scheduler, on_bubble
        limits = llm.config.scheduler
        self._most = cdiv(limits.max_num_seqs, limits.pipeline_parallel_size)
        self.away: set[str] = set()
        self.num_beside = self.num_bubbles = 0
        self._schedule = llm.scheduler.schedule
        vars(llm.scheduler)["schedule"] = self.schedule

    def schedule(self) -> list[ScheduledRequest]:
        """See `engine.scheduler.Scheduler.schedule`.

        Raises:
            RuleError: `left-out` or `pipeline`.
        """
        scheduled = self._schedule()
        running = self._scheduler.running
        self.away = {request.request_id for request in running if request.in_flight is not None}
        if scheduled:
            self._check(scheduled)
            return scheduled
        if left := [request.request_id for request in running if request.request_id not in self.away]:
            raise RuleError("left-out", f"running requests {left} were left out of a step that is empty")
        self._on_bubble()
        self.num_bubbles += bool(running)
        return scheduled

    def _check(self, scheduled: Sequence[ScheduledRequest]) -> None:
        again = [item.request.request_id for item in scheduled if item.request.request_id in self.away]
        if again or len(scheduled) > self._most:
            raise RuleError(
                "pipeline",
                f"a step of {len(scheduled)} requests, {self._most} at most, has {again or 'none'} of another step",
            )
        self.num_beside += bool(self.away)

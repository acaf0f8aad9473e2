"""The metrics that a user reads of a request, re-counted from what the steps ran."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from hybrid_kv.engine.llm import LLM, RequestOutput
from hybrid_kv.guard.step import Ran, RuleError


@dataclass
class _Counts:
    cached: int = 0
    admissions: int = 0
    drafts: int = 0
    accepted: int = 0


class Metrics:
    """Of each request by number."""

    def __init__(self, num_requests: int) -> None:
        self._counts = [_Counts() for _ in range(num_requests)]

    def admitted(self, number: int, num_cached: int) -> None:
        """A request starts, or starts again, behind so many cached tokens."""
        counts = self._counts[number]
        if not counts.admissions:
            counts.cached = num_cached
        counts.admissions += 1

    def ran(self, number: int, ran: Ran) -> None:
        """A step gave tokens; one behind the end of its request counts for nothing."""
        known = ran.item.num_computed_tokens + ran.item.num_tokens - ran.item.num_drafts
        if ran.tokens and known < ran.track.end:
            counts = self._counts[number]
            counts.drafts += ran.item.num_drafts
            counts.accepted += min(len(ran.tokens) - 1, ran.track.end - known)

    def check(self, llm: LLM, outputs: Sequence[RequestOutput]) -> None:
        """
        Raises:
            RuleError: `metrics`, an output says something else.
        """
        for counts, output in zip(self._counts, outputs, strict=True):
            if output.finish_reason in ("abort", "error"):
                continue  # Of its last step it may or may not have heard.
            said = output.cached_tokens, output.num_draft_tokens, output.num_accepted_draft_tokens
            due = counts.cached, counts.drafts, counts.accepted
            # Where steps are known late its last one may end while it waits to start again.
            starts = output.num_preemptions + 1 - counts.admissions
            if said != due or starts not in (0, llm.config.async_scheduling):
                raise RuleError(
                    "metrics",
                    f"request {output.request_id} says (cached tokens, drafts, accepted) {said}, preempted "
                    f"{output.num_preemptions} times; {due} ran, in {counts.admissions} admissions",
                )

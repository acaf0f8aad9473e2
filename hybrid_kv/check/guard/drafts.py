"""Rules of drafts: how many a step may verify, and which, from proposals and room alone."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import numpy.typing as npt

from hybrid_kv.check.guard.blocks import BlockDraftRules
from hybrid_kv.check.guard.step import RuleError, Track
from hybrid_kv.engine.llm import LLM
from hybrid_kv.kernels.common.integers import cdiv
from hybrid_kv.request import Request, ScheduledRequest


class DraftRules:
    """The rules of one engine's drafts.

    A verify step has all drafts of a request that were proposed, up to the first that is no token,
    but no more than K of the step that proposed them, than the request has room for before its last
    token, and than its share: of the step's budget one token is left for each running request after
    it, and of the rest each gets as much, rounded up. K follows from the number of requests in a
    step.

    Args:
        blocks: the rule of what a block drafter drafts, if that is the source.

    Attributes:
        num_strange: proposals that are too long, or that have something else than tokens.
        num_begun: steps that may propose drafts, after one that may not.
    """

    def __init__(
        self, llm: LLM, track_of: Callable[[Request], Track], blocks: BlockDraftRules | None = None
    ) -> None:
        self._llm = llm
        self._track = track_of
        self._blocks = blocks
        self._most = llm.config.speculative.num_speculative_tokens  # of the step scheduled last
        self._proposed: dict[str, tuple[int, list[int]]] = {}  # behind how many tokens, and which
        # Of requests whose step before was in flight: drafts with room.
        self._reserved: dict[str, int] = {}
        self.num_strange = 0
        self.num_begun = 0

    def on_propose(
        self,
        requests: Sequence[Request],
        token_ids: Sequence[npt.NDArray[np.int64]],
        num_tokens: npt.NDArray[np.int64],
        proposed: Sequence[Sequence[int]],
    ) -> None:
        """Keep what was proposed, and check the tokens that the proposer was shown.

        Raises:
            RuleError: `known-tokens`, a row lacks tokens of its request or has others; or
                `block-drafts`.
        """
        if self._blocks is not None:
            self._blocks.on_propose(requests, token_ids, num_tokens, proposed)
        for request, row, count in zip(requests, token_ids, num_tokens.tolist(), strict=True):
            sequence = self._track(request).sequence[:count]
            shown = row[:count].tolist()
            if len(shown) != count or shown[: len(sequence)] != sequence:
                raise RuleError(
                    "known-tokens",
                    f"a proposer is shown {len(shown)} tokens of request "
                    f"{request.request_id}, which has {count}: {shown}, not {sequence}",
                )
        size = self._llm.model.vocab_size
        for request, count, drafts in zip(requests, num_tokens.tolist(), proposed, strict=True):
            end = next((i for i, token in enumerate(drafts) if not 0 <= token < size), len(drafts))
            most = self._llm.config.speculative.num_speculative_tokens
            self.num_strange += end < len(drafts) or len(drafts) > most
            self._proposed[request.request_id] = count, list(drafts[: min(end, self._most)])

    def on_schedule(self, scheduled: Sequence[ScheduledRequest], has_preempted: bool) -> None:
        """Check how many drafts a step is to verify, and note how many it may propose.

        Args:
            has_preempted: a request lost its blocks for the step; how many shared its budget before
                is not known.

        Raises:
            RuleError: `runs-again` or `drafts-due`.
        """
        items = {item.request.request_id: item for item in scheduled}
        starting = {name for name, item in items.items() if item.overwrite}
        running = [
            request for request in self._llm.scheduler.running if request.request_id not in starting
        ]
        budget = self._llm.config.scheduler.max_num_batched_tokens
        self._reserved.clear()
        for place, request in enumerate(running):
            item = items.get(request.request_id)
            if item is None:
                continue
            others = len(running) - place - 1
            share = self._most if has_preempted else cdiv(budget - others - 1, others + 1)
            budget -= item.num_tokens
            room = self._room(request, request.num_tokens)
            if request.in_flight is not None and request.in_flight.samples:
                if room < 2:
                    raise RuleError(
                        "runs-again",
                        f"request {request.request_id} runs "
                        "behind the step that gives its last token",
                    )
                self._reserved[request.request_id] = item.num_drafts
                due = max(0, min(self._most, share, room - 2))
            else:
                due = len(self._due(item, request.num_tokens, min(share, room - 1)))
            num_drafts = item.num_drafts
            if num_drafts > due or (num_drafts < due and not has_preempted):
                raise RuleError(
                    "drafts-due",
                    f"request {request.request_id} is to run {num_drafts} "
                    f"drafts after {request.num_tokens} tokens, with room "
                    f"for {room} tokens and a share of {share}; {due} are due",
                )
        for name in starting:
            self._proposed.pop(name, None)
        before = self._most
        self._most = self._most_after(len(scheduled))
        self.num_begun += self._most > before == 0

    def on_prepare(self, batch: Sequence[ScheduledRequest]) -> None:
        """Check the drafts that a step verifies.

        Raises:
            RuleError: `drafts-due`.
        """
        for item in batch:
            request = item.request
            known = item.num_computed_tokens + 1
            most = item.num_drafts
            if request.request_id in self._reserved:
                most = min(self._reserved[request.request_id], self._room(request, known) - 1)
            due = self._due(item, known, most)
            if item.awaits_drafts or [*item.drafts] != due:
                raise RuleError(
                    "drafts-due",
                    f"request {request.request_id} verifies "
                    f"{item.drafts} after {known} tokens; {due} are due",
                )

    def _most_after(self, num_requests: int) -> int:
        """Return K of a step of so many requests: that of the last range that has begun."""
        config = self._llm.config.speculative
        begun = [
            count
            for first, _, count in config.num_speculative_tokens_per_batch_size
            if first <= num_requests
        ]
        return min([config.num_speculative_tokens, *begun[-1:]])

    def _room(self, request: Request, known: int) -> int:
        """Return how many tokens a request can get after so many."""
        last = min(
            self._track(request).prompt + request.params.max_tokens,
            self._llm.config.scheduler.max_model_len,
        )
        return last - known

    def _due(self, item: ScheduledRequest, known: int, most: int) -> list[int]:
        """Return the first `most` drafts after the known tokens.

        There are none unless the step runs the last known token and drafts alone.
        """
        behind, drafts = self._proposed.get(item.request.request_id, (0, []))
        is_decode = item.samples and item.num_tokens == 1 + item.num_drafts
        return drafts[: max(0, most)] if is_decode and behind == known else []

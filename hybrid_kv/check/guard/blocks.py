"""The rule of a block drafter's drafts: they are those of the same head without a cache.

No draft changes a token of a request, so a drafter that reads a slot of another request, or one
that was never written, shows in nothing but these.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence

import numpy as np
import numpy.typing as npt

from hybrid_kv.check.guard.scenario import Scenario, answer_book
from hybrid_kv.check.guard.step import RuleError, Track
from hybrid_kv.models.exact import BLOCK_HEADS
from hybrid_kv.request import Request


class BlockDraftRules:
    """The rule of one engine's block drafter, and the patterns that belong to it.

    Args:
        seen: counts the patterns.
    """

    def __init__(
        self, scenario: Scenario, track_of: Callable[[Request], Track], seen: Counter[str]
    ) -> None:
        self._book = answer_book(scenario.layers)
        self._track = track_of
        self._room = scenario.options["max_model_len"]
        self._seen = seen
        # Of the last proposal for each request: its admission, and the tokens that it reached.
        self._reached: dict[str, tuple[int, int]] = {}

    def on_propose(
        self,
        requests: Sequence[Request],
        token_ids: Sequence[npt.NDArray[np.int64]],
        num_tokens: npt.NDArray[np.int64],
        proposed: Sequence[Sequence[int]],
    ) -> None:
        """Compare drafts with those without a cache.

        Queries beyond the longest request have no slots, so drafts there may be anything.

        Raises:
            RuleError: `block-drafts`.
        """
        for request, known, drafts in zip(requests, num_tokens.tolist(), proposed, strict=True):
            track = self._track(request)
            if known + len(drafts) > self._room or known > len(track.sequence):
                continue
            due = self._book.drafts(track.sequence, known, len(drafts))
            if [*drafts] != due:
                raise RuleError(
                    "block-drafts",
                    f"request {request.request_id} gets the drafts {[*drafts]} after {known} "
                    f"tokens; {due} are due",
                )
            self._count(request, track, known, drafts)

    def _count(self, request: Request, track: Track, known: int, drafts: Sequence[int]) -> None:
        seen = self._seen
        admission, reached = self._reached.get(request.request_id, (0, 0))
        is_first = admission != track.admissions
        window = BLOCK_HEADS[self._book.model.config.head][0]
        following = track.sequence[known : known + len(drafts)]
        pairs = list(zip(drafts, following, strict=False))
        seen["block_accepted"] += bool(pairs) and pairs[0][0] == pairs[0][1]
        seen["block_rejected"] += any(draft != token for draft, token in pairs)
        seen["block_of_hit"] += is_first and known - track.hit < window and track.hit > 0
        seen["block_again"] += is_first and track.admissions > 1
        seen["block_paused"] += not is_first and known > reached
        seen["block_wider"] += len(drafts) > window
        self._reached[request.request_id] = track.admissions, known + len(drafts) + 1

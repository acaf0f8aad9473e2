"""Draft tokens from the request's own text."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from hybrid_kv.config import ConfigError


class NgramProposer:
    """Prompt lookup: the tokens that followed the last few when they occurred before.

    The longest suffix of `min_ngram` to `max_ngram` tokens that also ends earlier decides, and of
    its occurrences the *first* (vLLM's `NgramProposer`: the first is followed by the most tokens,
    so by the most drafts). An occurrence may overlap the suffix: after `1 1 1` comes `1`. vLLM also
    cuts drafts at `max_model_len`; here the scheduler does.
    """

    def __init__(self, num_speculative_tokens: int, max_ngram: int, min_ngram: int) -> None:
        if num_speculative_tokens < 1:
            raise ConfigError(
                f"num_speculative_tokens={num_speculative_tokens} must be >= 1 to propose anything"
            )
        if not 1 <= min_ngram <= max_ngram:
            raise ConfigError(f"min_ngram={min_ngram} must be in [1, max_ngram={max_ngram}]")
        self.num_speculative_tokens = num_speculative_tokens
        self.max_ngram = max_ngram
        self.min_ngram = min_ngram

    def propose(
        self,
        requests: Sequence[object],
        token_ids: Sequence[npt.NDArray[np.int64]],
        num_tokens: npt.NDArray[np.int64],
    ) -> list[list[int]]:
        """Return up to `num_speculative_tokens` drafts per row; none where nothing repeats.

        Args:
            requests: whose rows they are; not looked at.
            token_ids: of each row [width].
            num_tokens: [num_rows], known tokens of each row; after them lie stale drafts, which
                are never read.
        """
        return [
            self._propose_row(row[:n])
            for row, n in zip(token_ids, num_tokens.tolist(), strict=True)
        ]

    def _propose_row(self, tokens: npt.NDArray[np.int64]) -> list[int]:
        last = len(tokens) - 1
        if last < self.min_ngram:
            return []
        # Of matches of one token; then of longer ones.
        ends = np.flatnonzero(tokens[:last] == tokens[last])
        length = min(len(ends), 1)
        while length and length < self.max_ngram:
            longer = ends[ends >= length]
            longer = longer[tokens[longer - length] == tokens[last - length]]
            if not len(longer):
                break
            ends = longer
            length = length + 1
        if length < self.min_ngram:
            return []
        start = int(ends[0]) + 1
        return tokens[start : start + self.num_speculative_tokens].tolist()

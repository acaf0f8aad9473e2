"""The arrays of one step, as the host knows them before anything of it is on the device.

`StepInputs.from_batch` is the step's bookkeeping and nothing else: pure numpy, no buffer is written
and no device is asked.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from hybrid_kv.engine.state_cursor import StateCursor
from hybrid_kv.request import ScheduledRequest

Ints = npt.NDArray[np.int64]


@dataclass(frozen=True)
class StepInputs:
    """One step's batch: decodes first, then prefills.

    Padding rows are decodes of one token on the null block; they occur only in a step without
    prefills.

    Shapes: N = `num_reqs` requests, R = `num_reqs_padded` rows, T = `num_tokens` tokens, all of the
    arrays int64.

    Attributes:
        num_decodes: rows, padding included.
        rows: [N], of the engine.
        padded_rows: [R], -1 for padding.
        new_owners: places in the batch whose row has a new owner.
        query_lens: [R], tokens of each row; 1 for padding.
        num_computed_tokens: [R], before the step; 0 for padding.
        token_rows: [T], the row of the engine that each token is of.
        positions: [T], of each token in its request.
        state_block_idx: [R], logical blocks for the running states of this step.
        prev_state_block_idx: [R], those of the previous step; 0 for padding.
        window_rows: [R], where the windows begin in these; 0 for padding.
        num_gained: [R], tokens that rows have gained since their last step began; 0 for padding.
    """

    num_decodes: int
    rows: Ints
    padded_rows: Ints
    new_owners: list[int]
    query_lens: Ints
    num_computed_tokens: Ints
    token_rows: Ints
    positions: Ints
    state_block_idx: Ints
    prev_state_block_idx: Ints
    window_rows: Ints
    num_gained: Ints

    @classmethod
    def from_batch(
        cls, batch: Sequence[ScheduledRequest], cursors: StateCursor, captured_sizes: Sequence[int]
    ) -> StepInputs:
        """Return the arrays of a batch whose decodes come first.

        Args:
            cursors: as the previous step has left them.
            captured_sizes: rows to which a step of decodes alone is padded, in rising order.
        """
        num_reqs = len(batch)
        num_decodes = sum(item.is_decode for item in batch)
        num_rows = num_reqs
        if num_decodes == num_reqs:
            num_rows = padded_size(num_reqs, captured_sizes)
        padding = num_rows - num_reqs
        rows = np.array([item.request.row for item in batch], dtype=np.int64)
        lengths = np.array([item.num_tokens for item in batch], dtype=np.int64)
        computed = np.array([item.num_computed_tokens for item in batch], dtype=np.int64)
        query_lens = _padded(lengths, padding, 1)
        num_computed_tokens = _padded(computed, padding, 0)
        starts = np.cumsum(lengths) - lengths
        return cls(
            num_decodes=num_decodes + padding,
            rows=rows,
            padded_rows=_padded(rows, padding, -1),
            new_owners=[place for place, item in enumerate(batch) if item.overwrite],
            query_lens=query_lens,
            num_computed_tokens=num_computed_tokens,
            token_rows=np.repeat(rows, lengths),
            positions=np.arange(lengths.sum()) - np.repeat(starts - computed, lengths),
            state_block_idx=cursors.next_state_block_idx(num_computed_tokens, query_lens),
            prev_state_block_idx=_padded(cursors.state_block_idx[rows], padding, 0),
            window_rows=_padded(cursors.window_row[rows], padding, 0),
            num_gained=_padded(cursors.num_gained(rows, computed), padding, 0),
        )

    @property
    def num_reqs(self) -> int:
        return len(self.rows)

    @property
    def num_reqs_padded(self) -> int:
        return len(self.padded_rows)

    @property
    def num_tokens(self) -> int:
        return len(self.positions)

    @property
    def num_tokens_padded(self) -> int:
        return self.num_tokens + self.num_reqs_padded - self.num_reqs

    @property
    def num_decode_tokens(self) -> int:
        """Tokens of the decodes, padding included."""
        return int(self.query_lens[: self.num_decodes].sum())


def padded_size(num_reqs: int, captured_sizes: Sequence[int]) -> int:
    """Return the rows of a step of `num_reqs` decodes: the next captured size, or as many."""
    return next((size for size in captured_sizes if size >= num_reqs), num_reqs)


def _padded(values: Ints, padding: int, neutral: int) -> Ints:
    """Return [n] values with as many neutral ones after them."""
    if not padding:
        return values
    return np.concatenate([values, np.full(padding, neutral, dtype=np.int64)])

"""The places where the next step of each row finds its state.

Kept on the host, one entry for each row of the engine: it follows from lengths that the host knows,
so nothing is read back from the device. It dies with its owner: a new one starts from the end of
its hit (vllm!41233).
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from hybrid_kv.cache.spec import MambaSpec

Ints = npt.NDArray[np.int64]


class StateCursor:
    """The cursors of all rows of the engine, arrays [num_rows] int64.

    Args:
        spec: of the Mamba layers, if there are any. They have one block size, so one current state
            block serves all of their groups.

    Attributes:
        state_block_idx: logical block of the last step's running state, or of the boundary state
            that the next step starts from. It cannot be had from `num_computed_tokens`, which does
            not tell how many drafts were scheduled.
        window_row: where the next step's window begins in that logical block: as many rows in as
            drafts were accepted, 0 after a boundary copy.
        begin: tokens computed before the last step; what the request has gained since are the
            tokens that count of it.
    """

    def __init__(self, num_rows: int, spec: MambaSpec | None) -> None:
        self.spec = spec
        self.state_block_idx: Ints = np.zeros(num_rows, dtype=np.int64)
        self.window_row: Ints = np.zeros(num_rows, dtype=np.int64)
        self.begin: Ints = np.zeros(num_rows, dtype=np.int64)

    def restart(self, row: int, num_computed_tokens: int) -> None:
        """Start the cursor of a row's new owner, with so many tokens in the cache."""
        spec = self.spec
        last = max(0, num_computed_tokens - 1)
        self.state_block_idx[row] = (
            spec.mode.state_block_idx(last, spec.block_size) if spec is not None else 0
        )
        self.window_row[row] = 0
        self.begin[row] = num_computed_tokens

    def next_state_block_idx(self, num_computed_tokens: Ints, query_lens: Ints) -> Ints:
        """Return the current state blocks [n] of steps of `query_lens` more tokens.

        Zeros without Mamba layers.
        """
        spec = self.spec
        if spec is None:
            return np.zeros_like(query_lens)
        return spec.mode.state_block_idx(num_computed_tokens + query_lens - 1, spec.block_size)

    def num_gained(self, rows: Ints, num_computed_tokens: Ints) -> Ints:
        """Return the tokens [n] that rows have gained since their last step began.

        Rejected drafts do not count.
        """
        return num_computed_tokens - self.begin[rows]

    def advance(
        self, rows: Ints, num_computed_tokens: Ints, state_block_idx: Ints, window_rows: Ints
    ) -> None:
        """Take in a step that has run after `num_computed_tokens` tokens; all [n]."""
        self.begin[rows] = num_computed_tokens
        self.state_block_idx[rows] = state_block_idx
        self.window_row[rows] = window_rows

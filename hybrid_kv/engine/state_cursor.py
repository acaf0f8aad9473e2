"""The places where the next step of each row finds its state.

Kept on the host, one entry for each row of the engine: it follows from lengths that the host knows, so nothing is read
back from the device. It dies with its owner: a new one starts from the end of its hit (vllm!41233).
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from hybrid_kv.cache.spec import MambaSpec

Ints = npt.NDArray[np.int64]


class StateCursor:
    """For all rows of the engine, arrays [num_rows] int64.

    Attributes:
        current_block: logical block of the last step's running state, or of the boundary state that the next step
            starts from. It cannot be had from `num_computed_tokens`, which does not tell how many drafts were
            scheduled.
        window_row: where the next step's window begins in that logical block: as many rows in as drafts were accepted,
            0 behind a boundary copy.
        begin: tokens computed before the last step; what the request has gained since are the tokens that count of it.
    """

    def __init__(self, num_rows: int) -> None:
        self.current_block, self.window_row, self.begin = np.zeros((3, num_rows), dtype=np.int64)

    def restart(self, row: int, num_computed_tokens: int, spec: MambaSpec | None) -> None:
        """A new owner, with so many tokens in the cache."""
        last = max(0, num_computed_tokens - 1)
        self.current_block[row] = spec.mode.current_block(last, spec.block_size) if spec is not None else 0
        self.window_row[row] = 0
        self.begin[row] = num_computed_tokens

    def num_gained(self, rows: Ints, num_computed_tokens: Ints) -> Ints:
        """[n], tokens that rows have gained since their last step began; rejected drafts do not count."""
        return num_computed_tokens - self.begin[rows]

    def advance(self, rows: Ints, num_computed_tokens: Ints, current_blocks: Ints, window_rows: Ints) -> None:
        """A step has run behind `num_computed_tokens` tokens; all [n]."""
        self.begin[rows] = num_computed_tokens
        self.current_block[rows] = current_blocks
        self.window_row[rows] = window_rows

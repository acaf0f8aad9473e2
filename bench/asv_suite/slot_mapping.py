"""Token positions to cache slots, as every attention group of a step needs them."""

from __future__ import annotations

from bench import slot_mapping
from bench.harness.asv_classes import Grid, Timed

CELLS = slot_mapping.cells()


class Tokens(Timed):
    """`num_tokens` tokens, spread over 64 requests.

    With context parallelism they are as rank 1 sees them.
    """

    grid = Grid.of(CELLS, "tokens")
    params = grid.params
    param_names = grid.param_names
    version = grid.version

    def time_tokens(self, num_tokens: int, cp_size: int) -> None:
        self.run()

"""A step of the whole engine: what the host adds to a model."""

from __future__ import annotations

from bench import engine_step
from bench.harness.asv_classes import Counted, Grid, Timed

CELLS = engine_step.cells()


class DecodeBlock(Timed):
    """A block of decoded tokens of every request, in `BLOCK_SIZE // (1 + K)` steps.

    All drafts are right.
    """

    grid = Grid.of(CELLS, "decode_block")
    params = grid.params
    param_names = grid.param_names
    version = grid.version
    calls = 4

    def time_decode_block(self, mode: str, K: int, num_reqs: int) -> None:
        self.run()


class Operations(Counted):
    """Torch operations of one decode step of 4 requests.

    The model is a NemotronH with two Mamba layers and one of attention.
    """

    grid = Grid.of(CELLS, "operations")
    params = grid.params
    param_names = grid.param_names
    version = grid.version

    def track_operations(self, mode: str) -> float:
        return self.counts["operations"].value

    track_operations.unit = "operations"

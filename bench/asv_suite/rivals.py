"""Rivals of the engine, timed in turns with it.

They stand apart because asv has no samples of a ratio: `asv continuous` takes each change of more
than a tenth for one, and `-b SUITE` should tell of the engine alone.
"""

from __future__ import annotations

from bench import kernel_blocks
from bench.harness.asv_classes import Compared, Grid

CELLS = kernel_blocks.cells()


class Lead(Compared):
    """The time that a stand-in for vLLM takes for a step, as a multiple of the engine's.

    Both are timed in turns in one process.
    """

    grid = Grid.of(CELLS, "step")
    params = grid.rivals
    param_names = grid.param_names
    version = grid.version

    def track_ratio(self, scenario: str, blocks_per_kv_block: int, subject: str) -> float:
        return self.ratio()

    track_ratio.unit = "time ratio"

"""Blocks to host memory or a folder and back: attention and Mamba groups of two layers each."""

from __future__ import annotations

from bench import offload
from bench.harness.asv_classes import Grid, Timed

CELLS = offload.cells()


class Store(Timed):
    """Blocks that the tier lacks; what it had before is evicted."""

    grid = Grid.of(CELLS, "store")
    params = grid.params
    param_names = grid.param_names
    version = grid.version

    def time_store(self, tier: str, num_blocks: int) -> None:
        self.run()


class Load(Timed):
    """Fetch blocks from the tier and put them into other blocks of the pool."""

    grid = Grid.of(CELLS, "load")
    params = grid.params
    param_names = grid.param_names
    version = grid.version

    def time_load(self, tier: str, num_blocks: int) -> None:
        self.run()

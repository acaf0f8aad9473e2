"""Block tables of a step: ids staged and applied, rows as kernel blocks, tokens mapped to slots."""

from __future__ import annotations

from bench import block_tables
from bench.harness.asv_classes import Grid, Timed, TimedOnDevice

CELLS = block_tables.cells()


class Total(Timed):
    """The same in two equal groups of attention, and by others."""

    grid = Grid.of(CELLS, "total")
    params = grid.params
    param_names = grid.param_names
    version = grid.version
    calls = 8

    def time_total(self, scenario: str, subject: str) -> None:
        self.run()


class Step(Timed):
    """The engine's way on the CPU."""

    grid = Grid.of(CELLS, "step")
    params = grid.params
    param_names = grid.param_names
    version = grid.version
    calls = 8

    def time_step(self, model: str, step: str) -> None:
        self.run()


class UpdateKernel(TimedOnDevice):
    """The first of these steps as one launch."""

    grid = Grid.of(CELLS, "update_kernel")
    params = grid.params
    param_names = grid.param_names
    version = grid.version

    def time_launch_update_kernel(self, model: str, step: str) -> None:
        self.run()

    def time_update_kernel_sync(self, model: str, step: str) -> None:
        self.run_sync()

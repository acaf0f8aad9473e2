"""Block ids to kernel blocks: from a Python list on the host to int32 ids that a kernel can read.

`expand_counts` is not here: it counts in a process that it starts, which cannot import `bench`
under asv.
"""

from __future__ import annotations

from bench import kernel_blocks
from bench.harness.asv_classes import Grid, Timed, TimedOnDevice

CELLS = kernel_blocks.cells()


class Expand(Timed):
    """The host's part of a way."""

    grid = Grid.of(CELLS, "expand")
    params = grid.params
    param_names = grid.param_names
    version = grid.version

    def time_expand(self, num_ids: int, blocks_per_kv_block: int, subject: str) -> None:
        self.run()


class Step(Timed):
    """A whole step."""

    grid = Grid.of(CELLS, "step")
    params = grid.params
    param_names = grid.param_names
    version = grid.version
    calls = 8

    def time_step(self, scenario: str, blocks_per_kv_block: int, subject: str) -> None:
        self.run()


class ExpandDevice(TimedOnDevice):
    """Upload and launch; the host's part is done before."""

    grid = Grid.of(CELLS, "expand_device")
    params = grid.params
    param_names = grid.param_names
    version = grid.version

    def time_launch_expand_device(
        self, num_ids: int, blocks_per_kv_block: int, subject: str
    ) -> None:
        self.run()

    def time_expand_device_sync(self, num_ids: int, blocks_per_kv_block: int, subject: str) -> None:
        self.run_sync()

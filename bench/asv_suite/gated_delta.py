"""The gated delta rule of a delta net or a KDA layer.

A verify step of 1 + K tokens of each request, and a prefill.
"""

from __future__ import annotations

from bench import gated_delta
from bench.harness.asv_classes import Grid, Timed, TimedOnDevice

CELLS = gated_delta.cells()


class Update(Timed):
    """See `verify_step`."""

    grid = Grid.of(CELLS, "update")
    params = grid.params
    param_names = grid.param_names
    version = grid.version

    def time_update(self, model: str, num_reqs: int, K: int) -> None:
        self.run()


class UpdateKernel(TimedOnDevice):
    """See `verify_step`."""

    grid = Grid.of(CELLS, "update_kernel")
    params = grid.params
    param_names = grid.param_names
    version = grid.version

    def time_launch_update_kernel(self, model: str, num_reqs: int, K: int) -> None:
        self.run()

    def time_update_kernel_sync(self, model: str, num_reqs: int, K: int) -> None:
        self.run_sync()


class Prefill(Timed):
    """See `prefill`."""

    grid = Grid.of(CELLS, "prefill")
    params = grid.params
    param_names = grid.param_names
    version = grid.version

    def time_prefill(self, model: str, num_tokens: int) -> None:
        self.run()


class PrefillKernel(TimedOnDevice):
    """See `prefill`."""

    grid = Grid.of(CELLS, "prefill_kernel")
    params = grid.params
    param_names = grid.param_names
    version = grid.version

    def time_launch_prefill_kernel(self, model: str, num_tokens: int) -> None:
        self.run()

    def time_prefill_kernel_sync(self, model: str, num_tokens: int) -> None:
        self.run_sync()

"""The state update of a Mamba-2 layer's verify step, 1 + K tokens of each request.

It is measured in either scheme.
"""

from __future__ import annotations

from bench import state_update
from bench.harness.asv_classes import Grid, Timed, TimedOnDevice

CELLS = state_update.cells()


class Slots(Timed):
    """See `verify_step`."""

    grid = Grid.of(CELLS, "slots")
    params = grid.params
    param_names = grid.param_names
    version = grid.version

    def time_slots(self, model: str, num_reqs: int, K: int) -> None:
        self.run()


class Recompute(Timed):
    """A step that reads one state and the history of each request.

    With `flush` it also writes the state after the history.
    """

    grid = Grid.of(CELLS, "recompute")
    params = grid.params
    param_names = grid.param_names
    version = grid.version

    def time_recompute(self, model: str, num_reqs: int, K: int, flush: bool) -> None:
        self.run()


class SlotsKernel(TimedOnDevice):
    """See `verify_step`."""

    grid = Grid.of(CELLS, "slots_kernel")
    params = grid.params
    param_names = grid.param_names
    version = grid.version

    def time_launch_slots_kernel(self, model: str, num_reqs: int, K: int) -> None:
        self.run()

    def time_slots_kernel_sync(self, model: str, num_reqs: int, K: int) -> None:
        self.run_sync()


class RecomputeKernel(TimedOnDevice):
    """A step that reads one state and the history of each request.

    With `flush` it also writes the state after the history.
    """

    grid = Grid.of(CELLS, "recompute_kernel")
    params = grid.params
    param_names = grid.param_names
    version = grid.version

    def time_launch_recompute_kernel(self, model: str, num_reqs: int, K: int, flush: bool) -> None:
        self.run()

    def time_recompute_kernel_sync(self, model: str, num_reqs: int, K: int, flush: bool) -> None:
        self.run_sync()

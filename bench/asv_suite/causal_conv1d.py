"""The causal convolution of a Mamba-2 layer: a prefill chunk, and a verify step of 1 + K tokens."""

from __future__ import annotations

from bench import causal_conv1d
from bench.harness.asv_classes import Grid, Timed, TimedOnDevice

CELLS = causal_conv1d.cells()


class Prefill(Timed):
    """One request's chunk, behind a window of earlier tokens."""

    grid = Grid.of(CELLS, "prefill")
    params = grid.params
    param_names = grid.param_names
    version = grid.version

    def time_prefill(self, model: str, num_tokens: int) -> None:
        self.run()


class Update(Timed):
    """1 + K tokens of each request, from a window that the step before left at one of its rows."""

    grid = Grid.of(CELLS, "update")
    params = grid.params
    param_names = grid.param_names
    version = grid.version

    def time_update(self, model: str, num_reqs: int, K: int) -> None:
        self.run()


class PrefillKernel(TimedOnDevice):
    """Prompts back to back, each behind a window, whose last inputs are stored; bfloat16."""

    grid = Grid.of(CELLS, "prefill_kernel")
    params = grid.params
    param_names = grid.param_names
    version = grid.version

    def time_launch_prefill_kernel(self, model: str, num_tokens: int, num_reqs: int) -> None:
        self.run()

    def time_prefill_kernel_sync(self, model: str, num_tokens: int, num_reqs: int) -> None:
        self.run_sync()


class UpdateKernel(TimedOnDevice):
    """1 + K tokens of each request, from a window that the step before left at one of its rows."""

    grid = Grid.of(CELLS, "update_kernel")
    params = grid.params
    param_names = grid.param_names
    version = grid.version

    def time_launch_update_kernel(self, model: str, num_reqs: int, K: int) -> None:
        self.run()

    def time_update_kernel_sync(self, model: str, num_reqs: int, K: int) -> None:
        self.run_sync()

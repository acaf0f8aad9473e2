"""The output norm of a Mamba-2 layer: `weight * norm(x * silu(gate))`, by group of channels."""

from __future__ import annotations

from bench import gated_norm
from bench.harness.asv_classes import Grid, Timed, TimedOnDevice

CELLS = gated_norm.cells()


class Norm(Timed):
    """`norm` by the engine's layer, float32."""

    grid = Grid.of(CELLS, "norm")
    params = grid.params
    param_names = grid.param_names
    version = grid.version

    def time_norm(self, model: str, num_tokens: int) -> None:
        self.run()


class NormKernel(TimedOnDevice):
    """The norm of every token."""

    grid = Grid.of(CELLS, "norm_kernel")
    params = grid.params
    param_names = grid.param_names
    version = grid.version

    def time_launch_norm_kernel(self, model: str, num_tokens: int) -> None:
        self.run()

    def time_norm_kernel_sync(self, model: str, num_tokens: int) -> None:
        self.run_sync()

"""The chunked scan of a Mamba-2 prefill: all tokens of a chunk, and states at block boundaries."""

from __future__ import annotations

from bench import ssd
from bench.harness.asv_classes import Grid, Timed, TimedOnDevice

CELLS = ssd.cells()


class ChunkScan(Timed):
    """One request, in the model's chunks, from a state.

    The states are those after half of its tokens and after all.
    """

    grid = Grid.of(CELLS, "chunk_scan")
    params = grid.params
    param_names = grid.param_names
    version = grid.version

    def time_chunk_scan(self, model: str, num_tokens: int) -> None:
        self.run()


class ChunkScanKernel(TimedOnDevice):
    """Bfloat16 activations."""

    grid = Grid.of(CELLS, "chunk_scan_kernel")
    params = grid.params
    param_names = grid.param_names
    version = grid.version

    def time_launch_chunk_scan_kernel(self, model: str, num_tokens: int, num_reqs: int) -> None:
        self.run()

    def time_chunk_scan_kernel_sync(self, model: str, num_tokens: int, num_reqs: int) -> None:
        self.run_sync()

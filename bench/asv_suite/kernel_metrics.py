"""What a few Triton kernels compile to: exact for one Triton version."""

from __future__ import annotations

from bench import kernel_metrics
from bench.harness.asv_classes import Counted, Grid

CELLS = kernel_metrics.cells()


class Compiled(Counted):
    """Registers, spills, shared memory and instructions at the shape of one model."""

    grid = Grid.of(CELLS, "compiled")
    params = grid.params
    param_names = grid.param_names
    version = grid.version

    def track_registers(self, kernel: str, target: str) -> float:
        return self.counts["registers"].value

    track_registers.unit = "registers"

    def track_spill_bytes(self, kernel: str, target: str) -> float:
        return self.counts["spill_bytes"].value

    track_spill_bytes.unit = "B"

    def track_shared_bytes(self, kernel: str, target: str) -> float:
        return self.counts["shared_bytes"].value

    track_shared_bytes.unit = "B"

    def track_blocks_per_sm(self, kernel: str, target: str) -> float:
        return self.counts["blocks_per_sm"].value

    track_blocks_per_sm.unit = "blocks"

    def track_instructions(self, kernel: str, target: str) -> float:
        return self.counts["instructions"].value

    track_instructions.unit = "instructions"

"""Counts of what a step costs its host on a GPU: the guard model runs on the pretend device."""

from __future__ import annotations

from bench import device
from bench.harness.asv_classes import Counted, Grid

CELLS = device.cells()


class Steps(Counted):
    """The largest counts of any such step, and whether each step of decodes can be replayed."""

    grid = Grid.of(CELLS, "steps")
    params = grid.params
    param_names = grid.param_names
    version = grid.version

    def track_launches(self, kernels: str, mode: str, scheme: str, K: int, step: str) -> float:
        return self.counts["launches"].value

    track_launches.unit = "launches"

    def track_waits(self, kernels: str, mode: str, scheme: str, K: int, step: str) -> float:
        return self.counts["waits"].value

    track_waits.unit = "waits"

    def track_uploads(self, kernels: str, mode: str, scheme: str, K: int, step: str) -> float:
        return self.counts["uploads"].value

    track_uploads.unit = "copies"

    def track_upload_bytes(self, kernels: str, mode: str, scheme: str, K: int, step: str) -> float:
        return self.counts["upload_bytes"].value

    track_upload_bytes.unit = "B"

    def track_allocations(self, kernels: str, mode: str, scheme: str, K: int, step: str) -> float:
        return self.counts["allocations"].value

    track_allocations.unit = "allocations"

    def track_launches_per_mamba_layer(
        self, kernels: str, mode: str, scheme: str, K: int, step: str
    ) -> float:
        return self.counts["launches_per_mamba_layer"].value

    track_launches_per_mamba_layer.unit = "launches"

    def track_launches_per_attention_layer(
        self, kernels: str, mode: str, scheme: str, K: int, step: str
    ) -> float:
        return self.counts["launches_per_attention_layer"].value

    track_launches_per_attention_layer.unit = "launches"

    def track_launches_of_tables(
        self, kernels: str, mode: str, scheme: str, K: int, step: str
    ) -> float:
        return self.counts["launches_of_tables"].value

    track_launches_of_tables.unit = "launches"

    def track_launches_of_sampling(
        self, kernels: str, mode: str, scheme: str, K: int, step: str
    ) -> float:
        return self.counts["launches_of_sampling"].value

    track_launches_of_sampling.unit = "launches"

    def track_capturable(self, kernels: str, mode: str, scheme: str, K: int, step: str) -> float:
        return self.counts["capturable"].value

    track_capturable.unit = ""


class Cached(Counted):
    """The largest counts of any such step, and whether each step of decodes can be replayed."""

    grid = Grid.of(CELLS, "cached")
    params = grid.params
    param_names = grid.param_names
    version = grid.version

    def track_launches(self, kernels: str, mode: str, scheme: str, K: int, step: str) -> float:
        return self.counts["launches"].value

    track_launches.unit = "launches"

    def track_waits(self, kernels: str, mode: str, scheme: str, K: int, step: str) -> float:
        return self.counts["waits"].value

    track_waits.unit = "waits"

    def track_uploads(self, kernels: str, mode: str, scheme: str, K: int, step: str) -> float:
        return self.counts["uploads"].value

    track_uploads.unit = "copies"

    def track_upload_bytes(self, kernels: str, mode: str, scheme: str, K: int, step: str) -> float:
        return self.counts["upload_bytes"].value

    track_upload_bytes.unit = "B"

    def track_allocations(self, kernels: str, mode: str, scheme: str, K: int, step: str) -> float:
        return self.counts["allocations"].value

    track_allocations.unit = "allocations"

    def track_launches_per_mamba_layer(
        self, kernels: str, mode: str, scheme: str, K: int, step: str
    ) -> float:
        return self.counts["launches_per_mamba_layer"].value

    track_launches_per_mamba_layer.unit = "launches"

    def track_launches_per_attention_layer(
        self, kernels: str, mode: str, scheme: str, K: int, step: str
    ) -> float:
        return self.counts["launches_per_attention_layer"].value

    track_launches_per_attention_layer.unit = "launches"

    def track_launches_of_tables(
        self, kernels: str, mode: str, scheme: str, K: int, step: str
    ) -> float:
        return self.counts["launches_of_tables"].value

    track_launches_of_tables.unit = "launches"

    def track_launches_of_sampling(
        self, kernels: str, mode: str, scheme: str, K: int, step: str
    ) -> float:
        return self.counts["launches_of_sampling"].value

    track_launches_of_sampling.unit = "launches"

    def track_capturable(self, kernels: str, mode: str, scheme: str, K: int, step: str) -> float:
        return self.counts["capturable"].value

    track_capturable.unit = ""


class OnTorch(Counted):
    """The largest counts of any such step, and whether each step of decodes can be replayed."""

    grid = Grid.of(CELLS, "on_torch")
    params = grid.params
    param_names = grid.param_names
    version = grid.version

    def track_launches(self, kernels: str, mode: str, scheme: str, K: int, step: str) -> float:
        return self.counts["launches"].value

    track_launches.unit = "launches"

    def track_waits(self, kernels: str, mode: str, scheme: str, K: int, step: str) -> float:
        return self.counts["waits"].value

    track_waits.unit = "waits"

    def track_uploads(self, kernels: str, mode: str, scheme: str, K: int, step: str) -> float:
        return self.counts["uploads"].value

    track_uploads.unit = "copies"

    def track_upload_bytes(self, kernels: str, mode: str, scheme: str, K: int, step: str) -> float:
        return self.counts["upload_bytes"].value

    track_upload_bytes.unit = "B"

    def track_allocations(self, kernels: str, mode: str, scheme: str, K: int, step: str) -> float:
        return self.counts["allocations"].value

    track_allocations.unit = "allocations"

    def track_launches_per_mamba_layer(
        self, kernels: str, mode: str, scheme: str, K: int, step: str
    ) -> float:
        return self.counts["launches_per_mamba_layer"].value

    track_launches_per_mamba_layer.unit = "launches"

    def track_launches_per_attention_layer(
        self, kernels: str, mode: str, scheme: str, K: int, step: str
    ) -> float:
        return self.counts["launches_per_attention_layer"].value

    track_launches_per_attention_layer.unit = "launches"

    def track_launches_of_tables(
        self, kernels: str, mode: str, scheme: str, K: int, step: str
    ) -> float:
        return self.counts["launches_of_tables"].value

    track_launches_of_tables.unit = "launches"

    def track_launches_of_sampling(
        self, kernels: str, mode: str, scheme: str, K: int, step: str
    ) -> float:
        return self.counts["launches_of_sampling"].value

    track_launches_of_sampling.unit = "launches"

    def track_capturable(self, kernels: str, mode: str, scheme: str, K: int, step: str) -> float:
        return self.counts["capturable"].value

    track_capturable.unit = ""

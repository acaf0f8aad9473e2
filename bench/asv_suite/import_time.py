"""Costs of `import`: the project's own modules, and those of others that they bring along."""

from __future__ import annotations

from bench import import_time
from bench.harness.asv_classes import Counted, Grid, Timed

CELLS = import_time.cells()


class Again(Timed):
    """An import of the entry and of the project's modules that it needs; torch is there already."""

    grid = Grid.of(CELLS, "again")
    params = grid.params
    param_names = grid.param_names
    version = grid.version
    calls = 1

    def time_again(self, entry: str) -> None:
        self.run()


class Modules(Counted):
    """Modules in a new process after the import: the project's, and those that should come late."""

    grid = Grid.of(CELLS, "modules")
    params = grid.params
    param_names = grid.param_names
    version = grid.version

    def track_own_modules(self, entry: str) -> float:
        return self.counts["own_modules"].value

    track_own_modules.unit = "modules"

    def track_late_packages(self, entry: str) -> float:
        return self.counts["late_packages"].value

    track_late_packages.unit = "packages"

"""A step of the scheduler and the cache manager: which tokens run, and which blocks they get."""

from __future__ import annotations

from bench import scheduler
from bench.harness.asv_classes import Grid, Timed

CELLS = scheduler.cells()


class Decode(Timed):
    """Decodes of a block of tokens by every request, so that every call completes one.

    All drafts are accepted.
    """

    grid = Grid.of(CELLS, "decode")
    params = grid.params
    param_names = grid.param_names
    version = grid.version
    calls = 8

    def time_decode(self, mode: str, K: int, num_reqs: int) -> None:
        self.run()


class Admit(Timed):
    """All requests are admitted in one step: lookup, blocks of the whole prompt, rows."""

    grid = Grid.of(CELLS, "admit")
    params = grid.params
    param_names = grid.param_names
    version = grid.version
    calls = 1

    def time_admit(self, mode: str, K: int, num_reqs: int) -> None:
        self.run()

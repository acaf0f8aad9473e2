"""Finding the longest cached prefix of a prompt, and hashing it."""

from __future__ import annotations

from bench import prefix_lookup
from bench.harness.asv_classes import Grid, Timed

CELLS = prefix_lookup.cells()


class Hit(Timed):
    """A prompt whose first tokens ran before; `shared` is how much of it.

    Its hashes are known, as when it waits.
    """

    grid = Grid.of(CELLS, "hit")
    params = grid.params
    param_names = grid.param_names
    version = grid.version

    def time_hit(self, mode: str, num_tokens: int, shared: str) -> None:
        self.run()


class Hash(Timed):
    """The chain of a whole prompt."""

    grid = Grid.of(CELLS, "hash")
    params = grid.params
    param_names = grid.param_names
    version = grid.version

    def time_hash(self, num_tokens: int) -> None:
        self.run()

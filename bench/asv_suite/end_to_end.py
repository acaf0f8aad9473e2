"""`LLM.generate`: prompts in, tokens out, with tiny models."""

from __future__ import annotations

from bench import end_to_end
from bench.harness.asv_classes import Grid, Timed, made

CELLS = end_to_end.cells()


class Exact(Timed):
    """The exact model, 16 tokens each, all drafts right."""

    grid = Grid.of(CELLS, "exact")
    params = grid.params
    param_names = grid.param_names
    version = grid.version
    calls = 1

    def time_exact(self, mode: str, K: int, num_reqs: int) -> None:
        self.run()


class Nemotron(Timed):
    """A tiny NemotronH, 8 tokens each, against a recomputation of the whole text for each."""

    grid = Grid.of(CELLS, "nemotron")
    params = grid.params
    param_names = grid.param_names
    version = grid.version
    calls = 1

    def time_nemotron(self, mode: str, num_reqs: int) -> None:
        self.run()


class Memory:
    """Peaks of a process; that of one which only imports everything is there to be subtracted."""

    params = (["reference", "none", "align", "all"],)
    param_names = ("mode",)
    timeout = 120

    def peakmem_generate(self, mode: str) -> None:
        if mode != "reference":
            made(Nemotron.grid.cell(mode, 4)).run()

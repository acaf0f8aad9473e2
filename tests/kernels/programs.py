"""Which programs of a launch run in Triton's interpreter, and in which order: on a GPU they have none."""

from contextlib import contextmanager
from unittest.mock import patch


def backwards(grid):
    return [(x, y) for x in reversed(range(grid[0])) for y in reversed(range(grid[1]))]


@contextmanager
def programs(select):
    """Each launch runs only the programs `select((x, y))` of its grid, in that order; yields the list of all grids."""
    from triton.runtime.interpreter import GridExecutor, InterpreterBuilder

    set_index, launch, grids = InterpreterBuilder.set_grid_idx, GridExecutor.__call__, []

    def launch_selected(self, *args, **kwargs):
        x, y = (*self.grid, 1)[:2]
        grids.append(self.grid)
        chosen = select((x, y))
        self.grid, remaining = (len(chosen),), iter(chosen)

        def set_chosen(builder, *_):
            builder.grid_dim = (x, y, 1)
            set_index(builder, *next(remaining), 0)

        with patch.object(InterpreterBuilder, "set_grid_idx", set_chosen):
            return launch(self, *args, **kwargs)

    with patch.object(GridExecutor, "__call__", launch_selected):
        yield grids

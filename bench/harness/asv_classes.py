"""Classes for `bench/asv_suite/`: a case of the registry, built once and reset before each sample.

asv (asv_runner >= 0.3) calls `setup` before every sample and `teardown` after it. The first `setup`
of a process builds the case and checks its result, the later ones only reset it; each `teardown`
checks again. A sample is `calls` calls in a row: a single one of a microsecond would be mostly the
reading of the clock. The other class attributes are asv's own.
"""

from __future__ import annotations

import ast
import inspect
import textwrap
import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from bench.harness.cells import Case, Cell, Counts, Scalar
from hybrid_kv.measure.timing.case import ENGINE, checked
from hybrid_kv.measure.timing.clock import clock, ratio, wall_clock

# A second thread makes the times of small tensors bimodal: 0.25 or 8 ms were seen.
torch.set_num_threads(1)
RATIO_ROUNDS = 25


@dataclass(frozen=True)
class Grid:
    """The cells of one benchmark: what asv calls `params`, `param_names` and `version`."""

    cells: tuple[Cell, ...]

    @classmethod
    def of(cls, cells: Sequence[Cell], benchmark: str) -> Grid:
        """Return the cells of that benchmark."""
        return cls(tuple(cell for cell in cells if cell.benchmark == benchmark))

    @property
    def rivals(self) -> list[list[Scalar]]:
        """Return the values of each parameter, without the engine among the subjects."""
        return [[value for value in values if value != ENGINE] for values in self.params]

    @property
    def param_names(self) -> list[str]:
        return list(self.cells[0].params)

    @property
    def params(self) -> list[list[Scalar]]:
        """Return the values of each parameter."""
        return [
            list(dict.fromkeys(cell.params[name] for cell in self.cells))
            for name in self.param_names
        ]

    @property
    def version(self) -> str:
        """Return a digest of the function that builds a case: edited, it starts a new history.

        Its layout, its comments and its docstrings may change.
        """
        build: Any = self.cells[0].make
        while hasattr(build, "func"):
            build = build.func
        return f"{zlib.crc32(code_of(build).encode()):08x}"

    def cell(self, *values: Scalar) -> Cell:
        """Return the cell with these values of the parameters."""
        return next(cell for cell in self.cells if tuple(cell.params.values()) == values)


def code_of(function: Callable[..., Any]) -> str:
    """Return the code of a function, without its layout, its comments and its docstrings."""
    tree = ast.parse(textwrap.dedent(inspect.getsource(function)))
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef) and ast.get_docstring(node) is not None:
            node.body[0] = ast.Pass()
    return ast.unparse(tree)


def made(cell: Cell) -> Any:
    """Return the cell's case or counts.

    Raises:
        NotImplementedError: the machine has no GPU, or this `hybrid_kv` lacks an interface. asv
            takes it for a skip.
    """
    if cell.tier == "gpu" and not torch.cuda.is_available():
        raise NotImplementedError("no GPU")
    try:
        return cell.make()
    except (ImportError, AttributeError, TypeError) as error:
        raise NotImplementedError(f"this hybrid_kv lacks what {cell.key} needs: {error}") from error


_cases: dict[str, Case] = {}


def prepared(cell: Cell) -> Case:
    """Return the cell's case, built and checked by the first call in this process.

    Raises:
        NotImplementedError: see `made`.
        WrongResultError: the result is wrong.
    """
    if cell.key not in _cases:
        case = made(cell)
        checked(cell.key, case)
        _cases[cell.key] = case
    return _cases[cell.key]


class Timed:
    """A case that is timed on the host."""

    timer = clock  # A busy neighbour moves asv's default, the wall clock: docs/measuring.md.
    # A sample of each of four processes: where the clock of a core changes for seconds at a time,
    # all samples of one process are of one pace. `asv continuous` takes the commits in turns.
    rounds = 4
    repeat = 1
    warmup_time = 0.05
    timeout = 120
    calls = 10
    grid: Grid
    case: Case | None = None  # stays so where `setup` let asv skip it

    def setup(self, *values: Scalar) -> None:
        self.case = prepared(self.grid.cell(*values))
        self.case.reset()

    def teardown(self, *values: Scalar) -> None:
        if self.case is not None:
            checked(self.grid.cell(*values).key, self.case)

    def run(self) -> None:
        """Run the calls of one sample."""
        assert self.case is not None
        run = self.case.run
        for _ in range(self.calls):
            run()


class TimedOnDevice(Timed):
    """A case that launches kernels: timed by the wall clock, one call a sample."""

    timer = wall_clock
    calls = 1

    def setup(self, *values: Scalar) -> None:
        super().setup(*values)
        torch.cuda.synchronize()

    def teardown(self, *values: Scalar) -> None:
        if self.case is not None:
            torch.cuda.synchronize()
        super().teardown(*values)

    def run_sync(self) -> None:
        """Run the call of one sample and wait for the device."""
        self.run()
        torch.cuda.synchronize()


class Counted:
    """A cell of exact numbers."""

    timeout = 120
    grid: Grid
    counts: Counts

    def setup(self, *values: Scalar) -> None:
        self.counts = made(self.grid.cell(*values))


class Compared:
    """A rival of the engine, timed in turns with it: whatever slows the machine slows both."""

    timeout = 120
    grid: Grid  # the last parameter is the subject
    cases: dict[str, Case]

    def setup(self, *values: Scalar) -> None:
        *shape, _ = values
        self.cases = {
            "rival": made(self.grid.cell(*values)),
            ENGINE: made(self.grid.cell(*shape, ENGINE)),
        }

    def ratio(self) -> float:
        """Return how many times as long as the engine the rival takes, checked before and after."""
        from hybrid_kv.measure.timing.together import time_together

        timed = time_together(self.cases, RATIO_ROUNDS)
        return ratio(timed["rival"].samples, timed[ENGINE].samples).value

"""Cells: one benchmark with one set of parameters, which makes a `Case` or exact `Counts`.

A cell is cheap to list and builds its data in `make()`:

- tier `cpu` or `gpu`: a `Case`. Its result is checked before and after it is timed.
- tier `count`: `Counts`, exact numbers (bytes, blocks, launches …) that no clock enters: equal
  code, equal numbers.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import product
from typing import Any, NamedTuple

from hybrid_kv.measure.timing.case import TimedCase
from hybrid_kv.measure.timing.case import WrongResultError as WrongResultError  # exported here, too
from hybrid_kv.measure.timing.case import nothing as nothing

Case = TimedCase  # the name that benchmarks use
TIERS = ("count", "cpu", "gpu")
Scalar = str | int | float | bool


class Count(NamedTuple):
    """An exact number."""

    value: int
    unit: str
    better: str = (
        "lower"  # or `higher`, or `equal` where a change in either direction is only a change
    )


Counts = dict[str, Count]  # by metric


@dataclass(frozen=True)
class CellInfo:
    """One benchmark with one set of parameters: what a process knows of it that cannot run it."""

    suite: str
    benchmark: str
    params: Mapping[str, Scalar]
    tier: str

    @property
    def key(self) -> str:
        """Return a stable name, such as `state_update/slots[model=nemotron-3-nano-tp8,K=3]`."""
        params = ",".join(f"{name}={value}" for name, value in self.params.items())
        return f"{self.suite}/{self.benchmark}[{params}]"


@dataclass(frozen=True)
class Cell(CellInfo):
    """A benchmark with one set of parameters that this process can run.

    Attributes:
        make: a `Case`, or `Counts` in tier `count`.
        quick: part of a quick run; such cells are few and small, and touch every suite.
        promise: set if the cell is a rival, there to be compared with the subject `engine` of the
            same parameters: how many times as long as that it must take; 0: it may take less, as it
            does less. No history or comparison of versions needs rivals.
        units: of every metric, in tier `count`; a cell may lack one of them.
    """

    make: Callable[[], Any] = field(compare=False, repr=False)
    quick: bool = False
    promise: float | None = None
    units: Mapping[str, str] = field(default_factory=dict, compare=False)


def seed(benchmark: str, params: Mapping[str, Scalar]) -> int:
    """Return the seed of a cell's data.

    It is the same in every process and version, and for rivals of one cell.
    """
    return zlib.crc32(
        repr((benchmark, sorted(item for item in params.items() if item[0] != "subject"))).encode()
    )


def grid(
    suite: str,
    benchmark: str,
    tier: str,
    build: Callable[..., Any],
    values: Mapping[str, Sequence[Scalar]],
    quick: Collection[tuple[Scalar, ...]] = (),
    *,
    units: Mapping[str, str] | None = None,
) -> Iterator[Cell]:
    """Return a cell for every combination of parameter values.

    `build(seed, **params)` makes its case or counts.

    Args:
        quick: beginnings of the combinations that belong to a quick run.
        units: see `Cell`.
    """
    for combination in product(*values.values()):
        params = dict(zip(values, combination, strict=True))
        make = partial(build, seed(benchmark, params), **params)
        is_quick = any(combination[: len(start)] == start for start in quick)
        yield Cell(suite, benchmark, params, tier, make, is_quick, units=units or {})


def promised(promise: Callable[..., float | None], cells: Iterable[Cell]) -> Iterator[Cell]:
    """Yield cells with what is promised of each, by its parameters."""
    for cell in cells:
        yield replace(cell, promise=promise(**cell.params))

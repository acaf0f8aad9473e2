"""Benchmarks that are right, and one that is right only so many times."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from bench.harness.cells import Case, Cell, WrongResultError


def cell(
    make: Callable[[], Any] | None, tier: str = "cpu", promise: float | None = None, **params: Any
) -> Cell:
    return Cell(
        "offload",
        "b",
        params,
        tier,
        make,
        quick=True,
        promise=promise,
        units={"blocks": "blocks"} if tier == "count" else {},
    )


def steady(error: float = 0.0) -> Case:
    return Case(lambda: None, lambda: error)


def failing_after(count: int, error: float | None = None) -> Case:
    """Right `count` times; then beyond its tolerance, or with this error."""
    left = [count]

    def check() -> float:
        left[0] -= 1
        if left[0] >= 0:
            return 0.0
        if error is None:
            raise WrongResultError("the injected mistake")
        return error

    return Case(lambda: None, check)

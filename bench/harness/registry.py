"""The suites of `bench/`.

asv, `python -m bench`, pytest-benchmark and `hybrid-kv compare` share them.

A suite is a module that defines `cells() -> list[Cell]`. It is found by reading its source, not by
importing it: what this `hybrid_kv` lacks the code for, or an optional dependency, is still known by
name, and why it has no cells is said. Cells name what they need of `hybrid_kv` where they are
imported or made, so today's benchmarks run with an older one.
"""

from __future__ import annotations

import importlib
import pkgutil
import re

import bench
from bench.harness.cells import Cell


def suites(defining: str = "cells") -> tuple[str, ...]:
    """Return the modules of `bench` that define a function `cells`, or another, by their names.

    They are in alphabetical order.
    """
    found = []
    for module in pkgutil.iter_modules(bench.__path__):
        source = module.module_finder.find_spec(module.name).loader.get_source(module.name)
        if not module.ispkg and re.search(rf"^def {defining}\(", source, re.MULTILINE):
            found.append(module.name)
    return tuple(found)


def _load() -> tuple[list[Cell], dict[str, str]]:
    found: list[Cell] = []
    reasons: dict[str, str] = {}
    for suite in suites():
        try:
            found += importlib.import_module(f"bench.{suite}").cells()
        except (ImportError, AttributeError) as error:
            reasons[suite] = f"{type(error).__name__}: {error}"
    return found, reasons


def cells(quick: bool = False) -> list[Cell]:
    """Return all cells of all suites that this `hybrid_kv` has the code for.

    GPU cells are among them also where there is no GPU.
    """
    return [cell for cell in _load()[0] if cell.quick or not quick]


def unavailable() -> dict[str, str]:
    """Return the suites without cells, and why they have none."""
    return _load()[1]

"""Costs of `import`: the project's own modules, and those of others that they bring along."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from importlib import import_module
from types import ModuleType

from bench.harness.cells import Case, Cell, Count, Counts, WrongResultError, grid

ENTRIES = ("hybrid_kv", "hybrid_kv.cli", "hybrid_kv.cache.manager", "hybrid_kv.engine.llm")
UNITS = {"own_modules": "modules", "late_packages": "packages"}
LATE = (
    "triton",
    "numba",
    "pandas",
    "duckdb",
    "transformers",
    "lm_eval",
    "playwright",
)  # none before it is needed


def _own() -> dict[str, ModuleType]:
    return {
        name: module
        for name, module in sys.modules.items()
        if name.partition(".")[0] == "hybrid_kv"
    }


def again(seed: int, entry: str) -> Case:
    """Build a case that imports the entry and all of the project's modules that it needs.

    torch and others are there already.
    """
    import_module(entry)

    def fresh(look: Callable[[], object]) -> None:
        """Call `look` with the process's modules forgotten; they come back afterwards.

        The new ones are forgotten.
        """
        kept = _own()
        for name in kept:
            del sys.modules[name]
        try:
            import_module(entry)
            look()
        finally:
            for name in _own():
                del sys.modules[name]
            sys.modules.update(kept)

    def check() -> float:
        def compare() -> None:
            made = _own()
            if entry not in made or any(
                module is before.get(name) for name, module in made.items()
            ):
                raise WrongResultError(f"{entry} was not imported again")

        before = _own()
        fresh(compare)
        if _own() != before:
            raise WrongResultError("the modules of before did not come back")
        return 0.0

    return Case(lambda: fresh(lambda: None), check)


def modules(seed: int, entry: str) -> Counts:
    """Count the modules in a new process after the import.

    They are the project's own and those that should come late.
    """
    look = f"import json, sys, {entry}; print(json.dumps(sorted(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", look], capture_output=True, text=True, check=True)
    names = json.loads(done.stdout)
    tops = {name.partition(".")[0] for name in names}
    own = sum(name.partition(".")[0] == "hybrid_kv" for name in names)
    return {
        "own_modules": Count(own, "modules"),
        "late_packages": Count(len(tops & set(LATE)), "packages"),
    }


def cells() -> list[Cell]:
    """Return the cells of the package, the command line, the cache alone and the engine."""
    values = {"entry": ENTRIES}
    return [
        *grid("import_time", "again", "cpu", again, values, [("hybrid_kv.cache.manager",)]),
        *grid("import_time", "modules", "count", modules, values, [("hybrid_kv",)], units=UNITS),
    ]

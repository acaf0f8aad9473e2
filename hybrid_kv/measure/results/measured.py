"""The files of a checkout that a suite measures.

A run counts for HEAD as long as none of them has changed.

They follow from the import statements at HEAD, those in functions too, from the suite's own module
on; each package on the way brings its data. What was deleted needs no care: the file that imported
it has changed, too.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence

CODE = ("hybrid_kv", "bench", "mutants")
IMPORTS = rf"^ *(from|import) ({'|'.join(CODE)})\b"  # for `git grep -E`
_STATEMENT = re.compile(r"(?:from|import) ([\w.]+)(?: import (\(|[\w, ]+))?")
# Names the engine's classes for users, and imports them when they are first used.
_DOOR = "hybrid_kv/__init__.py"
_WRITERS = "hybrid_kv/measure/results/"  # write rows, whatever was measured
NO_CODE = (":!results", ":!docs", ":!*.md")  # what no suite runs
# Files of suites that are no module of `bench`, by how their names begin.
ENTRIES = {
    "guard": ("hybrid_kv/check/guard/",),
    "swarm": ("hybrid_kv/check/guard/",),
    "accuracy": ("hybrid_kv/measure/accuracy/",),
    "kernels": ("hybrid_kv/kernels/", "bench/static/"),
}
CLOCKS = ("bench/harness/measurement.py", "hybrid_kv/measure/timing/")  # of every suite of `bench`


def measured_paths(suite: str, files: Sequence[str], imports: Iterable[str]) -> list[str]:
    """Files that a suite measures, in order; all code if no module has its name.

    Args:
        files: of the checkout.
        imports: lines `FILE:STATEMENT` from them, such as `bench/ssd.py:from hybrid_kv.kernels
            import ssd`.
    """
    module = f"bench/{suite}.py"
    if suite not in ENTRIES and module not in files:
        return [".", *NO_CODE]
    entries = ENTRIES.get(suite, (module, *CLOCKS))
    reached = _reached(
        [file for file in files if file.startswith(entries)], _needs(frozenset(files), imports)
    )
    packages = {file.rpartition("/")[0] for file in reached}
    data = [
        file
        for file in files
        if not file.endswith((".py", ".md")) and _package(file, files) in packages
    ]
    return sorted({*reached, *data})


def _reached(entries: Sequence[str], needs: Mapping[str, set[str]]) -> set[str]:
    reached: set[str] = set()
    waiting = [file for file in entries if file.endswith(".py")]
    while waiting:
        file = waiting.pop()
        if file not in reached:
            reached.add(file)
            waiting += needs.get(file, ())
    return reached


def _needs(files: frozenset[str], imports: Iterable[str]) -> dict[str, set[str]]:
    """Files that each file imports."""
    needs: dict[str, set[str]] = {}
    for line in imports:
        file, _, statement = line.partition(":")
        match = _STATEMENT.search(statement)
        if match and file != _DOOR:
            needs.setdefault(file, set()).update(_imported(match[1], match[2] or "", files))
    return needs


def _imported(module: str, names: str, files: frozenset[str]) -> set[str]:
    """Return the files of a module, of its packages, and of names that are modules themselves."""
    if module == "hybrid_kv" and re.search(r"\b[A-Z]", names):
        return {_DOOR, "hybrid_kv/engine/llm.py"}
    if names == "(":  # whose lines are not seen: it may be any module of the package
        folder = module.replace(".", "/") + "/"
        names = ",".join(
            file.removeprefix(folder)[:-3] for file in files if file.startswith(folder)
        )
    modules = [
        module,
        *(f"{module}.{name.split()[0]}" for name in names.split(",") if name.strip()),
    ]
    imported = set()
    for name in modules:
        parts = name.split(".")
        imported |= {
            "/".join([*parts[:depth], "__init__.py"]) for depth in range(1, len(parts) + 1)
        }
        imported.add("/".join(parts) + ".py")
    return {file for file in imported & files if not file.startswith(_WRITERS)}


def _package(file: str, files: Sequence[str]) -> str:
    """Return the innermost package that a file lies in."""
    folder = file.rpartition("/")[0]
    while folder and f"{folder}/__init__.py" not in files:
        folder = folder.rpartition("/")[0]
    return folder

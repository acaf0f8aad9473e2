"""Modules import only from floors below; a concept is branched on in its package alone."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent / "hybrid_kv"

# The wings, bottom up: the cache, which lies directly in `hybrid_kv/`; what checks an engine; what
# measures, keeps and draws; the commands. Each imports only from those before it.
WINGS = ["", "check", "measure", "cli"]
# The layers of each wing, bottom up. A module belongs to the longest name that it begins with;
# packages of one line are on one layer, and may not import each other. `cache.modes` imports
# nothing, so that the configuration can use it, too.
LAYERS = {
    "": [
        ["cache.modes", "environment", "errors", "threads"],
        ["config", "files"],
        ["kernels"],
        ["cache", "sampling"],
        ["request"],
        ["attention"],
        ["observe"],
        ["models", "sanitizer", "spec_decode"],
        ["engine"],
    ],
    "check": [
        ["checkout", "ci", "guard_model", "minimize", "progress", "serve", "targets"],
        ["guard"],
        ["probes"],
        ["exports", "pytest_plugin"],
    ],
    "measure": [
        ["device", "predict", "results"],
        ["accuracy", "timing"],
        ["dashboard", "guard_checks"],
        ["study"],
    ],
    "cli": [["cli"]],
}
# `hybrid_kv/__init__.py` names the classes that a user imports; it imports them when they are first
# used.
DOOR = ""


def modules() -> dict[str, Path]:
    """All modules below `hybrid_kv`, without that name."""
    found = {}
    for path in sorted(ROOT.rglob("*.py")):
        parts = path.relative_to(ROOT).with_suffix("").parts
        found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return found


@cache
def nodes(path: Path) -> list[ast.AST]:
    return [*ast.walk(ast.parse(path.read_text()))]


def imports(path: Path) -> Iterator[str]:
    """every module of the package that a file imports, nested and for typing alone too."""
    for node in nodes(path):
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            package = (
                (ROOT.name, *path.relative_to(ROOT).parts)[: -node.level] if node.level else ()
            )
            names = [".".join((*package, node.module or "", alias.name)) for alias in node.names]
        else:
            continue
        yield from (
            name.removeprefix("hybrid_kv.") for name in names if name.startswith("hybrid_kv.")
        )


@cache
def graph() -> dict[str, set[str]]:
    """Return each module's imports; of `from a import b`, b if that is a module, else a."""
    known = modules()

    def module_of(name: str) -> str:
        while name not in known:
            name = name.rpartition(".")[0]
        return name

    return {
        name: {module_of(target) for target in imports(path)} - {name, DOOR}
        for name, path in known.items()
    }


def wing_of(module: str) -> str:
    top = module.partition(".")[0]
    return top if top in WINGS else ""


def package_of(module: str) -> str:
    wing = wing_of(module)
    inner = module.removeprefix(f"{wing}.") if wing in ("check", "measure") else module
    packages = [
        package
        for layer in LAYERS[wing]
        for package in layer
        if inner == package or inner.startswith(f"{package}.")
    ]
    assert packages, f"{module} is on no layer: add its package to LAYERS"
    return max(packages, key=len)


def layer_of(module: str) -> int:
    package = package_of(module)
    return next(number for number, layer in enumerate(LAYERS[wing_of(module)]) if package in layer)


EDGES = [
    (module, target)
    for module, targets in graph().items()
    for target in targets
    if module not in (DOOR, "check", "measure")
    and target not in ("check", "measure")  # those two are empty
]


@pytest.mark.parametrize("wing", WINGS)
def test_no_wing_imports_from_a_wing_above(wing: str) -> None:
    above = WINGS[WINGS.index(wing) + 1 :]
    inside = [edge for edge in EDGES if wing_of(edge[0]) == wing]
    assert not [
        f"{module} imports {target}" for module, target in inside if wing_of(target) in above
    ]


@pytest.mark.parametrize("wing", WINGS)
def test_no_package_imports_from_a_layer_above(wing: str) -> None:
    inside = [edge for edge in EDGES if wing_of(edge[0]) == wing_of(edge[1]) == wing]
    upward = [
        f"{module} imports {target}"
        for module, target in inside
        if package_of(target) != package_of(module) and layer_of(target) >= layer_of(module)
    ]
    assert not upward


def test_each_module_is_on_a_layer() -> None:
    assert all(
        package_of(module) for module in modules() if module not in (DOOR, "check", "measure")
    )


def test_the_folder_lists_the_cache_and_three_names() -> None:
    listed = {path.name for path in ROOT.iterdir() if not path.name.startswith(".")}  # as `ls` does
    names = listed - {"__pycache__"}
    assert {"check", "measure", "cli"} < names and len(names) <= 20


def test_no_modules_import_each_other_in_a_circle() -> None:
    edges = graph()
    done: set[str] = set()

    def visit(module: str, path: tuple[str, ...]) -> None:
        if module in path:
            raise AssertionError(" -> ".join((*path[path.index(module) :], module)))
        if module not in done:
            for target in sorted(edges[module]):
                visit(target, (*path, module))
            done.add(module)

    for module in edges:
        visit(module, ())


# The guard's observer repeats the rules of the cache in its own words: it must not use the code
# that it checks.
OBSERVER = {f"check.guard.{name}" for name in ("observer", "published", "waiting")}
CONCEPTS = {
    "mode": ({"mamba_cache_mode", "mode", "cache_mode"}, {"cache.modes"}),
    "scheme": ({"state_scheme", "scheme", "recompute"}, {"attention.rollback"}),
}


def branches(path: Path, names: set[str], values: set[str]) -> list[str]:
    """Return conditions that compare these names with one of `values`, or look it up there."""

    def named(node: ast.expr) -> bool:
        if isinstance(node, ast.Subscript) and isinstance(node.slice, ast.Constant):
            return node.slice.value in names
        if isinstance(node, ast.Call) and node.args and isinstance(node.args[0], ast.Constant):
            return node.args[0].value in names
        return (
            node.attr if isinstance(node, ast.Attribute) else getattr(node, "id", None)
        ) in names

    def valued(node: ast.expr) -> bool:
        parts = node.elts if isinstance(node, ast.Tuple | ast.List | ast.Set) else [node]
        return any(isinstance(part, ast.Constant) and part.value in values for part in parts)

    found = []
    for node in nodes(path):
        if isinstance(node, ast.Compare):
            sides = [node.left, *node.comparators]
            if any(map(named, sides)) and any(map(valued, sides)):
                found.append(f"{path.name}:{node.lineno}: {ast.unparse(node)}")
        elif (
            isinstance(node, ast.Subscript)
            and isinstance(node.value, ast.Dict)
            and named(node.slice)
        ):
            found.append(f"{path.name}:{node.lineno}: {ast.unparse(node)[:80]}")
    return found


@pytest.mark.parametrize("concept", CONCEPTS)
def test_branches_on_a_concept_are_in_its_own_package(concept: str) -> None:
    from hybrid_kv.attention.rollback import SCHEMES
    from hybrid_kv.cache.modes import MODES

    names, packages = CONCEPTS[concept]
    values = set(MODES if concept == "mode" else SCHEMES)
    outside = {name: path for name, path in modules().items() if name not in packages | OBSERVER}
    assert not [line for path in outside.values() for line in branches(path, names, values)]


def test_the_count_of_branches_sees_each_way_to_write_one(tmp_path: Path) -> None:
    path = tmp_path / "module.py"
    path.write_text(
        "a = spec.mamba_cache_mode == 'align'\n"
        "b = mode in ('all', 'align')\n"
        "c = {'none': 1, 'all': 2}[mode]\n"
        "d = 'none' != cell['mode']\n"
        "e = cell.get('mode') == 'all'\n"
        "f = mode == other\n"
    )
    assert len(branches(path, {"mode", "mamba_cache_mode"}, {"none", "align", "all"})) == 5


@pytest.mark.parametrize("package", ["hybrid_kv", "bench", "mutants"])
def test_no_console_reads_markup(package: str) -> None:
    lines = [
        line
        for file in (ROOT.parent / package).rglob("*.py")
        for line in file.read_text().splitlines()
    ]
    assert not [line for line in lines if " Console(" in line and "markup=False" not in line]

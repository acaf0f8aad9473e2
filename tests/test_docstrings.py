"""Docstrings name arguments and attributes that are there."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent / "hybrid_kv"
# `name, other: what they are`, an entry of a section, or of a sentence of a function's docstring.
ENTRY = re.compile(r"(?P<names>\*{0,2}\w[\w ]*(?:, \*{0,2}\w[\w ]*)*)(?: \([^)]*\))?:(?: |$)")
IN_SENTENCE = re.compile(r"(?:^|\. )`(?P<names>\w+)`: ", re.MULTILINE)

Function = ast.FunctionDef | ast.AsyncFunctionDef


def arguments(function: Function) -> set[str]:
    """Return the names of a function's arguments."""
    given = function.args
    every = [*given.posonlyargs, *given.args, *given.kwonlyargs, given.vararg, given.kwarg]
    return {argument.arg for argument in every if argument is not None}


def section(docstring: str, title: str) -> list[str]:
    """Return the names of the entries under `Args:` or `Attributes:`."""
    names: list[str] = []
    lines = docstring.splitlines()
    if f"{title}:" not in lines:
        return names
    for line in lines[lines.index(f"{title}:") + 1 :]:
        if line and not line.startswith("    "):
            break
        entry = ENTRY.match(line[4:])
        if entry is not None and not line.startswith("     "):
            names += entry["names"].replace("*", "").split(", ")
    return names


def members(node: ast.ClassDef) -> set[str]:
    """Return the names that a class has by itself: fields, methods, and attributes of `self`."""
    names: set[str] = set()
    for part in ast.walk(node):
        if isinstance(part, Function):
            names.add(part.name)
        elif isinstance(part, ast.AnnAssign | ast.Assign):
            targets = part.targets if isinstance(part, ast.Assign) else [part.target]
            for target in targets:
                leaves = target.elts if isinstance(target, ast.Tuple) else [target]
                names |= {
                    leaf.attr if isinstance(leaf, ast.Attribute) else leaf.id
                    for leaf in leaves
                    if isinstance(leaf, ast.Attribute | ast.Name)
                }
    return names


def classes(tree: ast.Module) -> dict[str, ast.ClassDef]:
    """Return the classes of a module by name."""
    return {node.name: node for node in ast.walk(tree) if isinstance(node, ast.ClassDef)}


def with_bases(node: ast.ClassDef, known: dict[str, ast.ClassDef]) -> Iterator[ast.ClassDef]:
    """Yield a class and those of its bases that are known."""
    yield node
    for base in node.bases:
        name = base.attr if isinstance(base, ast.Attribute) else getattr(base, "id", "")
        if name in known and known[name] is not node:
            yield from with_bases(known[name], known)


def strange_names(tree: ast.Module, known: dict[str, ast.ClassDef]) -> Iterator[str]:
    """Yield a line for each name in a docstring that no signature or class has."""
    for node in ast.walk(tree):
        if not isinstance(node, Function | ast.ClassDef):
            continue
        docstring = ast.get_docstring(node) or ""
        if isinstance(node, ast.ClassDef):
            family = list(with_bases(node, known))
            has = set().union(*map(members, family))
            for base in family:
                for method in base.body:
                    if isinstance(method, Function) and method.name in (
                        "__init__",
                        "__new__",
                        "__call__",
                    ):
                        has |= arguments(method)
            named = section(docstring, "Args") + section(docstring, "Attributes")
        else:
            has = arguments(node)
            named = section(docstring, "Args") + [
                match["names"] for match in IN_SENTENCE.finditer(docstring)
            ]
        yield from (f"{node.name}:{node.lineno} has no {name}" for name in named if name not in has)


@pytest.fixture(scope="module")
def trees() -> dict[str, ast.Module]:
    """Every module of the package."""
    return {
        str(path.relative_to(ROOT)): ast.parse(path.read_text())
        for path in sorted(ROOT.rglob("*.py"))
    }


def test_docstrings_name_arguments_that_are_there(trees: dict[str, ast.Module]) -> None:
    known: dict[str, ast.ClassDef] = {}
    for tree in trees.values():
        known |= classes(tree)
    assert not [
        f"{file}: {line}"
        for file, tree in trees.items()
        for line in strange_names(tree, known | classes(tree))
    ]


def test_a_name_that_is_not_there_is_found() -> None:
    tree = ast.parse(
        '''
class Base:
    """It.

    Args:
        a: right.
        wrong: of no argument.

    Attributes:
        there: right.
        absent (int): of no attribute.
    """

    def __init__(self, a):
        self.there = a


def function(x, *rest, y=0, **more):
    """Do it. `z`: of no argument.

    Args:
        x, *rest: right.
        y, old: the second is none.

    Returns:
        nothing: is no argument, and no entry either.
    """
'''
    )
    found = list(strange_names(tree, classes(tree)))
    assert [line.split(" has no ")[1] for line in found] == ["wrong", "absent", "old", "z"]

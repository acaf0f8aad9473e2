"""Mutants that cosmic-ray makes: each applies one of its operators to one place of an engine file.

A place is named by its file, its line, the operator, and which of that operator's mutations on that
line it is. Text is no place: no string, no type, no error that is raised, nothing that is logged;
nor is a check of the code's own, such as an assertion, nor a signal, which would reach processes of
others; nor how wide a launch is. What Python compiles to the same code as before, or as another
mutant, is none.
"""

from __future__ import annotations

import ast
import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from hashlib import sha256
from types import CodeType
from typing import Any

from mutants.runner.mutant import PACKAGE, Changed, Mutant
from mutants.runner.units import BY_TESTS, is_unit, tests_of

# Whose mutants are generated: the cache, its scheduler and runner, and the kernels.
GLOBS = (
    "cache/*.py",
    "spec_decode/*.py",
    "attention/*.py",
    "engine/scheduler.py",
    "engine/runner.py",
    "engine/step_inputs.py",
    "kernels/**/*.py",
)
# Each operation turns into its nearest neighbours: of all eleven others most fail at once, and say
# nothing.
BINARY = {
    "Add": ("Sub", "Mul"),
    "Sub": ("Add", "Mod"),
    "Mul": ("Add", "FloorDiv"),
    "Div": ("Mul",),
    "FloorDiv": ("Mul", "Mod"),
    "Mod": ("FloorDiv", "Add"),
    "Pow": ("Mul",),
    "RShift": ("LShift",),
    "LShift": ("RShift",),
    "BitOr": ("BitAnd",),
    "BitAnd": ("BitOr",),
    "BitXor": ("BitOr",),
}
COMPARISONS = {
    "Eq": ("NotEq", "LtE", "GtE"),
    "NotEq": ("Eq", "Lt", "Gt"),
    "Lt": ("LtE", "NotEq", "GtE"),
    "LtE": ("Lt", "Eq", "Gt"),
    "Gt": ("GtE", "NotEq", "LtE"),
    "GtE": ("Gt", "Eq", "Lt"),
    "Is": ("IsNot",),
    "IsNot": ("Is",),
}


def _pairs(neighbours: Mapping[str, Sequence[str]]) -> Iterator[tuple[str, str]]:
    """Yield each operation with each of its neighbours."""
    for old, every in neighbours.items():
        for new in every:
            yield old, new


# RemoveDecorator is left out (a dataclass without its decorator is none), and so are the
# operators for variables, which draw a number anew at each use.
OPERATORS = (
    *("NumberReplacer", "AddNot", "ZeroIterationForLoop", "ExceptionReplacer"),
    *("ReplaceTrueWithFalse", "ReplaceFalseWithTrue", "ReplaceAndWithOr", "ReplaceOrWithAnd"),
    *("ReplaceBreakWithContinue", "ReplaceContinueWithBreak"),
    *(f"ReplaceUnaryOperator_Delete_{name}" for name in ("Not", "USub", "Invert")),
    *(f"ReplaceBinaryOperator_{old}_{new}" for old, new in _pairs(BINARY)),
    *(f"ReplaceComparisonOperator_{old}_{new}" for old, new in _pairs(COMPARISONS)),
)
OPTIONS = ("num_warps", "num_stages")  # of a launch: they change how fast it is, no result
LEFT_OUT = (
    "__repr__",
    "__str__",
    "check_integrity",
    "warp_size",
    "register_limit",
    "_options",
)
ARROW = " => "  # stands in no line of Python
Position = tuple[int, int]  # line from 1, column from 0, in characters


@dataclass(frozen=True)
class Generated(Mutant):
    """A mutant made by an operator of cosmic-ray.

    Attributes:
        file: its path in the package.
        text: of the changed file.
        change: where, and what: `KVCacheManager.allocate: old line => new line`.
        digest: of the changed function, or statement outside of functions; what changes elsewhere
            leaves it the same.
    """

    file: str
    text: str
    change: str
    digest: str

    def ways(self, by: str) -> tuple[str, ...]:
        if is_unit(self.file):
            return (BY_TESTS,)
        return ("quick", "sanitizer", *([BY_TESTS] if tests_of(self.file) else []))

    def labels(self) -> dict[str, str]:
        return {"change": self.change, "digest": self.digest}

    def changed(self) -> Changed:
        return {self.file: self.text}


@dataclass(frozen=True)
class Place:
    """A place in a file where an operator changes it.

    `number`: among its mutations on that line; `occurrence`: in that file.
    """

    file: str
    position: Position
    operator: str
    number: int
    occurrence: int

    @property
    def line(self) -> int:
        return self.position[0]

    @property
    def id(self) -> str:
        return f"{self.file}:{self.line}:{self.operator}:{self.number}"


class Source:
    """A file of the package, and what may be changed in it."""

    def __init__(self, file: str) -> None:
        self.file = file
        self.text = (PACKAGE / file).read_text(encoding="utf-8")
        self.tree = ast.parse(self.text)
        self._lines = self.text.split("\n")
        self._left_out = [self._span(node) for node in _text_nodes(self.tree)]
        self._code = _code(compile(self.text, file, "exec"))

    def places(self) -> list[Place]:
        """Return places in the order of the operators and the file."""
        from cosmic_ray.ast import ast_nodes, get_ast

        nodes, found = [*ast_nodes(get_ast(self.text))], []
        for name, operator in _operators().items():
            on_line: Counter[int] = Counter()
            positions = (
                position for node in nodes for position, _ in operator.mutation_positions(node)
            )
            for occurrence, position in enumerate(positions):
                if not any(begin <= position < end for begin, end in self._left_out):
                    on_line[position[0]] += 1
                    found.append(Place(self.file, position, name, on_line[position[0]], occurrence))
        return found

    def mutant(self, place: Place) -> tuple[Generated, Any] | None:
        """Return the mutant of a place, and the code that Python compiles it to.

        None if it does not compile, or compiles to the same code as before.
        """
        from cosmic_ray.mutating import mutate_code

        text = mutate_code(self.text, _operators()[place.operator], place.occurrence)
        try:
            code = _code(compile(text, self.file, "exec"))
        except SyntaxError:
            return None
        if code == self._code:
            return None
        name, around = self._around(place.position)
        changed = text.split("\n")
        more = len(changed) - len(self._lines)
        own = "\n".join([self.file, name, *changed[around.start - 1 : around.stop - 1 + more]])
        digest = sha256(own.encode()).hexdigest()[:16]
        change = f"{name}: {_shown(changed, self._lines)}"
        return Generated(place.id, self.file, text, change, digest), code

    def has(self, function: str, old: str) -> bool:
        """Return whether these lines, without their indentation, are in a function or class."""
        names = function.split(".") if function != "module" else []
        body: ast.AST = self.tree
        for name in names:
            parts = (
                node for node in ast.walk(body) if isinstance(node, ast.FunctionDef | ast.ClassDef)
            )
            body = next((node for node in parts if node.name == name), ast.Pass())
        text = self.text if body is self.tree else ast.get_source_segment(self.text, body) or ""
        return _joined(old.split("\n")) in _joined(text.split("\n"))

    def _span(self, node: ast.AST) -> tuple[Position, Position]:
        """Return where a node begins and ends.

        Python counts bytes, parso characters.
        """

        def position(line: int, column: int) -> Position:
            return line, len(self._lines[line - 1].encode()[:column].decode())

        assert isinstance(node, ast.expr | ast.stmt | ast.arg | ast.keyword)
        assert node.end_lineno is not None and node.end_col_offset is not None
        return position(node.lineno, node.col_offset), position(
            node.end_lineno, node.end_col_offset
        )

    def _around(self, at: Position) -> tuple[str, range]:
        """Return the name of the function or class around a place, and the lines of the function.

        Outside of a function they are those of the statement.
        """
        names, lines, function = [], range(at[0], at[0] + 1), None
        for node in ast.walk(self.tree):  # from the outside in
            if isinstance(node, ast.stmt) and self._span(node)[0] <= at < self._span(node)[1]:
                lines = range(node.lineno, (node.end_lineno or node.lineno) + 1)
                if isinstance(node, ast.FunctionDef | ast.ClassDef):
                    names.append(node.name)
                if isinstance(node, ast.FunctionDef):
                    function = lines
        return ".".join(names) or "module", function or lines


@cache
def _operators() -> dict[str, Any]:
    from cosmic_ray.plugins import get_operator

    return {name: get_operator(f"core/{name}")() for name in OPERATORS}


def _text_nodes(tree: ast.Module) -> Iterator[ast.AST]:
    """Yield the nodes whose mutants would break nothing by themselves.

    They are what people and type checkers alone read; decorators; the code's own checks, `strict`
    of zip among them, since a check that is weaker than it was breaks nothing; and what a launch of
    a kernel says of its warps, which make no difference to what comes out.
    """
    for node in ast.walk(tree):
        if isinstance(node, ast.Raise | ast.JoinedStr | ast.Assert):
            yield node
        elif isinstance(node, ast.arg | ast.AnnAssign) and node.annotation is not None:
            yield node.annotation
        elif isinstance(node, ast.FunctionDef | ast.ClassDef):
            yield from node.decorator_list
            if isinstance(node, ast.FunctionDef):
                yield from [node.returns] if node.returns is not None else []
                yield from [node] if node.name in LEFT_OUT else []
        elif isinstance(node, ast.Dict):
            named = zip(node.keys, node.values, strict=True)
            yield from [
                value
                for key, value in named
                if isinstance(key, ast.Constant) and key.value in OPTIONS
            ]
        else:
            is_typing = isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test)
            is_option = isinstance(node, ast.keyword) and node.arg in ("strict", *OPTIONS)
            is_log = isinstance(node, ast.Call) and re.match(
                r"(_?log|logger|warnings)\.", ast.unparse(node.func)
            )
            is_signal = (
                isinstance(node, ast.Call) and ast.unparse(node.func) == "os.kill"
            )  # to another process
            yield from [node] if is_typing or is_option or is_log or is_signal else []


def _code(code: CodeType) -> tuple[Any, ...]:
    """Return all that Python runs of it, without line numbers."""
    constants = tuple(
        _code(one) if isinstance(one, CodeType) else (type(one), one) for one in code.co_consts
    )
    return code.co_code, constants, code.co_names, code.co_varnames, code.co_freevars


def _shown(new: list[str], old: list[str]) -> str:
    """Return the lines that differ, as `old => new`."""
    begin = next(i for i, (a, b) in enumerate(zip(old, new, strict=False)) if a != b)
    end = next(
        i for i, (a, b) in enumerate(zip(reversed(old), reversed(new), strict=False)) if a != b
    )
    return ARROW.join(_joined(lines[begin : len(lines) - end]) for lines in (old, new))


def _joined(lines: Sequence[str]) -> str:
    return " ".join(" ".join(lines).split())


def files(by: str | None = None) -> list[str]:
    """Return the files whose mutants are generated, by their paths in the package.

    They are those killed by `tests`, by the guard, or both.
    """
    found = {path.relative_to(PACKAGE).as_posix() for glob in GLOBS for path in PACKAGE.glob(glob)}
    return sorted(file for file in found if by is None or is_unit(file) == (by == BY_TESTS))

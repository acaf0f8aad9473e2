"""A Triton kernel's own source, run once for all programs and all contents of its tables.

Every number is a formula.

A kernel is a plain Python function until it is launched, so it runs here with another `tl`:
`program_id` is any number of the grid, `arange` any lane, a loop any one of its iterations, a
loaded integer any number that the table may hold. What is noted are its loads and stores: where,
under which conditions, and which 32-bit numbers must not have overflowed for that. Floating-point
numbers are not followed.

Shapes considered. (a) Formulas written beside each kernel: they prove what was written, not what
runs. (b) Triton's own intermediate code: the same for every kernel, with a parser of our own. (c)
The source under another `tl`. This is (c).
"""

from __future__ import annotations

import builtins
import inspect
import operator
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partialmethod
from types import FunctionType, SimpleNamespace
from typing import Any

import z3

from hybrid_kv.kernels.common.functions import softplus

Formula = Any  # z3 has no types


@dataclass(frozen=True)
class Access:
    """A load or store of one element: `offset` in elements, if `guard`.

    It is as computed if all of `needs` hold.
    """

    line: int
    is_store: bool
    array: str
    offset: Formula
    guard: tuple[Formula, ...]
    needs: tuple[Formula, ...]


def table(name: str) -> Callable[[Formula], Formula]:
    """Return the integers of an array, by their place."""
    return z3.Function(name, z3.IntSort(), z3.IntSort())  # type: ignore[no-any-return]


@dataclass
class Array:
    """A tensor that a kernel gets: `size` elements; of integers `bits`, 0 for floats.

    `holds` says what an entry may be, of its place and value; `known` gives those that are
    constants.
    """

    name: str
    size: Formula
    bits: int = 0
    holds: Callable[[Formula, Formula], Formula] = lambda place, value: z3.BoolVal(val=True)
    known: Callable[[Formula], tuple[Formula, int]] | None = None

    def __call__(self, place: Formula) -> Formula:
        value = table(self.name)(place)
        if self.known is None:
            return value
        condition, constant = self.known(place)
        return z3.simplify(z3.If(condition, constant, value))


class Float:
    """A number that is not followed."""

    def _same(self, *_: Any, **__: Any) -> Float:
        return self

    __add__ = __radd__ = __sub__ = __rsub__ = __mul__ = __rmul__ = __truediv__ = __rtruediv__ = (
        __neg__
    ) = _same
    __eq__ = __gt__ = __lt__ = __and__ = to = _same  # type: ignore[assignment]
    __hash__ = object.__hash__


@dataclass(frozen=True, eq=False)
class Bool:
    value: Formula
    needs: tuple[Formula, ...] = ()

    def __and__(self, other: Any) -> Bool:
        other = _bool(other)
        return Bool(z3.And(self.value, other.value), self.needs + other.needs)

    def __or__(self, other: Any) -> Bool:
        other = _bool(other)
        return Bool(z3.Or(self.value, other.value), self.needs + other.needs)

    __rand__, __ror__ = __and__, __or__

    def __eq__(self, other: object) -> Bool:  # type: ignore[override]  # with 0: not
        assert other == 0
        return Bool(z3.Not(self.value), self.needs)

    def to(self, _: Any) -> Int:
        return Int(z3.If(self.value, 1, 0), 32, self.needs)

    def __bool__(self) -> bool:
        return _run().decide(self.value)


@dataclass(frozen=True, eq=False)
class Int:
    """An integer of 32 or 64 bits; `needs` holds if none of its parts overflowed."""

    value: Formula
    bits: int
    needs: tuple[Formula, ...] = ()

    def _with(self, other: Any, made: Callable[[Formula, Formula], Formula]) -> Int:
        other = _int(other, self.bits)
        bits, value = max(self.bits, other.bits), made(self.value, other.value)
        return Int(value, bits, self.needs + other.needs + (_fits(value) if bits == 32 else ()))

    def __add__(self, other: Any) -> Any:
        return (
            other + self
            if isinstance(other, Pointer | Float)
            else self._with(other, lambda a, b: a + b)
        )

    __sub__ = partialmethod(_with, made=operator.sub)
    __rsub__ = partialmethod(_with, made=lambda a, b: b - a)

    def __mul__(self, other: Any) -> Any:
        return other if isinstance(other, Float) else self._with(other, lambda a, b: a * b)

    def _divided(self, other: Any, made: Callable[[Formula, Formula], Formula]) -> Int:
        """Triton rounds to zero, z3 down: both the same from 0 on."""
        found = self._with(other, made)
        return Int(found.value, found.bits, (*found.needs, self.value >= 0))

    __floordiv__ = partialmethod(_divided, made=operator.truediv)
    __mod__ = partialmethod(_divided, made=operator.mod)
    __radd__, __rmul__ = __add__, __mul__

    def _compared(self, other: Any, made: Callable[[Formula, Formula], Formula]) -> Bool:
        other = _int(other, self.bits)
        return Bool(made(self.value, other.value), self.needs + other.needs)

    __lt__ = partialmethod(_compared, made=operator.lt)
    __gt__ = partialmethod(_compared, made=operator.gt)
    __ge__ = partialmethod(_compared, made=operator.ge)
    __eq__ = partialmethod(_compared, made=operator.eq)  # type: ignore[assignment]
    __ne__ = partialmethod(_compared, made=operator.ne)  # type: ignore[assignment]

    def __getitem__(self, key: tuple[Any, ...]) -> Int:
        """Lanes along one axis of several: each axis has lanes of its own."""
        axis = next(i for i, one in enumerate(key) if one is not None)
        run, pairs = _run(), []
        for lane, size in list(run.lanes.items()):
            if "@" not in lane:
                pairs.append((z3.Int(lane), run.lane(f"{lane}@{axis}", size)))
        return Int(z3.substitute(self.value, *pairs), self.bits, self.needs)

    def to(self, kind: Any) -> Any:
        if kind == "float":
            return Float()
        return Int(self.value, kind, self.needs + (_fits(self.value) if kind < self.bits else ()))


@dataclass(frozen=True)
class Pointer:
    """The address of an element of an array; offsets are added in 64 bits."""

    array: Array
    offset: Int
    dtype = SimpleNamespace(element_ty="float")

    def __add__(self, other: Any) -> Pointer:
        other = _int(other, 64)
        return Pointer(
            self.array, Int(self.offset.value + other.value, 64, self.offset.needs + other.needs)
        )


def _int(value: Any, bits: int) -> Int:
    return value if isinstance(value, Int) else Int(z3.IntVal(value), bits)


def _bool(value: Any) -> Bool:
    return value if isinstance(value, Bool) else Bool(z3.BoolVal(bool(value)))


def _fits(value: Formula) -> tuple[Formula, ...]:
    return () if z3.is_int_value(value) else (z3.And(value >= -(2**31), value < 2**31),)


@dataclass
class Run:
    """One way through a kernel: `choices` are the branches that it takes.

    `facts` hold for this program: its number, its lanes, its loops, what its tables hold. A
    reduction is any number that one lane has; its other lanes are in `reductions`, as a formula of
    a lane, the lane, how many, and the result.
    """

    choices: list[bool]
    sums: Callable[[Run, Formula], Formula]
    facts: list[Formula]
    taken: int = 0
    path: list[Formula] = field(default_factory=list)
    accesses: list[Access] = field(default_factory=list)
    lanes: dict[str, int] = field(default_factory=dict)
    reductions: list[tuple[Formula, Formula, Formula, Formula]] = field(default_factory=list)
    num_fresh: int = 0

    def decide(self, condition: Formula) -> bool:
        if self.taken == len(self.choices):
            self.choices.append(self.can(condition))
        choice = self.choices[self.taken]
        self.taken += 1
        self.path.append(condition if choice else z3.Not(condition))
        return choice

    def can(self, condition: Formula) -> bool:
        """Return whether a condition may hold here, as far as can be seen in a second."""
        solver = z3.Solver()
        solver.set("timeout", 1000)
        return bool(solver.check(*self.facts, *self.path, condition) != z3.unsat)

    def fresh(self, name: str) -> Formula:
        self.num_fresh += 1
        return z3.Int(f"{name}.{self.num_fresh}")

    def lane(self, name: str, size: int) -> Formula:
        self.lanes[name] = size
        lane = z3.Int(name)
        self.facts += [lane >= 0, lane < size]
        return lane

    # ---- the language of kernels ----

    int32, int64, float32 = 32, 64, "float"
    constexpr = tensor = None

    def program_id(self, axis: int) -> Int:
        return Int(z3.Int(f"program{axis}"), 32)

    def arange(self, first: int, end: int) -> Int:
        assert first == 0
        return Int(self.lane(f"lane{end}", end), 32)

    def load(self, pointer: Pointer, mask: Any = True, other: Any = None) -> Any:
        guard = self._access(pointer, mask, is_store=False)
        if not pointer.array.bits:
            return Float()
        value = pointer.array(pointer.offset.value)
        self.facts.append(
            z3.Implies(z3.And(*guard), pointer.array.holds(pointer.offset.value, value))
        )
        if mask is True:
            return Int(value, pointer.array.bits)
        return Int(z3.If(_bool(mask).value, value, _int(other, 64).value), pointer.array.bits)

    def store(self, pointer: Pointer, value: Any, mask: Any = True) -> None:
        self._access(pointer, mask, is_store=True)

    def _access(self, pointer: Pointer, mask: Any, *, is_store: bool) -> tuple[Formula, ...]:
        mask, offset = _bool(mask), pointer.offset
        frame = sys._getframe(2)
        line, guard = frame.f_lineno - frame.f_code.co_firstlineno, (*self.path, mask.value)
        needs = tuple(dict.fromkeys(offset.needs + mask.needs))
        self.accesses.append(Access(line, is_store, pointer.array.name, offset.value, guard, needs))
        return guard

    def max(self, values: Int, axis: int) -> Int:
        inside = {one.get_id() for one in parts_of(values.value)}
        lane = next(z3.Int(name) for name in self.lanes if z3.Int(name).get_id() in inside)
        result, place, size = self.fresh("max"), self.fresh("lane"), self.lanes[str(lane)]
        at_place = z3.substitute(values.value, (lane, place))
        self.facts += [place >= 0, place < size, result == at_place]
        self.reductions.append((values.value, lane, z3.IntVal(size), result))
        return Int(result, 32)

    def sum(self, values: Any, axis: int, keep_dims: bool = False) -> Any:
        if isinstance(values, Float):
            return values
        result = self.fresh("sum")
        self.facts.append(self.sums(self, result))
        return Int(result, 32)

    def where(self, condition: Any, one: Any, other: Any) -> Any:
        if isinstance(one, Float) or isinstance(condition, Float):
            return Float()
        condition, bits = (
            _bool(condition),
            max([x.bits for x in (one, other) if isinstance(x, Int)], default=32),
        )
        one, other = _int(one, bits), _int(other, bits)
        needs = condition.needs + one.needs + other.needs
        return Int(z3.If(condition.value, one.value, other.value), bits, needs)

    def range(self, *bounds: Any) -> Iterator[Any]:
        """Any one iteration, or none; what a loop adds up is not known behind it."""
        first, end, step = (
            (*bounds, 1) if len(bounds) == 2 else (0, *bounds, 1) if len(bounds) == 1 else bounds
        )
        if all(isinstance(one, int) for one in (first, end, step)):
            yield from range(first, end, step)
            return
        end = _int(end, 32)
        first = _int(first, end.bits)
        if first < end:
            number = self.fresh("iteration")
            at = Int(
                first.value + step * number, max(first.bits, end.bits), first.needs + end.needs
            )
            self.facts += [number >= 0]
            self.path.append(at.value < end.value)
            yield at

    static_range = staticmethod(builtins.range)

    def zeros(self, shape: Any, dtype: Any) -> Any:
        return Float() if dtype == "float" else Int(z3.IntVal(0), 32)

    def exp(self, x: Any) -> Float:
        return Float()

    log = rsqrt = exp

    def minimum(self, x: Any, y: Any) -> Float:
        return Float()

    def max_contiguous(self, x: Any, _: Any) -> Any:
        return x

    broadcast_to = max_contiguous

    def debug_barrier(self) -> None:
        pass


_runs: list[Run] = []


def _run() -> Run:
    return _runs[-1]


def parts_of(*formulas: Formula) -> Iterator[Formula]:
    """Yield all formulas inside of some, each once."""
    left, seen = [*formulas], set[int]()
    while left:
        one = left.pop()
        if one.get_id() not in seen:
            seen.add(one.get_id())
            left += one.children()
            yield one


def _under(run: Run, function: Callable[..., Any], **called: Any) -> Callable[..., Any]:
    """Return a kernel, or a function that one calls, with a run as its `tl`."""
    names = {**function.__globals__, "tl": run, "range": run.range, **called}
    return FunctionType(function.__code__, names, function.__name__)


def paths(
    kernel: Callable[..., None],
    arguments: dict[str, Any],
    facts: Sequence[Formula],
    sums: Callable[[Run, Formula], Formula] = lambda run, total: z3.BoolVal(val=True),
) -> Iterator[Run]:
    """Yield all ways through a kernel.

    Args:
        arguments: by name: an `Array`, an `Int`, or the number of a `constexpr`.
        facts: of the program's number and the arguments.
        sums: what is known of a sum of integers at that point of a way.
    """
    given = {
        name: Pointer(value, Int(z3.IntVal(0), 64)) if isinstance(value, Array) else value
        for name, value in arguments.items()
    }
    choices: list[bool] = []
    while True:
        run = Run(choices, sums, [*facts])
        _runs.append(run)
        try:
            _under(run, kernel, softplus=_under(run, softplus))(**given)
        finally:
            _runs.pop()
        yield run
        while choices and not choices[-1]:
            choices.pop()
        if not choices:
            return
        choices[-1] = False


def planted(kernel: Callable[..., None], old: str, new: str) -> Callable[..., None]:
    """Return the kernel with another text in place of one that it has.

    Raises:
        ValueError: it has no such text, or more than one.
    """
    text = inspect.getsource(kernel)
    if text.count(old) != 1:
        raise ValueError(f"{kernel.__name__} has {old!r} {text.count(old)} times, not once")
    names: dict[str, Any] = dict(kernel.__globals__)
    exec("from __future__ import annotations\n" + text.replace(old, new), names)
    made: Callable[..., None] = names[kernel.__name__]
    return made

"""Proofs of a kernel for all tables that the cache manager may hand over, by z3.

- *inside*: each access is of an element of its array.
- *32 bits*: no 32-bit number that an access is computed from has overflowed.
- *own slot*: a state that is read or written is the row's own; the null block is neither.
- *apart*: no program writes what another one reads or writes, in any order of both.

A property is proven, refuted by a witness, or neither in `SECONDS`: then it counts as not proven.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import combinations
from typing import Any, NamedTuple

import z3

from bench.proofs.symbolic import Access, Array, Formula, Run, parts_of, paths
from hybrid_kv.measure.timing.clock import clock

SECONDS = 60
PROPERTIES = ("inside", "32 bits", "own slot", "apart")
# Constants that each program has its own of.
_OWN = re.compile(r"program|lane|max\.|sum\.|iteration\.")


@dataclass(frozen=True)
class Case:
    """A kernel with what it is launched with.

    Attributes:
        name: for a table.
        kernel: a plain function in Triton's language.
        arguments: see `symbolic.paths`.
        facts: of one program, of its number `program0`, `program1` and of what the manager promises
            of its tables.
        between: what it promises of two programs, of a formula of the first and the same of the
            second.
        owned: the arrays of states; `own` says which of their elements are a program's, of an
            access.
        sums: see `symbolic.paths`.
        others: numbers that a lane may have in another program: reductions are compared at these.
    """

    name: str
    kernel: Callable[..., None]
    arguments: dict[str, Any]
    facts: Sequence[Formula]
    between: Callable[[Callable[[Formula], Formula]], list[Formula]]
    owned: tuple[str, ...] = ()
    own: Callable[[Access], Formula] = lambda access: z3.BoolVal(val=True)
    sums: Callable[[Run, Formula], Formula] = lambda run, total: z3.BoolVal(val=True)
    others: tuple[Formula, ...] = ()


class Verdict(NamedTuple):
    """The result of a proof: `word` is *proven*, *witness* or *not proven*.

    `said` is the line of the kernel and numbers for which it fails.
    """

    case: str
    property: str
    word: str
    said: str
    num_queries: int
    seconds: float


@dataclass
class _Tried:
    num: int = 0
    begin: float = field(default_factory=clock)

    def query(self, facts: Sequence[Formula], goal: Formula) -> tuple[str, str]:
        """Return whether a goal follows, or numbers for which it does not."""
        left = SECONDS - (clock() - self.begin)
        if left <= 0:
            return "not proven", f"no more time after {self.num} questions"
        self.num += 1
        products, lemmas = _products([*facts, goal])
        # Without products first, which are numbers of their own then: what follows from less
        # follows.
        named = [(one, z3.Int(f"product.{i}")) for i, one in enumerate(products)]
        for pairs in (named, []) if named else ([],):
            solver = z3.Solver()
            solver.set("timeout", int(1000 * left))
            solver.add(*(z3.substitute(one, *pairs) for one in (*facts, z3.Not(goal), *lemmas)))
            found = solver.check()
            if found == z3.unsat:
                break
        match found:
            case z3.unsat:
                return "proven", ""
            case z3.sat:
                model = solver.model()
                shown = sorted((str(one), model[one]) for one in model.decls() if one.arity() == 0)
                return "witness", ", ".join(
                    f"{name} = {value}" for name, value in shown if "lane" not in name
                )
            case _:
                return "not proven", f"z3: {solver.reason_unknown()}"


def prove(case: Case, properties: Sequence[str] = PROPERTIES) -> Iterator[Verdict]:
    """Prove all that is asked of a kernel, a property at a time, until something is not proven."""
    runs = [
        (run, access)
        for run, access in _distinct(paths(case.kernel, case.arguments, case.facts, case.sums))
    ]
    for name in properties:
        tried, word, said = _Tried(), "proven", ""
        for where, facts, goal in _asked(name, case, runs):
            word, said = tried.query(facts, goal)
            if word != "proven":
                said = f"line {where}: {said}"
                break
        yield Verdict(case.name, name, word, said, tried.num, clock() - tried.begin)


def _distinct(runs: Iterable[Run]) -> Iterator[tuple[Run, Access]]:
    """Yield the accesses of all ways, those once that several ways share."""
    seen: dict[
        tuple[int, bool, int], Formula
    ] = {}  # with the formula, whose number another one would get
    for run in runs:
        for access in run.accesses:
            formula = z3.And(access.offset >= 0, *access.guard)
            key = access.line, access.is_store, formula.get_id()
            if key not in seen:
                seen[key] = formula
                yield run, access


def _asked(
    name: str, case: Case, runs: Sequence[tuple[Run, Access]]
) -> Iterator[tuple[str, Sequence[Formula], Formula]]:
    """Yield the questions of a property: a line, what is known, and what must follow."""
    arrays = {one.name: one for one in case.arguments.values() if isinstance(one, Array)}
    for run, access in runs:
        facts = [*run.facts, *access.guard]
        if name == "inside":
            yield (
                str(access.line),
                facts,
                z3.And(access.offset >= 0, access.offset < arrays[access.array].size),
            )
        elif name == "32 bits" and access.needs:
            yield str(access.line), facts, z3.And(*access.needs)
        elif name == "own slot" and access.array in case.owned:
            yield str(access.line), facts, case.own(access)
    if name != "apart":
        return
    places = [place for one in case.others for place in (one, _renamed(one))]
    for (run, access), (other_run, other) in _pairs(runs):
        facts = [*run.facts, *access.guard, *map(_renamed, (*other_run.facts, *other.guard))]
        largest = [*run.reductions, *(tuple(map(_renamed, one)) for one in other_run.reductions)]
        facts += [_at(place, *one) for one in largest for place in places]
        facts += case.between(_renamed)
        goal = access.offset != _renamed(other.offset)
        for axis, same in (
            (z3.Int("program0"), z3.Int("program1")),
            (z3.Int("program1"), z3.Int("program0")),
        ):
            # Two programs of one row or group: what they index with is then the same to the letter.
            known = [z3.substitute(one, (_renamed(same), same)) for one in (*facts, goal)]
            yield (
                f"{access.line} and {other.line}",
                [*known[:-1], axis != _renamed(axis)],
                known[-1],
            )
        differ = [z3.Int(f"program{axis}") != z3.Int(f"program{axis}'") for axis in (0, 1)]
        yield f"{access.line} and {other.line}", [*facts, *differ], goal


def _pairs(
    runs: Sequence[tuple[Run, Access]],
) -> Iterator[tuple[tuple[Run, Access], tuple[Run, Access]]]:
    """Yield accesses that must not meet: both of one array, and at least one of them stores."""
    for one in runs:
        for other in runs:
            if one[1].is_store and one[1].array == other[1].array:
                yield one, other


def _at(place: Formula, values: Formula, lane: Formula, size: Formula, result: Formula) -> Formula:
    """Return that a maximum is no smaller than what the lane at `place` has."""
    return z3.Implies(
        z3.And(place >= 0, place < size), z3.substitute(values, (lane, place)) <= result
    )


def _renamed(formula: Formula) -> Formula:
    """Return the formula of another program."""
    names = (
        one
        for one in parts_of(formula)
        if z3.is_const(one) and one.decl().kind() == z3.Z3_OP_UNINTERPRETED
    )
    return z3.substitute(
        formula, *((one, z3.Int(f"{one}'")) for one in names if _OWN.match(str(one)))
    )


def _products(formulas: Sequence[Formula]) -> tuple[list[Formula], list[Formula]]:
    """Return the products of two numbers that are no constants, and how they are ordered.

    Only those that have a factor in common are ordered.
    """
    products = (one for one in parts_of(*formulas) if z3.is_mul(one) and len(one.children()) == 2)
    found, lemmas = [one for one in products if not any(map(z3.is_int_value, one.children()))], []
    for one, other in combinations(found, 2):
        for a, b in (one.children(), one.children()[::-1]):
            for c, d in (other.children(), other.children()[::-1]):
                if b.eq(d):
                    lemmas.append(z3.Implies(z3.And(b >= 0, a < c), one + b <= other))
                    lemmas.append(z3.Implies(z3.And(b >= 0, c < a), other + b <= one))
                    lemmas.append(z3.Implies(a == c, one == other))
    return found, lemmas

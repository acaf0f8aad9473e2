"""What a probe is: a generator of rounds, which registers itself. Every module of `probes.checks` is loaded."""

from __future__ import annotations

from collections.abc import Callable, Generator
from dataclasses import dataclass
from importlib import import_module
from pkgutil import iter_modules
from typing import TYPE_CHECKING, Literal

from hybrid_kv.probes import checks
from hybrid_kv.targets.target import Answer, Ask

if TYPE_CHECKING:
    from hybrid_kv.probes.traffic import Traffic

# "as before": the engine's old build says the same. "known": a reported failure of its release.
Verdict = Literal["right", "wrong", "inconclusive", "void", "not supported", "as before", "known"]


@dataclass(frozen=True)
class Round:
    """Requests that are sent together; `preempt_every`: see `Target.ask`."""

    requests: tuple[Ask, ...]
    preempt_every: int = 0


BOTH = "exact random"
Rounds = Generator[Round, list[Answer], None]


@dataclass(frozen=True)
class Probe:
    """See `probe`."""

    name: str
    rounds: Callable[[Traffic], Rounds]
    needs: tuple[str, ...]
    moves: str
    when: tuple[str, ...]
    elsewhere: bool
    place: int
    exact: bool
    not_in: str


PROBES: dict[str, Probe] = {}


def probe(
    name: str,
    *,
    place: int,
    needs: str = "",
    moves: str = "",
    when: str = "",
    elsewhere: bool = True,
    exact: bool = False,
    not_in: str = "",
) -> Callable[[Callable[[Traffic], Rounds]], Callable[[Traffic], Rounds]]:
    """Register a generator of rounds; it is sent the answers of each.

    Args:
        place: probes run in this order.
        needs: capabilities of the target, separated by spaces.
        moves: a counter that must have moved, or the probe is void; "cached": some answer must have cached tokens.
        when: factors, separated by spaces; `moves` is required only where one of them is not at its plainest level.
        elsewhere: whether it runs where none of them is but some other factor.
        exact: it is for exact models alone.
        not_in: parts, `exact` and `random`, that leave it out in a run of both: the traffic of an exact model shows
            what an engine does, random weights what a model does.
    """

    def register(rounds: Callable[[Traffic], Rounds]) -> Callable[[Traffic], Rounds]:
        factors = tuple(when.split())
        PROBES[name] = Probe(name, rounds, tuple(needs.split()), moves, factors, elsewhere, place, exact, not_in)
        return rounds

    return register


def load_probes() -> list[Probe]:
    """All probes, in the order in which they run."""
    for module in iter_modules(checks.__path__):
        import_module(f"{checks.__name__}.{module.name}")
    return sorted(PROBES.values(), key=lambda one: (one.place, one.name))

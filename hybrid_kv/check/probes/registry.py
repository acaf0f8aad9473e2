"""Probes: generators of rounds that register themselves. Every module of `probes.checks` is loaded.

Prompts are random token ids, so that no two share a beginning by chance.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Generator
from dataclasses import dataclass, replace
from importlib import import_module
from pkgutil import iter_modules
from typing import Any, Literal, cast

from hybrid_kv.check.probes import checks
from hybrid_kv.check.targets.target import Answer, Ask, Sleeper, Target

# "as before": the engine's old build says the same. "known": a reported failure of its release.
Verdict = Literal["right", "wrong", "inconclusive", "void", "not supported", "as before", "known"]


@dataclass(frozen=True)
class Round:
    """Requests that are sent together.

    Attributes:
        preempt_every: see `Target.ask`.
        after_sleep: the target sleeps before they are sent, and wakes up.
    """

    requests: tuple[Ask, ...]
    preempt_every: int = 0
    after_sleep: bool = False


def send(target: Target, sent: Round) -> list[Answer]:
    """Send a round, and return its answers.

    Raises:
        TargetError: the engine died.
    """
    if sent.after_sleep:
        cast(Sleeper, target).sleep()
    return target.ask(sent.requests, sent.preempt_every)


@dataclass(frozen=True)
class Traffic:
    """The source of a probe's requests.

    Attributes:
        unit: tokens of a cached block; a hit is a multiple of it.
        longest: tokens that a request of a probe may have.
        limit: tokens that a request of the target may have.
        num_new: tokens of an answer.
        amount: 1 for a quick look; how often probes that repeat something do so.
        shortest: tokens that a prompt has at least.
        batch: requests of a round, where a probe has no number of its own.
        thorough: a long probe sends all of its prompts, as it does where no other model runs.
    """

    rng: random.Random
    vocab_size: int
    unit: int
    longest: int
    limit: int
    num_new: int = 12
    amount: int = 1
    shortest: int = 1
    batch: int = 24
    thorough: bool = True

    def prompt(self, length: int) -> tuple[int, ...]:
        """Draw a prompt. Token 0 ends texts in many checkpoints, so it is left out."""
        length = max(self.shortest, min(length, self.longest - self.num_new))
        return tuple(self.rng.randrange(1, self.vocab_size) for _ in range(length))

    def repetitive(self, length: int) -> tuple[int, ...]:
        """Draw a few tokens again and again: a lookup of n-grams finds drafts in them."""
        period = self.prompt(7)
        return tuple(period[i % 7] for i in range(min(length, self.longest - self.num_new)))

    def ask(self, prompt: tuple[int, ...], **fields: Any) -> Ask:
        """Make a request that is no longer than the target lets it be.

        A text that is cut there is not wrong.
        """
        usual: dict[str, Any] = {
            "max_tokens": self.num_new,
            "logprobs": self.rng.random() < 0.5,
        }
        made = Ask(prompt, **{**usual, **fields})
        return replace(made, max_tokens=max(1, min(made.max_tokens, self.limit - len(prompt))))

    def mixed(self, count: int) -> list[tuple[int, ...]]:
        """Draw prompts of one token to four blocks."""
        lengths = [1, 2, self.unit - 1, self.unit, self.unit + 1, 4 * self.unit]
        return [
            self.prompt(lengths[i] if i < len(lengths) else self.rng.randrange(1, 3 * self.unit))
            for i in range(count)
        ]


BOTH = "exact random"
Rounds = Generator[Round, list[Answer], None]


@dataclass(frozen=True)
class Probe:
    """A generator of rounds, which is sent the answers of each.

    Attributes:
        place: probes run in this order.
        needs: capabilities of the target, separated by spaces.
        moves: a counter that must have moved, or the probe is void; "cached": some answer must have
            cached tokens.
        when: factors, separated by spaces; `moves` is required only where one of them is not at its
            plainest level.
        elsewhere: whether it runs where only other factors are not at their plainest level.
        exact: it is for exact models alone.
        not_in: `exact`, `random`: the models that leave it out in a run of both: the traffic of an
            exact model shows what an engine does, random weights what a model does.
    """

    name: str
    rounds: Callable[[Traffic], Rounds]
    place: int
    needs: str = ""
    moves: str = ""
    when: str = ""
    elsewhere: bool = True
    exact: bool = False
    not_in: str = ""


PROBES: dict[str, Probe] = {}


def probe(
    name: str, **how: Any
) -> Callable[[Callable[[Traffic], Rounds]], Callable[[Traffic], Rounds]]:
    """Register a generator of rounds; `how` has the other attributes of `Probe`."""

    def register(rounds: Callable[[Traffic], Rounds]) -> Callable[[Traffic], Rounds]:
        PROBES[name] = Probe(name, rounds, **how)
        return rounds

    return register


def load_probes() -> list[Probe]:
    """Return all probes, in the order in which they run."""
    for module in iter_modules(checks.__path__):
        import_module(f"{checks.__name__}.{module.name}")
    return sorted(PROBES.values(), key=lambda probe: (probe.place, probe.name))

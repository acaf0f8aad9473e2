"""Makes what was asked until an answer was wrong small: rounds, requests, tokens and settings that can be missed go."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from hybrid_kv.minimize import minimize
from hybrid_kv.probes.registry import Round
from hybrid_kv.probes.session import Failure, Session
from hybrid_kv.targets.target import Answer, Ask, TargetError


@dataclass(frozen=True)
class Shrunk:
    """`num_plays`: how often the engine was asked. `is_minimal`: nothing more could go; else the time was up."""

    failure: Failure
    num_plays: int
    seconds: float
    is_minimal: bool

    @property
    def num_requests(self) -> int:
        return sum(len(one.asks) for one in self.failure.rounds)

    @property
    def num_prompt_tokens(self) -> int:
        return sum(len(ask.prompt) for one in self.failure.rounds for ask in one.asks)


class _TimeUpError(Exception):
    pass


def shrink(failure: Failure, start: Callable[[], Session], seconds: float = 120.0) -> Shrunk:
    """The least that is still answered wrongly, as far as the time goes.

    Args:
        start: a session of the failure's settings, which has asked nothing yet. One that can forget its cache is asked
            again and again; another is started for every try.
    """
    begin = time.perf_counter()
    shrinker = _Shrinker(failure, start, begin + seconds)
    is_minimal = True
    try:
        shrinker.run()
    except _TimeUpError:
        is_minimal = False
    finally:
        shrinker.close()
    return Shrunk(shrinker.best, shrinker.num_plays, time.perf_counter() - begin, is_minimal)


def play(session: Session, rounds: Sequence[Round], failure: Failure) -> Failure | None:
    """The first wrong answer to these rounds; `failure` names where they come from.

    Raises:
        TargetError: the engine died.
    """
    for i, one in enumerate(rounds):
        answers, judgements = session.play(one)
        for index, judgement in enumerate(judgements):
            if judgement.verdict == "wrong":
                return replace(
                    failure, rounds=tuple(rounds[: i + 1]), index=index, answer=answers[index], judgement=judgement
                )
    return None


class _Shrinker:
    def __init__(self, failure: Failure, start: Callable[[], Session], deadline: float) -> None:
        self.best, self.num_plays = failure, 0
        self._start, self._deadline = start, deadline
        self._session: Session | None = None
        self._always_new = False
        self._tried: set[tuple[Round, ...]] = set()

    def close(self) -> None:
        if self._session is not None:
            self._session.target.close()

    def fails(self, rounds: Sequence[Round]) -> bool:
        """Whether these are still answered wrongly; then they are the best so far."""
        rounds = tuple(_startable(one) for one in rounds if one.asks)
        if not rounds or rounds in self._tried:
            return False
        if time.perf_counter() > self._deadline:
            raise _TimeUpError
        self._tried.add(rounds)
        self.num_plays += 1
        try:
            found = play(self._fresh(), rounds, self.best)
        except TargetError as error:
            found = self._died(error)
            self.close()
            self._session = None
        if found is None:
            return False
        self.best = found
        self._tried.add(found.rounds)
        return True

    def _died(self, error: TargetError) -> Failure | None:
        """What killed the session, if a death is what is made small; the same one, whatever numbers it names."""
        if not self.best.died or self._session is None:
            return None
        now = replace(self.best, rounds=tuple(self._session.asked), answer=Answer((), error=str(error)))
        now = replace(now, judgement=replace(now.judgement, problem=str(error)))
        return now if now.last_words == self.best.last_words else None

    def _fresh(self) -> Session:
        if self._session is not None and "reset" in self._session.target.can and not self._always_new:
            self._session.reset()
            return self._session
        self.close()
        self._session = self._start()
        return self._session

    def run(self) -> None:
        """As small as it gets in an engine that is asked again and again, if that fails in a new one, too.

        What an engine keeps besides its cache may be what is wrong with it: then each try has an engine of its own.
        """
        original = self.best
        self._passes()
        smallest = self.best
        self.close()
        self._session, self._tried = None, set()
        if self.fails(smallest.rounds):
            return
        self.best, self._always_new = original, True
        self._passes()

    def _passes(self) -> None:
        before: tuple[Round, ...] = ()
        while before != self.best.rounds:
            before = self.best.rounds
            minimize(before[:-1], lambda kept: self.fails([*kept, self.best.rounds[-1]]))
            for i in range(len(self.best.rounds) - 1, -1, -1):
                self._asks(i)
            self._fields()
            self._tokens()

    def _asks(self, i: int) -> None:
        if i >= len(self.best.rounds):
            return
        rounds = self.best.rounds

        def keep(kept: Sequence[Ask]) -> bool:
            return self.fails([*rounds[:i], replace(rounds[i], asks=tuple(kept)), *rounds[i + 1 :]])

        if len(rounds[i].asks) > 1:
            minimize(rounds[i].asks, keep)

    def _fields(self) -> None:
        """Every field at its default, every answer as short as can be."""
        plain = Ask(())
        for name in ("logprobs", "salt", "after", "abort_after", "temperature", "n"):
            self._each(lambda ask, name=name: replace(ask, **{name: getattr(plain, name)}))  # type: ignore[misc]
        self.fails([replace(one, preempt_every=0) for one in self.best.rounds])
        for most in (1, 2, 3, 4, 6, 8):
            self._each(lambda ask, most=most: replace(ask, max_tokens=min(ask.max_tokens, most)))  # type: ignore[misc]

    def _each(self, change: Callable[[Ask], Ask]) -> None:
        """All requests at once, or else one by one."""
        rounds = self.best.rounds
        if self.fails([replace(one, asks=tuple(map(change, one.asks))) for one in rounds]):
            return
        for i in range(len(rounds)):
            for j in range(len(rounds[i].asks)):
                now = self.best.rounds
                if i < len(now) and j < len(now[i].asks):
                    asks = [*now[i].asks]
                    asks[j] = change(asks[j])
                    self.fails([*now[:i], replace(now[i], asks=tuple(asks)), *now[i + 1 :]])

    def _tokens(self) -> None:
        """The same positions of all prompts, whole blocks first, so that what they share they share still."""
        for size in (self.best.unit, 1):
            rounds = self.best.rounds
            longest = max(len(ask.prompt) for one in rounds for ask in one.asks)

            def keep(kept: Sequence[int], rounds: Sequence[Round] = rounds, size: int = size) -> bool:
                pieces = set(kept)
                return self.fails(
                    _with_prompts(rounds, lambda prompt: [t for i, t in enumerate(prompt) if i // size in pieces])
                )

            minimize(range(-(-longest // size)), keep)
        for cut in (self.best.unit, 4, 1):
            self._each(lambda ask, cut=cut: replace(ask, prompt=ask.prompt[:-cut] or ask.prompt[:1]))  # type: ignore[misc]


def _startable(one: Round) -> Round:
    """Nobody waits for more answers than the others give: an engine would wait with it."""
    asks = list(one.asks)
    for place, i in enumerate(sorted(range(len(asks)), key=lambda i: asks[i].after)):
        asks[i] = replace(asks[i], after=min(asks[i].after, place))
    return replace(one, asks=tuple(asks))


def distinct(failures: Sequence[Failure]) -> list[Failure]:
    """Without deaths like an earlier one: an engine may die of one bug in most probes, and is slow to start."""
    known = {one.last_words: one for one in reversed(failures) if one.died}
    return [one for one in failures if not one.died or known[one.last_words] is one]


def _with_prompts(rounds: Sequence[Round], change: Callable[[Sequence[int]], Sequence[int]]) -> list[Round]:
    def changed(ask: Ask) -> Ask:
        return replace(ask, prompt=tuple(change(ask.prompt)) or ask.prompt[:1])

    return [replace(one, asks=tuple(map(changed, one.asks))) for one in rounds]


def told(rounds: Sequence[Round]) -> list[dict[str, Any]]:
    """As JSON has them: fields that are at their default are left out."""
    found: list[dict[str, Any]] = []
    for one in rounds:
        asks = [{"prompt": ask.prompt, **ask.extras()} for ask in one.asks]
        found.append({"asks": asks} | ({"preempt_every": one.preempt_every} if one.preempt_every else {}))
    return found

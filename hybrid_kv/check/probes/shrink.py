"""Reduction of what was sent until an answer was wrong: rounds, requests, tokens, settings."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from hybrid_kv.check.minimize import Shrinker, TimeUpError
from hybrid_kv.check.probes.registry import Round
from hybrid_kv.check.probes.session import Failure, Session
from hybrid_kv.check.targets.target import Answer, Ask, TargetError
from hybrid_kv.config import ConfigError

Rounds = tuple[Round, ...]


def shrink(failure: Failure, start: Callable[[], Session], seconds: float = 120.0) -> ShrunkRounds:
    """Return the least that is still answered wrongly, as far as the time goes.

    Args:
        start: a session of the failure's settings, which has sent nothing yet. One that can forget
            its cache is used again and again; another is started for every try.
    """
    shrinker = ShrunkRounds(failure, start, seconds)
    try:
        shrinker.run()
        smallest = shrinker.failure
        shrinker.close()
        shrinker.tried.clear()  # in a new engine it may be tried again
        # What an engine keeps besides its cache may be what is wrong with it: then each try has an
        # engine of its own.
        if shrinker.is_minimal and not shrinker.fails(smallest.rounds):
            shrinker.case = failure.rounds
            shrinker.failure = failure
            shrinker.is_always_new = True
            shrinker.run()
    except TimeUpError:
        shrinker.is_minimal = False
    finally:
        shrinker.close()
    return shrinker


def play(session: Session, rounds: Sequence[Round], failure: Failure) -> Failure | None:
    """Return the first wrong answer to these rounds; `failure` names where they come from.

    Raises:
        TargetError: the engine died.
    """
    session.unit = session.unit or failure.unit
    for sent in rounds:
        wrong = session.first_wrong(failure.probe, *session.play(sent))
        if wrong is not None:
            return replace(wrong, unit=failure.unit)
    return None


class ShrunkRounds(Shrinker[Rounds]):
    """A failure as it is reduced; `failure` is the smallest one so far."""

    def __init__(self, failure: Failure, start: Callable[[], Session], seconds: float) -> None:
        super().__init__(failure.rounds, seconds, time.perf_counter)
        self.failure = failure
        self.is_always_new = False
        self._start = start
        self._session: Session | None = None

    @property
    def num_prompt_tokens(self) -> int:
        return sum(len(ask.prompt) for each in self.failure.rounds for ask in each.requests)

    def close(self) -> None:
        if self._session is not None:
            self._session.target.close()
        self._session = None

    def play(self, case: Rounds) -> Rounds | None:
        try:
            failure = play(self._fresh(), case, self.failure)
        except (ConfigError, TargetError) as error:
            failure = self._died(error)
            self.close()
        if failure is None:
            return None
        self.failure = failure
        return failure.rounds

    def _died(self, error: ConfigError | TargetError) -> Failure | None:
        """Return the failure that killed the session, if a death is what is reduced.

        It is the same death, whatever numbers it names.
        """
        if not self.failure.died or self._session is None:
            return None
        now = replace(
            self.failure, rounds=tuple(self._session.sent), answer=Answer((), error=str(error))
        )
        now = replace(now, judgement=replace(now.judgement, problem=str(error)))
        return now if now.last_words == self.failure.last_words else None

    def _fresh(self) -> Session:
        session = self._session
        if session is not None and "reset" in session.target.can and not self.is_always_new:
            session.reset()
            return session
        self.close()
        self._session = self._start()
        return self._session

    def passes(self) -> Sequence[Callable[[], object]]:
        return self._rounds, self._requests, self._fields, self._tokens

    def _rounds(self) -> None:
        self.leave_out(self.case[:-1], lambda kept: _startable([*kept, self.case[-1]]))

    def _requests(self) -> None:
        for i in range(len(self.case) - 1, -1, -1):
            if i < len(self.case) and len(self.case[i].requests) > 1:
                self._requests_of(self.case, i)

    def _requests_of(self, rounds: Rounds, i: int) -> None:
        def keep(kept: Sequence[Ask]) -> Rounds | None:
            return _startable(
                [*rounds[:i], replace(rounds[i], requests=tuple(kept)), *rounds[i + 1 :]]
            )

        self.leave_out(rounds[i].requests, keep)

    def _fields(self) -> None:
        """Try the default of every field, and answers as short as can be."""
        plain = Ask(())
        for name in (
            "logprobs",
            "salt",
            "after",
            "step",
            "abort_after",
            "temperature",
            "top_k",
            "top_p",
            "n",
        ):

            def with_default(ask: Ask, name: str = name) -> Ask:
                return replace(ask, **{name: getattr(plain, name)})

            self._each(with_default)
        self.fails(_startable([replace(each, preempt_every=0) for each in self.case]))
        self.fails(_startable([replace(each, after_sleep=False) for each in self.case]))
        for most in (1, 2, 3, 4, 6, 8):

            def shorter(ask: Ask, most: int = most) -> Ask:
                return replace(ask, max_tokens=min(ask.max_tokens, most))

            self._each(shorter)

    def _each(self, change: Callable[[Ask], Ask]) -> None:
        """Change all requests at once, or else one by one."""
        changed = [replace(each, requests=tuple(map(change, each.requests))) for each in self.case]
        if self.fails(_startable(changed)):
            return
        for i, j in [(i, j) for i, each in enumerate(self.case) for j in range(len(each.requests))]:
            now = self.case
            if i < len(now) and j < len(now[i].requests):
                requests = [*now[i].requests]
                requests[j] = change(requests[j])
                self.fails(
                    _startable([*now[:i], replace(now[i], requests=tuple(requests)), *now[i + 1 :]])
                )

    def _tokens(self) -> None:
        """Drop the same positions of all prompts, whole blocks first; shared prefixes stay."""
        for size in (self.failure.unit, 1):
            rounds = self.case
            longest = max(len(ask.prompt) for each in rounds for ask in each.requests)

            def keep(
                kept: Sequence[int], rounds: Rounds = rounds, size: int = size
            ) -> Rounds | None:
                pieces = set(kept)

                def keep_pieces(prompt: Sequence[int]) -> Sequence[int]:
                    return [token for i, token in enumerate(prompt) if i // size in pieces]

                return _with_prompts(rounds, keep_pieces)

            self.leave_out(range(-(-longest // size)), keep)
        for cut in (self.failure.unit, 4, 1):

            def shorten(ask: Ask, cut: int = cut) -> Ask:
                return replace(ask, prompt=ask.prompt[:-cut] or ask.prompt[:1])

            self._each(shorten)


def _startable(rounds: Sequence[Round]) -> Rounds | None:
    """Return the rounds without empty ones; None if nothing is left.

    No request waits for more answers than the others give: an engine would wait with it.
    """
    startable = []
    for each in rounds:
        requests = list(each.requests)
        for place, i in enumerate(sorted(range(len(requests)), key=lambda i: requests[i].after)):
            requests[i] = replace(requests[i], after=min(requests[i].after, place))
        startable += [replace(each, requests=tuple(requests))] * bool(requests)
    return tuple(startable) or None


def distinct(failures: Sequence[Failure]) -> list[Failure]:
    """Return the failures without deaths like an earlier one.

    An engine may die of one bug in most probes, and is slow to start.
    """
    known = {failure.last_words: failure for failure in reversed(failures) if failure.died}
    return [
        failure for failure in failures if not failure.died or known[failure.last_words] is failure
    ]


def _with_prompts(
    rounds: Rounds, change: Callable[[Sequence[int]], Sequence[int]]
) -> Rounds | None:
    def changed(ask: Ask) -> Ask:
        return replace(ask, prompt=tuple(change(ask.prompt)) or ask.prompt[:1])

    return _startable(
        [replace(each, requests=tuple(map(changed, each.requests))) for each in rounds]
    )


def as_json(rounds: Sequence[Round], whole: bool = False) -> list[dict[str, Any]]:
    """Return rounds as JSON has them.

    Fields at their default are left out, except `max_tokens` if the rounds are to be `whole`.
    """
    documents: list[dict[str, Any]] = []
    for each in rounds:
        given = [{"max_tokens": ask.max_tokens} if whole else {} for ask in each.requests]
        requests = [
            {"prompt": ask.prompt, **max_tokens, **ask.extras()}
            for ask, max_tokens in zip(each.requests, given, strict=True)
        ]
        documents.append(
            {"requests": requests}
            | ({"preempt_every": each.preempt_every} if each.preempt_every else {})
            | ({"after_sleep": True} if each.after_sleep else {})
        )
    return documents

"""A toy engine and oracle of one formula: every probe runs in milliseconds, with bugs to find."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch

from hybrid_kv.check.probes.guarded import Guarded
from hybrid_kv.check.probes.judge import Judge
from hybrid_kv.check.probes.oracle import Oracle
from hybrid_kv.check.probes.registry import load_probes
from hybrid_kv.check.probes.run import ProbeRun
from hybrid_kv.check.probes.run import guard as guard_all
from hybrid_kv.check.probes.session import Outcome, References, Session
from hybrid_kv.check.targets.target import CAPABILITIES, Answer, Ask, Kind, TargetError
from hybrid_kv.config import ConfigError

Settings = Mapping[str, str]
Tokens = tuple[int, ...]

VOCAB, UNIT = 50, 16
STATES = 9973
# Of the next token, after a text with each number. What is drawn from them is looked up: a run
# draws thousands.
LOGPROBS = (
    torch.sin(torch.arange(1, VOCAB + 1).double() * torch.arange(1, STATES + 1)[:, None]) * 6
).log_softmax(-1)
ROWS = LOGPROBS.tolist()
BEST = LOGPROBS.topk(3).indices.tolist()


def states(token_ids: Sequence[int], start: int = 7) -> list[int]:
    found = []
    for token in token_ids:
        start = (start * 31 + token + 1) % (2**31 - 1)
        found.append(start)
    return found


class ToyOracle:
    rounding, vocab_size = 1e-9, VOCAB

    def logprobs(self, token_ids: Sequence[int]) -> torch.Tensor:
        return LOGPROBS[torch.tensor(states(token_ids)) % STATES]

    def rounds(self, token_ids: Sequence[int]) -> None:
        pass

    def rounding_of(self, token_ids: Sequence[int]) -> float:
        return 1e-9

    def moves(self, token_ids: Sequence[int], roundings: float) -> Iterable[float]:
        return [1e-9]

    within = Oracle.within


class Toy:
    """`bug` is one of those that occur below; `can` what it offers.

    Its drafts turn what is drawn.
    """

    name, version, longest = "toy", "1.0", 512

    def __init__(
        self,
        settings: Settings | None = None,
        bug: str = "",
        can: frozenset[str] = frozenset(CAPABILITIES),
        rows: int = 8,
        accepted: int = 0,
    ) -> None:
        self.settings, self.bug, self.can = dict(settings or {}), bug, can
        self.drafts = self.settings.get("spec", "none") != "none"
        self.caches = self.settings.get("prefix", "off") == "on"
        self.cached, self.batched, self.aborted = set(), set(), set()
        self.counts = Counter(hits=0, drafts=0, accepted=0, preemptions=0)
        self.num_asked = self.num_aborted = 0
        self.accepted = accepted  # drafts, in each round
        self.slept = False

    def sleep(self) -> None:
        self.slept = True
        if self.bug != "asleep":
            self.cached.clear()

    def ask(self, requests: Sequence[Ask], preempt_every: int = 0) -> list[Answer]:
        if self.bug == "dies" and len(requests) > 6:
            raise TargetError("toy died at ask; its last words: Error")
        if self.bug == "dies of one token" and [len(ask.prompt) for ask in requests] == [1]:
            raise TargetError("toy died at ask; its last words: Error")
        self.counts["accepted"] += self.accepted
        order = sorted(range(len(requests)), key=lambda i: requests[i].after)
        assert all(requests[i].after <= place for place, i in enumerate(order)), (
            "an engine would wait forever"
        )
        answers = {i: self._answer(requests[i], len(requests), bool(preempt_every)) for i in order}
        return [answers[i] for i in range(len(requests))]

    def _answer(self, ask: Ask, others: int, preempted: bool) -> Answer:
        self.num_asked += 1
        self.num_aborted += ask.abort_after is not None
        self.counts["preemptions"] += preempted
        hit, own = 0, "" if self.bug == "salts" else ask.salt
        if self.caches:
            ends = range(UNIT, len(ask.prompt), UNIT)
            hit = max((end for end in ends if (own, ask.prompt[:end]) in self.cached), default=0)
        *_, state = states(ask.prompt)
        wrong = {
            "hit": hit > 0,
            "hit of two blocks": hit >= 2 * UNIT,
            "long hit": hit >= 8 * UNIT,
            "what a others leaves": (own, ask.prompt[:hit]) in self.batched,
            "ends with the hit": hit > 0 and len(ask.prompt) == hit + 1,
            "others": others > 5 and len(ask.prompt) == 1,
            "preempted": preempted,
            "asleep": hit > 0 and self.slept,
            "abort": ask.prompt in self.aborted,
            "churn": self.num_asked > 20 and len(ask.prompt) > 30,
            "n": ask.n > 1,
            "limit": len(ask.prompt) + ask.max_tokens == self.longest,
            "rows": self.num_aborted > 8 and ask.abort_after is None,
        }
        if wrong.get(self.bug):
            state += 1
        self.counts["hits"] += hit
        if ask.abort_after is not None:
            self.aborted.add(ask.prompt)
        tokens, likely = self._go_on(ask, state)
        if self.caches:
            text = (*ask.prompt, *tokens)
            ends = range(UNIT, len(text) - UNIT * (self.bug == "forgets the end"), UNIT)
            new = {(own, text[:end]) for end in ends} - self.cached
            self.cached |= new
            if others > 5:
                self.batched |= new
        said = hit if "cached" in self.can else None
        others = (
            ((1,) * ask.max_tokens,) * (ask.n - 1)
            if self.bug == "other answers"
            else (tokens,) * (ask.n - 1)
        )
        return Answer(tokens, said, likely if ask.logprobs else (), others)

    def _go_on(self, ask: Ask, state: int) -> tuple[Tokens, tuple[dict[int, float], ...]]:
        tokens, likely = [], []
        least = ask.max_tokens if ask.abort_after is None else min(ask.abort_after, ask.max_tokens)
        for i in range(least):
            row, best = ROWS[state % STATES], BEST[state % STATES]
            token = best[self.bug == "a tie" and len(ask.prompt) == 1 and i == 3]
            if ask.temperature:
                token = int(
                    (LOGPROBS[state % STATES] + _noise((ask.seed or 0) + self.drafts, i)).argmax()
                )
            tokens.append(token)
            likely.append({one: row[one] for one in (*best, token)})
            if self.bug == "logprobs":
                likely[-1][token] += 0.3
            (state,) = states([token], state)
        if self.bug == "ends early" and len(ask.prompt) == UNIT:
            del tokens[-1], likely[-1]
        return tuple(tokens), tuple(likely)

    def counters(self) -> dict[str, float]:
        return dict(self.counts)

    def reset(self) -> None:
        self.cached.clear()
        self.aborted.clear()
        self.num_aborted = 0

    def close(self) -> None:
        pass


def _noise(seed: int, i: int) -> torch.Tensor:
    return -torch.log(
        -torch.log(
            torch.rand(VOCAB, generator=torch.Generator().manual_seed(seed * 1000 + i)).double()
        )
    )


class ToyKind(Kind):
    def __init__(self, **how: Any) -> None:
        self.name, self.how = "toy", how
        self.factors = {"prefix": ("off", "on"), "chunk": ("whole", "no", "broken")}
        self.is_slow = lambda settings: False

    def start(self, folder: str, settings: Settings) -> Toy:
        if settings.get("dtype", self.factors.get("dtype", ("",))[0]) == "float8":
            raise ConfigError("toy, start: no float8 here")
        if settings.get("chunk") == "no":
            raise ConfigError("toy, start: no chunks here")
        if settings.get("chunk") == "broken":
            raise TargetError("toy died at start; it said nothing")
        return Toy(settings, **self.how)


def session(
    kind: Kind,
    prefix: str = "on",
    judge: Judge | None = None,
    references: References | None = None,
    **settings: str,
) -> Session:
    """A session of a toy engine, held against its oracle."""
    judge, references = judge or Judge(ToyOracle()), references or References(ToyKind(), "folder")
    return Session(kind, "folder", {"prefix": prefix, **settings}, judge, references)


def run_probe(session: Session, name: str) -> Outcome:
    (probe,) = [probe for probe in load_probes() if probe.name == name]
    return session.run(probe, VOCAB)


def guard(
    guarded: Guarded,
    matrix: Sequence[dict[str, str]] | None = None,
    select: Sequence[str] = (),
    report: Callable[[Outcome], None] = lambda outcome: None,
    jobs: int = 1,
) -> list[Outcome]:
    """The outcomes of one run."""
    run = ProbeRun(guarded, matrix, select, report)
    guard_all([run], jobs)
    return run.found()

"""Sessions: one engine with one setting, its probes, what was sent, and the answers."""

from __future__ import annotations

import math
import random
import re
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from statistics import fmean
from typing import Any

from hybrid_kv.check.probes.bounds import Seen, num_sure_drafts
from hybrid_kv.check.probes.judge import AnswerJudgement, Judge
from hybrid_kv.check.probes.known import name_known
from hybrid_kv.check.probes.registry import Probe, Round, Rounds, Traffic, Verdict, send
from hybrid_kv.check.targets.target import Answer, Ask, Kind, Target, TargetError, is_plain
from hybrid_kv.config import ConfigError

DEFAULT_UNIT = 16
# Requests of a round, see `Traffic.batch`.
BATCH = 24
SLOW_BATCH = 12  # where each step is slow
MOST_SURE = 4  # sure drafts for one that is accepted; 2, but that ends of answers cut drafts short


@dataclass(frozen=True)
class Failure:
    """The rounds that were sent, from an empty cache on, until an answer was wrong.

    Attributes:
        index: of the ask of the last round whose answer was wrong.
        unit: tokens of a cached block.
        died: there is no answer; the target died of the last round.
    """

    probe: str
    settings: Mapping[str, str]
    rounds: tuple[Round, ...]
    index: int
    answer: Answer
    judgement: AnswerJudgement
    unit: int = DEFAULT_UNIT
    died: bool = False

    @property
    def num_requests(self) -> int:
        return sum(len(sent.requests) for sent in self.rounds)

    @property
    def signs(self) -> tuple[Any, ...]:
        """Return what equal failures share: the answer's tokens as far as they were judged.

        Of a target that died they are its last words.
        """
        if self.died or self.answer.error:
            return (self.last_words,)
        wrong = self.answer.token_ids[: self.judgement.position + 1]
        return self.last_words, self.index, wrong

    @property
    def last_words(self) -> str:
        """Return the problem without numbers: an index, a shape, a token."""
        return re.sub(r"\d+", "#", self.judgement.problem)


@dataclass
class Outcome:
    """A probe in one setting.

    Attributes:
        detail: the reason of a verdict that is not "right".
        num_answers: that came, several to one prompt counted each.
        num_tokens: of prompts and answers.
        num_judged: answers that were found to be right or wrong, not unclear.
        moved: by how much each of the target's counters moved; "cached": the cached tokens of all
            answers; "sure": see `num_sure_drafts`.
        is_last: the target died, and does not start again.
    """

    probe: str
    settings: Mapping[str, str]
    verdict: Verdict = "right"
    detail: str = ""
    num_answers: int = 0
    num_tokens: int = 0
    num_judged: int = 0
    moved: dict[str, float] = field(default_factory=dict)
    seconds: float = 0.0
    is_last: bool = False
    failures: list[Failure] = field(default_factory=list)

    def add(self, again: Outcome) -> None:
        """Add another play of the probe, whose verdict stands where it is not right."""
        for name in ("num_answers", "num_tokens", "num_judged", "seconds"):
            setattr(self, name, getattr(self, name) + getattr(again, name))
        moved = {name: self.moved.get(name, 0.0) + value for name, value in again.moved.items()}
        self.moved |= moved
        self.is_last = again.is_last
        self.failures = again.failures
        if again.verdict != "right":
            self.verdict = again.verdict
            self.detail = f"{again.detail} (after {self.detail.partition(':')[0]})"


def plainly(ask: Ask) -> Ask:
    """Return the part of an ask that its answer depends on, whatever else runs.

    All greedy answers to one prompt are the same.
    """
    return replace(
        ask, salt="", after=0, abort_after=None, logprobs=True, n=ask.n if ask.temperature else 1
    )


class References:
    """The answers of the plainest engine of a dtype to each request, alone and cold.

    The engine is started when it is first needed.
    """

    def __init__(self, kind: Kind, folder: str, settings: Mapping[str, str] | None = None) -> None:
        self._kind = kind
        self._folder = folder
        self._settings = dict(settings or {})
        self.target: Target | None = None
        self._known: dict[Ask, Answer] = {}

    def alone(self, ask: Ask) -> Answer:
        """Return the answer to an ask.

        Raises:
            TargetError: the engine died.
        """
        plain = plainly(ask)
        if plain not in self._known:
            if self.target is None:
                self.target = self._kind.start(self._folder, self._settings)
            try:
                if "reset" in self.target.can:
                    self.target.reset()
                sent = plain if "logprobs" in self.target.can else replace(plain, logprobs=False)
                (self._known[plain],) = self.target.ask([sent])
            except TargetError:
                self.close()
                raise
        return self._known[plain]

    def close(self) -> None:
        if self.target is not None:
            self.target.close()
        self.target = None


@dataclass(frozen=True)
class SessionLoad:
    """The requests of a session's probes.

    Attributes:
        seed: of all draws.
        amount: how much each probe requests; 1 is a quick look.
        shortest: tokens that a prompt has at least.
        thorough: see `Traffic`.
    """

    seed: int = 0
    amount: int = 1
    shortest: int = 1
    thorough: bool = True


class Session:
    """A target that is started again when it dies.

    If the shortest prompt killed it, the next prompts are longer.

    Args:
        judge: shared by all settings of one dtype.
        references: for what the oracle can't say.

    Raises:
        ConfigError: the engine does not know the setting or the model.
        TargetError: it does not start.
    """

    def __init__(
        self,
        kind: Kind,
        folder: str,
        settings: Mapping[str, str],
        judge: Judge,
        references: References,
        load: SessionLoad = SessionLoad(),
    ) -> None:
        self.kind = kind
        self.folder = folder
        self.settings = dict(settings)
        self.judge = judge
        self.references = references
        self.load = load
        self.target = kind.start(folder, settings)
        self.unit = 0
        self.seen = Seen()
        self.sent = list[Round]()  # since the cache was empty
        self.shortest = load.shortest
        self._draws: dict[Ask, Answer] = {}
        self._preempted = 0.0  # requests, until the cache was emptied

    def is_plain(self, *factors: str) -> bool:
        """Return whether these factors are at their plainest level, as far as the kind has them."""
        return is_plain(self.kind, self.settings, factors)

    def traffic(self, name: str, vocab_size: int) -> Traffic:
        """Return the traffic of a probe, the same in every setting of the same block size."""
        if not self.unit:
            self.unit = self._discover(vocab_size)
        # Three blocks and an answer after them must fit; longer prompts only take longer.
        longest = min(self.target.longest, max(256, 5 * self.unit))
        rng = random.Random(f"{self.load.seed}/{name}")
        limit = self.target.longest
        batch = SLOW_BATCH if self.kind.is_slow(self.settings) else BATCH
        return Traffic(
            rng,
            vocab_size,
            self.unit,
            longest,
            limit,
            amount=self.load.amount,
            shortest=self.shortest,
            batch=batch,
            thorough=self.load.thorough,
        )

    def _discover(self, vocab_size: int) -> int:
        """Return the block size: all numbers of cached tokens are multiples of it."""
        if "cached" not in self.target.can or self.is_plain("prefix"):
            return DEFAULT_UNIT
        rng = random.Random(f"{self.load.seed}/unit")
        longest = self.target.longest
        traffic = Traffic(rng, vocab_size, DEFAULT_UNIT, longest, longest, num_new=1)
        seen = list[int]()
        for share in (0.05, 0.11, 0.23, 0.41, 0.73, 0.95):
            prompt = traffic.prompt(int(share * self.target.longest))
            for _ in range(2):
                ((answer,), _) = self.play(Round((Ask(prompt, max_tokens=1),)))
                seen += [answer.cached_tokens or 0]
            if sum(map(bool, seen)) == 3 and math.gcd(*seen) <= 8 * DEFAULT_UNIT:
                break  # longer prompts would find no other unit, only take longer
        unit = math.gcd(*seen)
        return (
            unit if unit > 1 else DEFAULT_UNIT
        )  # one token is no block: prompts would be of one to four tokens

    def run(self, probe: Probe, vocab_size: int) -> Outcome:
        """Send all rounds of a probe; the first wrong answer ends it.

        After a known one it goes on with longer prompts, where these are said to be right.
        """
        sent_shortest = self.shortest
        outcome = self._run(probe, vocab_size)
        known = name_known(self.kind, self.target.version, outcome)
        if known is None or outcome.is_last or known.shortest <= sent_shortest:
            return outcome
        shortest = self.shortest  # a death has raised it
        self.shortest = known.shortest
        outcome.add(self._run(probe, vocab_size))
        self.shortest = shortest
        return outcome

    def _run(self, probe: Probe, vocab_size: int) -> Outcome:
        begin = time.perf_counter()
        outcome = Outcome(probe.name, self.settings)
        missing = [name for name in probe.needs.split() if name not in self.target.can]
        if missing:
            outcome.verdict = "not supported"
            outcome.detail = f"the target offers no {', '.join(missing)}"
            return outcome
        try:
            self._play(probe, vocab_size, outcome)
        except TargetError as error:
            self._note_death(probe, outcome, error)
        outcome.seconds = time.perf_counter() - begin
        return outcome

    def _note_death(self, probe: Probe, outcome: Outcome, error: TargetError) -> None:
        """Note that the target died of the last round, and start it again."""
        outcome.verdict = "wrong"
        outcome.detail = outcome.detail or str(error)
        if not outcome.failures and self.sent:
            outcome.failures.append(self._death(probe, error))
        if self.sent and [len(ask.prompt) for ask in self.sent[-1].requests] == [self.shortest]:
            outcome.detail = f"a prompt of length {self.shortest}: {outcome.detail}"
            self.shortest += 1
        try:
            self.restart()
        except (ConfigError, TargetError) as again:
            outcome.detail = f"{outcome.detail}; then it does not start: {again}"
            outcome.is_last = True

    def _death(self, probe: Probe, error: TargetError) -> Failure:
        problem = str(error)
        return Failure(
            probe.name,
            self.settings,
            tuple(self.sent),
            index=0,
            answer=Answer((), error=problem),
            judgement=AnswerJudgement("wrong", problem),
            unit=self.unit or DEFAULT_UNIT,
            died=True,
        )

    def _play(self, probe: Probe, vocab_size: int, outcome: Outcome) -> None:
        rounds = probe.rounds(self.traffic(probe.name, vocab_size))
        self.reset()
        before = self.target.counters()
        unclear = self._send(probe, rounds, outcome)
        if not self.sent:
            outcome.verdict = "not supported"
            outcome.detail = "its requests would be too long"
            return
        after = self.target.counters()
        outcome.moved |= {name: after[name] - before.get(name, 0.0) for name in after}
        if not outcome.failures:
            self._conclude(probe, outcome, unclear)

    def _send(self, probe: Probe, rounds: Rounds, outcome: Outcome) -> str:
        """Send rounds until an answer is wrong; return the first problem of an unclear answer."""
        unclear = ""
        answers: Any = None
        with suppress(StopIteration):
            while not outcome.failures:
                sent = self._possible(rounds.send(answers))
                answers, judgements = self.play(sent)
                _count(outcome, sent, answers, judgements)
                failure = self.first_wrong(probe.name, answers, judgements)
                if failure is not None:
                    outcome.verdict = "wrong"
                    outcome.detail = failure.judgement.problem
                    outcome.failures.append(failure)
                problems = (judgement.problem for judgement in judgements)
                unclear = unclear or next(filter(None, problems), "")
        return unclear

    def _conclude(self, probe: Probe, outcome: Outcome, unclear: str) -> None:
        """Set the verdict of a probe none of whose answers is wrong."""
        if unclear:
            outcome.verdict = "inconclusive"
            outcome.detail = unclear
        elif self.judge.hides(Traffic.num_new):
            outcome.verdict = "inconclusive"
            outcome.detail = (
                f"rounding goes to {self.judge.limit:.2g}, which "
                f"{self.judge.hidden:.0%} of all tokens are within"
            )
        else:
            outcome.verdict, outcome.detail = self._moved_enough(probe, outcome.moved)

    def first_wrong(
        self, probe: str, answers: Sequence[Answer], judgements: Sequence[AnswerJudgement]
    ) -> Failure | None:
        """Return the first wrong one of the last round's answers, with the rounds until then."""
        for i, judgement in enumerate(judgements):
            if judgement.verdict == "wrong":
                return Failure(
                    probe, self.settings, tuple(self.sent), i, answers[i], judgement, self.unit
                )
        return None

    def restart(self) -> None:
        """Start a target that died.

        Raises:
            TargetError: it does not start.
        """
        self.target.close()
        self.target = self.kind.start(self.folder, self.settings)
        self.seen = Seen()
        self.sent = []
        self._preempted = 0.0

    def reset(self) -> None:
        """Forget the prefix cache, if the target can.

        What was moved to a further tier may still come back.
        """
        self.sent = []
        self.seen.forget_kept()
        self._preempted = self._preemptions()
        if "reset" in self.target.can:
            self.target.reset()
            if self.is_plain("offload"):
                self.seen = Seen()

    def play(self, sent: Round) -> tuple[list[Answer], list[AnswerJudgement]]:
        """Send a round; return its answers, and whether they are right."""
        self.sent.append(sent)
        raw = send(self.target, sent)
        answers = [self.judge.possible(answer) for answer in raw]
        judgements = [
            self._judge(sent, i, ask, answer)
            for i, (ask, answer) in enumerate(zip(sent.requests, answers, strict=True))
        ]
        self.seen.add(sent, answers)
        return answers, judgements

    def _judge(self, sent: Round, index: int, ask: Ask, answer: Answer) -> AnswerJudgement:
        """Judge an answer to a round's ask, and how much of its prompt came from the cache."""
        judgement = self.judge.judge(ask, answer, self._alone(ask, answer))
        cached = answer.cached_tokens or 0
        most = self.seen.shared(sent, index)
        if cached > most and self._preemptions() > self._preempted:
            # Some releases count a request's last hit.
            most = self.seen.shared(sent, index, finds_itself=True)
        if judgement.verdict == "right" and cached > most:
            problem = (
                f"{cached} cached tokens, but no text of its salt shares more than {most} with it"
            )
            return AnswerJudgement("wrong", problem, most_cached=most)
        inside = self.kind.inside
        keeps = inside is not None and inside.keeps(self.settings)
        least = self.seen.least(sent, self.unit or DEFAULT_UNIT) if keeps else 0
        if judgement.verdict == "right" and cached < least:
            problem = f"{cached} cached tokens, but {least} of its prompt were kept"
            return AnswerJudgement("wrong", problem, least_cached=least)
        return judgement

    def _preemptions(self) -> float:
        return self.target.counters().get("preemptions", 0.0)

    def _alone(self, ask: Ask, answer: Answer) -> Answer | None:
        """Return the answer that an answer is compared with, if it is not the oracle's.

        It is the plainest engine's, or, where draws may depend on the setting, the first one of
        this seed.
        """
        if ask.temperature and "seed in all settings" not in self.target.can:
            return self._draws.setdefault(plainly(ask), answer)
        return self.references.alone(ask) if self.judge.needs_alone(ask) else None

    def _possible(self, sent: Round) -> Round:
        """Return a round without the extras that the target lacks; no probe is about them."""
        can = self.target.can
        requests = tuple(
            replace(
                ask,
                logprobs=ask.logprobs and "logprobs" in can,
                salt=ask.salt if "salt" in can else "",
            )
            for ask in sent.requests
        )
        return replace(sent, requests=requests)

    def _moved_enough(self, probe: Probe, moved: Mapping[str, float]) -> tuple[Verdict, str]:
        """Return the verdict by the counter that the probe must move, and its reason."""
        if not probe.moves or (probe.when and self.is_plain(*probe.when.split())):
            return "right", ""
        name = probe.moves
        if name == "cached" and "cached" not in self.target.can:
            name = "hits"
        if name not in moved:
            detail = f"all answers are right, but no counter of {name} shows that it was at work"
            return "inconclusive", detail
        if not moved[name]:
            return "void", f"{name} stayed 0: nothing of what this probe is about happened"
        inside = self.kind.inside
        looks_up = inside is not None and inside.looks_up(self.settings)
        if looks_up and moved.get("accepted", 0) < moved["sure"] / MOST_SURE:
            detail = (
                f"{moved['accepted']:.0f} drafts were accepted, though {moved['sure']:.0f} tokens "
                "had always followed the one before"
            )
            return "void", detail
        return "right", ""


def _count(
    outcome: Outcome, sent: Round, answers: Sequence[Answer], judgements: Sequence[AnswerJudgement]
) -> None:
    for ask, answer, judgement in zip(sent.requests, answers, judgements, strict=True):
        texts = (answer.token_ids, *answer.others)
        outcome.num_answers += len(texts)
        outcome.num_tokens += len(ask.prompt) + sum(map(len, texts))
        outcome.num_judged += len(texts) if judgement.verdict in ("right", "wrong") else 0
        outcome.moved["cached"] = outcome.moved.get("cached", 0) + (answer.cached_tokens or 0)
        outcome.moved["sure"] = outcome.moved.get("sure", 0) + num_sure_drafts(ask, answer)


def calibrate(session: Session, vocab_size: int) -> None:
    """Measure rounding and repetition, each prompt alone and cold.

    The prompts are the same in every setting, so that the process in which it runs does not decide
    about a limit. A prompt that kills the target is left to the probes.

    Raises:
        ConfigError: there is neither an oracle nor log-probabilities.
        TargetError: every prompt kills it.
    """
    judge = session.judge
    target = session.target
    deaths = list[TargetError]()
    prompts = replace(session.traffic("calibrate", vocab_size), unit=DEFAULT_UNIT).mixed(8)
    texts = list[list[int]]()
    for prompt in prompts:
        answers = []
        try:
            for _ in range(2):
                session.reset()
                answers += session.play(Round((Ask(prompt, logprobs="logprobs" in target.can),)))[0]
        except TargetError as error:
            deaths.append(error)
            if len(deaths) == len(prompts):
                raise
            session.restart()
            continue
        first, second = answers
        rows = zip(first.logprobs, second.logprobs, first.token_ids, strict=False)
        for row, repeated, token in rows:
            judge.repeated = max(judge.repeated, abs(row[token] - repeated.get(token, math.inf)))
        if judge.oracle is not None:
            texts.append([*prompt, *first.token_ids])
            judge.oracle.rounds(texts[-1])
    judge.is_calibrated = True
    if judge.oracle is not None:
        judge.hidden = fmean(judge.oracle.within(text, judge.limit) for text in texts)
    if judge.oracle is None and "logprobs" not in target.can:
        raise ConfigError(
            "neither an oracle nor log-probabilities: no "
            "difference could be distinguished from rounding"
        )

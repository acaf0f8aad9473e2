"""Judgements of answers: wrong is only a difference that exceeds the rounding of this run."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import chain

import torch

from hybrid_kv.check.probes.oracle import ExactWeightsOracle, Oracle
from hybrid_kv.check.probes.registry import Verdict
from hybrid_kv.check.targets.exact import ExactAnswers
from hybrid_kv.check.targets.target import Answer, Ask

# Kernels that sum in other orders than transformers differ from it as it differs from float64, a
# few times over.
MARGIN = 8.0
# A seeded draw is turned by rounding about as often as rounding is large; a difference is put down
# to it from here on.
CHANCE = 0.01


@dataclass(frozen=True)
class AnswerJudgement:
    """The verdict about one answer.

    Attributes:
        problem: what is wrong or unclear, one line; empty if nothing is.
        position: of the first token, counted from the answer's first, that differs.
        expected: the right answer up to there.
        margin: how much likelier the right token is, as a difference of log-probabilities.
        logprob: the right log-probability of the token at `position`, where that is what is wrong.
        most_cached: of the prompt, where more of it is said to come from the cache.
        least_cached: of the prompt, where less of it is said to.
    """

    verdict: Verdict = "right"
    problem: str = ""
    position: int = 0
    expected: tuple[int, ...] = ()
    margin: float = 0.0
    logprob: float | None = None
    most_cached: int | None = None
    least_cached: int = 0


RIGHT = AnswerJudgement()


class Judge:
    """A judge of answers by the oracle, or by the plain engine once the oracle disagrees with it.

    Args:
        oracle: None where no other engine reads the model.

    Attributes:
        trusted: the oracle and the plain engine, each request alone and cold, agree.
        repeated: the largest difference of a log-probability between two equal requests, each alone
            and cold.
        is_calibrated: that and the oracle's rounding were measured.
        hidden: of all tokens, the share that may stand where another is right, since they are
            within the limit: an answer of random tokens would be taken for right so often.
    """

    is_exact = False

    def __init__(self, oracle: Oracle | None) -> None:
        self.oracle = oracle
        self.trusted = oracle is not None
        self.repeated = 0.0
        self.is_calibrated = False
        self.hidden = 0.0

    @property
    def limit(self) -> float:
        """Return the most that a log-probability may differ by."""
        return MARGIN * max(self.repeated, self.oracle.rounding if self.oracle is not None else 0.0)

    def hides(self, num_tokens: int) -> bool:
        """Return whether so many random tokens would too often be taken for right.

        Then no answer is shown to be right.
        """
        return self.limit == math.inf or (self.trusted and self.hidden**num_tokens > CHANCE)

    def possible(self, answer: Answer) -> Answer:
        """Return an answer, or an error in place of one with a token that the model does not have.

        Nothing can be computed with such a token.
        """
        most = self.oracle.vocab_size if self.oracle is not None else math.inf
        for token in (*answer.token_ids, *chain(*answer.others)):
            if not 0 <= token < most:
                return Answer((), error=f"token {token}: the model has {most:,}, from 0 on")
        return answer

    def needs_alone(self, ask: Ask) -> bool:
        """Return whether `judge` needs the answer of the plain engine alone."""
        return not self.trusted or ask.temperature > 0

    def judge(self, ask: Ask, answer: Answer, alone: Answer | None) -> AnswerJudgement:
        """Judge an answer, and the others to its request where several were asked for."""
        if answer.error:
            return AnswerJudgement("wrong", f"error: {answer.error}")
        if len(answer.others) != ask.n - 1:
            return AnswerJudgement("wrong", f"{1 + len(answer.others)} answers for n={ask.n}")
        return self._judge(ask, answer, alone)

    def _judge(self, ask: Ask, answer: Answer, alone: Answer | None) -> AnswerJudgement:
        if alone is not None and (
            alone.error or (ask.temperature and len(alone.others) != len(answer.others))
        ):
            return AnswerJudgement(
                "inconclusive", f"the same request alone had {alone.error or 'other answers'}"
            )
        if ask.temperature > 0:
            assert alone is not None
            return self._sampled(ask, answer, alone)
        if not (answer.is_greedy or self.trusted):
            return AnswerJudgement(
                "inconclusive", "what a search chose is held against an oracle alone"
            )
        judgements = [self._greedy(ask, answer.token_ids, answer.logprobs, alone, answer.is_greedy)]
        judgements += [self._greedy(ask, tokens, (), alone) for tokens in answer.others]
        unclear = next((judgement for judgement in judgements if judgement.problem), RIGHT)
        return next(
            (judgement for judgement in judgements if judgement.verdict == "wrong"), unclear
        )

    def _greedy(
        self,
        ask: Ask,
        tokens: tuple[int, ...],
        logprobs: Sequence[Mapping[int, float]],
        alone: Answer | None,
        is_greedy: bool = True,
    ) -> AnswerJudgement:
        least = _least(ask)
        expected = alone.token_ids if alone is not None else ()
        if not self.trusted:
            assert alone is not None
            least = min(least, len(alone.token_ids))
        elif tokens and tokens[-1] == 0:
            # The end-of-text token of the checkpoints that we write.
            least = min(least, len(tokens))
        if len(tokens) < least:
            return AnswerJudgement(
                "wrong", f"ends after {len(tokens)} of {least} tokens", len(tokens), expected
            )
        if not tokens:
            return RIGHT
        if self.trusted:
            return self._by_oracle(ask, tokens, logprobs, is_greedy)
        assert alone is not None
        return self._by_alone(tokens, logprobs, alone)

    def _by_oracle(
        self,
        ask: Ask,
        tokens: tuple[int, ...],
        logprobs: Sequence[Mapping[int, float]],
        is_greedy: bool,
    ) -> AnswerJudgement:
        assert self.oracle is not None
        text = [*ask.prompt, *tokens]
        rows = self.oracle.logprobs(text)[len(ask.prompt) - 1 : -1]
        judgement = _beyond(self.limit, rows, tokens, logprobs, is_greedy)
        if not judgement.problem or self.is_exact:
            return judgement
        # The limit comes from short texts. Rounding grows with their length, and may turn a choice
        # of experts.
        limit = self.limit
        rounding = MARGIN * self.oracle.rounding_of(text)
        for moved in self.oracle.moves(text, MARGIN):
            limit = max(limit, rounding + moved)
            judgement = _beyond(limit, rows, tokens, logprobs, is_greedy)
            if not judgement.problem:
                break
        if not judgement.problem:
            share = self.oracle.within(text, limit)
            if share ** len(tokens) > CHANCE:
                problem = (
                    f"in this text rounding goes to {limit:.2g}, "
                    f"which {share:.0%} of all tokens are within"
                )
                return AnswerJudgement("inconclusive", problem)
        return judgement

    def _by_alone(
        self, tokens: tuple[int, ...], logprobs: Sequence[Mapping[int, float]], alone: Answer
    ) -> AnswerJudgement:
        expected = alone.token_ids
        i = first_difference(tokens, expected)
        if i is None:
            rows = zip(logprobs, alone.logprobs, tokens, strict=False)
            for j, (given, given_alone, token) in enumerate(rows):
                off = abs(given[token] - given_alone[token])
                if not off <= self.limit:
                    problem = (
                        f"token {j} is the same alone, its log-probability "
                        f"off by {off:.3g} (limit {self.limit:.2g})"
                    )
                    return AnswerJudgement(
                        "wrong", problem, j, tokens[: j + 1], off, given_alone[token]
                    )
            return RIGHT
        if i < len(alone.logprobs):
            there = alone.logprobs[i]
            margin = there[expected[i]] - there.get(tokens[i], min(there.values()))
            if margin > self.limit:
                problem = (
                    f"token {i} is {tokens[i]}; alone it was "
                    f"{expected[i]}, likelier by {margin:.3g}"
                )
                return AnswerJudgement("wrong", problem, i, expected[: i + 1], margin)
        problem = (
            f"token {i} is {tokens[i]}, alone {expected[i]}: "
            "log-probabilities there, or an oracle, would decide"
        )
        return AnswerJudgement("inconclusive", problem, i, expected[: i + 1])

    def _sampled(self, ask: Ask, answer: Answer, alone: Answer) -> AnswerJudgement:
        answers = (answer.token_ids, *answer.others)
        for tokens, expected in zip(answers, (alone.token_ids, *alone.others), strict=True):
            i = first_difference(tokens, expected)
            if i is not None:
                by_chance = self.limit * ask.max_tokens
                verdict: Verdict = "wrong" if by_chance < CHANCE else "inconclusive"
                problem = (
                    f"token {i} of the draw with seed {ask.seed} "
                    "differs from the same request alone"
                )
                return AnswerJudgement(verdict, problem, i, expected[: i + 1])
        return RIGHT


class ExactJudge(Judge):
    """A judge of an exact model inside an engine: an answer is the oracle's or it is wrong.

    Nothing has a tolerance, and a temperature changes nothing: the logits are one-hot.
    """

    is_exact = True

    def __init__(self, folder: str) -> None:
        super().__init__(None)
        self._answers = ExactAnswers(folder)
        self.trusted = self.is_calibrated = True

    def needs_alone(self, ask: Ask) -> bool:
        return False

    def _judge(self, ask: Ask, answer: Answer, alone: Answer | None) -> AnswerJudgement:
        expected = tuple(self._answers.tokens(ask.prompt, ask.max_tokens))
        least = _least(ask)
        for tokens in (answer.token_ids, *answer.others):
            i = first_difference(tokens, expected)
            if i is not None:
                problem = f"token {i} is {tokens[i]}, not {expected[i]}"
                return AnswerJudgement("wrong", problem, i, expected[: i + 1])
            if not least <= len(tokens) <= ask.max_tokens:
                return AnswerJudgement(
                    "wrong", f"ends after {len(tokens)} of {least} tokens", len(tokens), expected
                )
        return RIGHT


class WeightsJudge(Judge):
    """A judge of a checkpoint whose every operation is exact, in an engine's layers and kernels.

    Nothing has a tolerance, in no dtype, and a temperature changes nothing: margins are 256.
    """

    is_exact = True

    def __init__(self, folder: str) -> None:
        super().__init__(ExactWeightsOracle(folder))
        self.is_calibrated = True

    def needs_alone(self, ask: Ask) -> bool:
        return False

    def _judge(self, ask: Ask, answer: Answer, alone: Answer | None) -> AnswerJudgement:
        return super()._judge(replace(ask, temperature=0.0), answer, None)


def _beyond(
    limit: float,
    rows: torch.Tensor,
    tokens: tuple[int, ...],
    logprobs: Sequence[Mapping[int, float]],
    is_greedy: bool,
) -> AnswerJudgement:
    """Judge an answer by the first token, or log-probability, that is further off than a limit.

    Args:
        rows: [num_tokens, vocab_size], the oracle's log-probabilities.
    """
    for i, token in enumerate(tokens if is_greedy else ()):
        best = int(rows[i].argmax())
        margin = float(rows[i, best] - rows[i, token])
        if margin > limit:
            problem = (
                f"token {i} is {token}; the oracle has {best}, "
                f"likelier by {margin:.3g} (limit {limit:.2g})"
            )
            return AnswerJudgement("wrong", problem, i, (*tokens[:i], best), margin)
    for i, given in enumerate(logprobs):
        right = float(rows[i, tokens[i]])
        off = abs(given[tokens[i]] - right)
        if not off <= limit:
            problem = (
                f"the log-probability of token {i} is off by "
                f"{off:.3g} (limit {limit:.2g}), though it is right"
            )
            return AnswerJudgement("wrong", problem, i, tokens[: i + 1], off, right)
    return RIGHT


def _least(ask: Ask) -> int:
    """Return the fewest tokens that an answer may have, unless a text ends it."""
    return ask.max_tokens if ask.abort_after is None else min(ask.abort_after, ask.max_tokens)


def first_difference(tokens: Sequence[int], expected: Sequence[int]) -> int | None:
    """Return the first index at which two answers differ, as far as both go."""
    pairs = enumerate(zip(tokens, expected, strict=False))
    return next((i for i, (token, right) in pairs if token != right), None)

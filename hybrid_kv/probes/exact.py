"""The judge of an exact model inside an engine: an answer is the oracle's, token by token, or it is wrong."""

from __future__ import annotations

from hybrid_kv.probes.judge import RIGHT, Judge, Judgement, first_difference
from hybrid_kv.targets.exact import ExactAnswers
from hybrid_kv.targets.target import Answer, Ask


class ExactJudge(Judge):
    """See `Judge`. Nothing has a tolerance, and a temperature changes nothing: the logits are one-hot."""

    is_exact = True

    def __init__(self, folder: str) -> None:
        super().__init__(None)
        self._answers = ExactAnswers(folder)
        self.trusted = self.is_calibrated = True

    def hides(self, num_tokens: int) -> bool:
        return False

    def possible(self, answer: Answer) -> Answer:
        return answer

    def needs_alone(self, ask: Ask) -> bool:
        return False

    def judge(self, ask: Ask, answer: Answer, alone: Answer | None) -> Judgement:
        if answer.error:
            return Judgement("wrong", f"error: {answer.error}")
        if len(answer.others) != ask.n - 1:
            return Judgement("wrong", f"{1 + len(answer.others)} answers for n={ask.n}")
        expected = tuple(self._answers.tokens(ask.prompt, ask.max_tokens))
        least = ask.max_tokens if ask.abort_after is None else min(ask.abort_after, ask.max_tokens)
        for tokens in (answer.token_ids, *answer.others):
            i = first_difference(tokens, expected)
            if i is not None:
                said = f"token {i} is {tokens[i]}, not {expected[i]}"
                return Judgement("wrong", said, i, expected[: i + 1])
            if not least <= len(tokens) <= ask.max_tokens:
                return Judgement("wrong", f"ends after {len(tokens)} of {least} tokens", len(tokens), expected)
        return RIGHT

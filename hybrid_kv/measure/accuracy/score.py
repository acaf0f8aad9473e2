"""Log-probabilities of given tokens, for tasks that choose among answers instead of writing one.

A context and its continuation are one prompt. It goes through scheduler, cache and model like any
other; the logits of the continuation are those that its prefill computes. The cache may serve the
context, as it is the same for all answers to a question. A hit that reaches into the continuation
would skip logits that are needed: such a prompt is sent once more, under a salt of its own, which
nothing in the cache has.
"""

from __future__ import annotations

import uuid
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch

from hybrid_kv.config import HybridKVError
from hybrid_kv.engine.llm import LLM
from hybrid_kv.engine.record import recorded
from hybrid_kv.request import ScheduledRequest
from hybrid_kv.sampling import SamplingParams, token_logprobs

ROWS = 64  # tokens whose logits are made at once: 64 of 131,072 words are 32 MiB in float32


class Score(NamedTuple):
    """The log-probability (natural) of a continuation.

    `is_greedy`: greedy decoding would write it.
    """

    log_prob: float
    is_greedy: bool


@dataclass
class _Target:
    """Tokens to score, the first of which follows position `first`.

    `scores` has None for each that has not run.
    """

    first: int
    tokens: Sequence[int]
    scores: list[tuple[float, bool] | None]


def score(
    llm: LLM, pairs: Sequence[tuple[Sequence[int], Sequence[int]]], progress: bool = False
) -> list[Score]:
    """Score every (context, continuation), both token ids and not empty, in the order given.

    Raises:
        HybridKVError: the engine refused a prompt; there is no score that could stand for that.
    """
    targets = [_Target(len(context) - 1, tokens, [None] * len(tokens)) for context, tokens in pairs]
    by_prompt: dict[tuple[int, ...], list[_Target]] = defaultdict(list)
    for (context, continuation), target in zip(pairs, targets, strict=True):
        by_prompt[(*context, *continuation[:-1])].append(target)  # nothing follows the last token
    _run(llm, by_prompt, [SamplingParams(max_tokens=1)] * len(by_prompt), progress)
    skipped = {
        prompt: targets
        for prompt, targets in by_prompt.items()
        if any(None in target.scores for target in targets)
    }
    if skipped:
        _run(
            llm,
            skipped,
            [SamplingParams(max_tokens=1, cache_salt=uuid.uuid4().hex) for _ in skipped],
            progress,
        )
    return [_sum(target) for target in targets]


def _run(
    llm: LLM,
    by_prompt: dict[tuple[int, ...], list[_Target]],
    params: Sequence[SamplingParams],
    progress: bool,
) -> None:
    def seen(item: ScheduledRequest, hidden: torch.Tensor) -> None:
        prompt = tuple(item.request.prompt_token_ids)
        targets = by_prompt[prompt]
        offset = item.num_computed_tokens
        begin = max(offset, min(target.first for target in targets))
        end = min(offset + item.num_tokens, len(prompt))
        for start in range(begin, end, ROWS):
            logits = llm.model.compute_logits(
                hidden[start - offset : min(start + ROWS, end) - offset]
            )
            _note(logits, start, targets)

    with recorded(llm, seen):
        outputs = llm.generate(list(by_prompt), params, progress)
    refused = [output.error for output in outputs if output.error is not None]
    if refused:
        raise HybridKVError(
            f"{len(refused)} of {len(outputs)} prompts cannot be scored; the first: {refused[0]}"
        )


@torch.inference_mode()
def _note(logits: torch.Tensor, start: int, targets: Sequence[_Target]) -> None:
    """Keep the scores that logits [tokens, vocab_size] give the targets' tokens.

    The logits are those of the positions from `start` on.
    """
    for target in targets:
        begin = max(0, start - target.first)  # in its tokens
        row = target.first + begin - start
        tokens = target.tokens[begin : begin + max(0, len(logits) - row)]
        if tokens:
            logprobs = token_logprobs(logits[row : row + len(tokens)], tokens, 1)
            target.scores[begin : begin + len(tokens)] = [
                (entry.logprob, entry.top[0][0] == token)
                for token, entry in zip(tokens, logprobs, strict=True)
            ]


def _sum(target: _Target) -> Score:
    scores = [score for score in target.scores if score is not None]
    assert len(scores) == len(target.tokens), "a prompt under a new salt has no hit"
    return Score(sum(value for value, _ in scores), all(is_best for _, is_best in scores))

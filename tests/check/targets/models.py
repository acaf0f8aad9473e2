"""Prompts, and what a model answers to them by the whole text."""

from __future__ import annotations

import random
from collections.abc import Sequence

import pytest
import torch

from hybrid_kv.check.targets.remote import python_of
from hybrid_kv.check.targets.target import Answer
from hybrid_kv.config import ConfigError

Hybrid = tuple[str, torch.nn.Module]
RNG = random.Random(0)
PROMPT = tuple(1 + i * i % 89 for i in range(40))
PROMPTS = [tuple(RNG.randrange(1, 101) for _ in range(length)) for length in (30, 7, 1, 18)]


def installed(engine: str = "vllm", package: str = "vllm") -> str:
    """Its Python; without one the test is skipped."""
    try:
        return python_of(engine, package)
    except ConfigError as error:
        pytest.skip(str(error))


def continued(model: torch.nn.Module, prompt: Sequence[int], num_new: int = 12) -> tuple[int, ...]:
    """Greedy, the whole text anew for each token."""
    tokens = list(prompt)
    with torch.inference_mode():
        for _ in range(num_new):
            tokens.append(
                int(model(torch.tensor([tokens]), use_cache=False).logits[0, -1].argmax())
            )
    return tuple(tokens[len(prompt) :])


def check_logprobs(model: torch.nn.Module, answer: Answer) -> None:
    """Each log-probability of the first answer is the model's, from the whole text before it."""
    text = (*PROMPTS[0], *answer.token_ids)
    with torch.inference_mode():
        expected = model(torch.tensor([text]), use_cache=False).logits[0].log_softmax(-1)
    for position, (token, given) in enumerate(
        zip(answer.token_ids, answer.logprobs, strict=True), len(PROMPTS[0]) - 1
    ):
        assert len(given) >= 5
        assert given[token] == pytest.approx(float(expected[position, token]), abs=1e-4)

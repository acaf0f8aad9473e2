"""Prompts for probes: random token ids, so that no two share a beginning by chance."""

from __future__ import annotations

import random
from dataclasses import dataclass, replace

from hybrid_kv.targets.target import Ask


@dataclass(frozen=True)
class Traffic:
    """What a probe draws its requests from.

    Attributes:
        unit: tokens of a cached block; a hit is a multiple of it.
        longest: tokens that a request of a probe may have.
        limit: tokens that a request of the target may have.
        num_new: tokens of an answer.
        amount: 1 for a quick look; how often probes that repeat something do so.
        shortest: tokens that a prompt has at least.
    """

    rng: random.Random
    vocab_size: int
    unit: int
    longest: int
    limit: int
    num_new: int = 12
    amount: int = 1
    shortest: int = 1

    def prompt(self, length: int) -> tuple[int, ...]:
        """Token 0 ends texts in many checkpoints, so it is left out."""
        length = max(self.shortest, min(length, self.longest - self.num_new))
        return tuple(self.rng.randrange(1, self.vocab_size) for _ in range(length))

    def repetitive(self, length: int) -> tuple[int, ...]:
        """A few tokens again and again: what a lookup of n-grams finds drafts in."""
        period = self.prompt(7)
        return tuple(period[i % 7] for i in range(min(length, self.longest - self.num_new)))

    def ask(self, prompt: tuple[int, ...], **fields: object) -> Ask:
        """No longer than the target lets it be: a text that is cut there is not wrong."""
        made = Ask(prompt, **{"max_tokens": self.num_new, "logprobs": self.rng.random() < 0.5, **fields})  # type: ignore[arg-type]
        return replace(made, max_tokens=max(1, min(made.max_tokens, self.limit - len(prompt))))

    def mixed(self, count: int) -> list[tuple[int, ...]]:
        """Prompts of one token to four blocks."""
        lengths = [1, 2, self.unit - 1, self.unit, self.unit + 1, 4 * self.unit]
        return [
            self.prompt(lengths[i] if i < len(lengths) else self.rng.randrange(1, 3 * self.unit)) for i in range(count)
        ]

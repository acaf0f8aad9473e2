"""Between tokens and text: what the engine asks of a tokenizer, and where a stop string ends a text."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

TAIL_MARGIN = 8  # tokens and characters before a stop string that a tail may show otherwise than the whole text does


class Tokenizer(Protocol):
    """The part of a Hugging Face tokenizer that the engine uses."""

    eos_token_id: int | None

    def encode(self, text: str) -> list[int]: ...

    def decode(self, token_ids: Sequence[int]) -> str: ...


def may_stop(tokenizer: Tokenizer, token_ids: Sequence[int], stops: Sequence[str]) -> bool:
    """Whether a stop string is in the end of the text, the part that the last token has changed.

    The whole text at every token would be quadratic. Tokens without a character of their own make the tail longer.
    """
    wanted = max(map(len, stops)) + TAIL_MARGIN
    length = wanted
    while len(text := tokenizer.decode(token_ids[-length:])) < wanted and length < len(token_ids):
        length *= 2
    return any(stop in text for stop in stops)


def stop_position(text: str, stops: Sequence[str]) -> int | None:
    """Where the first stop string begins in a text."""
    return min((position for stop in stops if (position := text.find(stop)) >= 0), default=None)

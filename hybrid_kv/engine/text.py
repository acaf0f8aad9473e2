"""The tokenizer that the engine needs, and the place where a stop string ends a text."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

# Tokens and characters before a stop string that a tail may show otherwise than the whole text does
TAIL_MARGIN = 8


class Tokenizer(Protocol):
    """The part of a Hugging Face tokenizer that the engine uses."""

    eos_token_id: int | None

    def encode(self, text: str) -> list[int]: ...

    def decode(self, token_ids: Sequence[int]) -> str: ...


def may_stop(tokenizer: Tokenizer, token_ids: Sequence[int], stops: Sequence[str]) -> bool:
    """Return whether a stop string is in the end of the text, which the last token has changed.

    The whole text at every token would be quadratic. Tokens without a character of their own make
    the tail longer.
    """
    wanted = max(map(len, stops)) + TAIL_MARGIN
    length = wanted
    while len(text := tokenizer.decode(token_ids[-length:])) < wanted and length < len(token_ids):
        length *= 2
    return any(stop in text for stop in stops)


def stop_position(text: str, stops: Sequence[str]) -> int | None:
    """Return where the first stop string begins in a text."""
    return min((position for stop in stops if (position := text.find(stop)) >= 0), default=None)


class TextStream:
    """The text of a growing answer, piece by piece.

    A piece leaves out what a later token may change or a stop string may end.

    A character of several tokens ends no piece. Decoding starts at the last piece but one: the
    whole text at every token would be quadratic, and a token alone may read otherwise than after
    its neighbour.
    """

    def __init__(self, tokenizer: Tokenizer, stops: Sequence[str]) -> None:
        self._tokenizer = tokenizer
        self._stops = stops
        self._token_ids: list[int] = []
        self._begin = self._end = 0  # of the tokens of the last piece
        self._held = ""
        self.num_characters = 0  # of the pieces so far

    def add(self, token_ids: Sequence[int]) -> str:
        """Return the piece that these tokens complete; it may be empty."""
        self._token_ids += token_ids
        known = self._tokenizer.decode(self._token_ids[self._begin : self._end])
        text = self._tokenizer.decode(self._token_ids[self._begin :])
        if len(text) > len(known) and not text.endswith("\N{REPLACEMENT CHARACTER}"):
            self._held += text[len(known) :]
            self._begin = self._end
            self._end = len(self._token_ids)
        piece = self._held[: len(self._held) - self._num_uncertain()]
        self._held = self._held[len(piece) :]
        self.num_characters += len(piece)
        return piece

    def _num_uncertain(self) -> int:
        """Characters at the end with which a stop string may begin."""
        lengths = range(min(len(self._held), max(map(len, self._stops), default=1) - 1), 0, -1)
        return next(
            (n for n in lengths if any(stop.startswith(self._held[-n:]) for stop in self._stops)), 0
        )

"""The guard model's tokenizer: a closed word list with single digits.

Text is cut by one regular expression; each piece is a token of its own. Words and digits carry
the space before them, so decoding is plain concatenation and gives back the exact text. Digits
are single tokens in two forms (" 4" starts a number after a space, "4" goes on with it). Pieces
outside the list become ``<unk>``: any text can be encoded, only known text decodes to itself.
"""

import re
from functools import cache

from hybrid_kv.check.guard_model import problems

EOS, UNK = "<eos>", "<unk>"
NEXT_QUESTION, FIRST_QUESTION, ANSWER, FINAL = (
    "\n\nQuestion:",
    "Question:",
    "\nAnswer:",
    "####",
)
PATTERN = r"\n\nQuestion:|Question:|\nAnswer:|####| ?[A-Za-z]+| ?[0-9]|\n|[^A-Za-z0-9\n]"
_PIECES = re.compile(PATTERN)
_GLUE = "How many does do have now and in total has more fewer than times as of"


@cache
def vocabulary() -> tuple[str, ...]:
    """Return all tokens; a token's position is its id."""
    tokens = [EOS, UNK, NEXT_QUESTION, FIRST_QUESTION, ANSWER, FINAL, "\n"]
    tokens += [f" {d}" for d in range(10)] + [str(d) for d in range(10)]
    tokens += list("+-*=. ?,:$/#%()<>'\"!")
    templates = (
        *problems.ADD,
        *problems.SUBTRACT,
        *problems.MULTIPLY.values(),
        *problems.ADD_BOXES,
        *problems.SUBTRACT_BOXES,
        problems.OPEN_BOXES,
        problems.LATCH,
        _GLUE,
    )
    words = {*problems.NAMES, *problems.ITEMS}
    for template in templates:
        words |= set(re.findall(r"[A-Za-z]+", re.sub(r"\{\w+\}", "", template)))
    return tuple(tokens + [f" {word}" for word in sorted(words)])


@cache
def token_ids() -> dict[str, int]:
    """Return the id of each token."""
    return {token: i for i, token in enumerate(vocabulary())}


def encode(text: str) -> list[int]:
    """Return token ids of ``text``: the saved tokenizer's, without its overhead."""
    ids = token_ids()
    unk = ids[UNK]
    return [ids.get(piece, unk) for piece in _PIECES.findall(text)]


def decode(ids: list[int]) -> str:
    """Return the text of ``ids``."""
    words = vocabulary()
    return "".join(words[i] for i in ids)

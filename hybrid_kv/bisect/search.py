"""Which of the commits in a row was the first bad one. Pure functions of answers."""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import Literal

Answer = Literal["good", "bad", "skip"]


def search(num: int, ask: Callable[[int], Answer]) -> tuple[int, int]:
    """Halve a row of `num` commits, the last of which is bad, until nothing between good and bad can be asked.

    Args:
        ask: whether a commit is bad; `skip` if it does not say.

    Returns:
        Positions of the last good commit (-1: the one before the row) and of the first bad one. What lies between
        them was skipped.
    """
    good, bad, skipped = -1, num - 1, set[int]()
    while (position := _next(good, bad, skipped)) is not None:
        answer = ask(position)
        if answer == "good":
            good = position
        elif answer == "bad":
            bad = position
        else:
            skipped.add(position)
    return good, bad


def num_questions(num: int) -> int:
    """How many commits of a row are asked at most if none is skipped."""
    return (num - 1).bit_length()


def _next(good: int, bad: int, skipped: Collection[int]) -> int | None:
    """The middle; where that was skipped a quarter, an eighth: commits that cannot run come in a row."""
    if all(position in skipped for position in range(good + 1, bad)):
        return None
    parts = 2
    while True:
        for part in range(1, parts, 2):
            position = good + (bad - good) * part // parts
            if position > good and position not in skipped:
                return position
        parts *= 2

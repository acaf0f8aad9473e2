"""The search: any culprit in any row is found, with few questions, whatever is skipped."""

from __future__ import annotations

import random

import pytest

from hybrid_kv.bisect.search import Answer, num_questions, search


def asked(num: int, culprit: int, skipped: set[int] | None = None) -> tuple[tuple[int, int], list[int]]:
    questions: list[int] = []

    def ask(position: int) -> Answer:
        questions.append(position)
        return "skip" if position in (skipped or ()) else "bad" if position >= culprit else "good"

    return search(num, ask), questions


@pytest.mark.parametrize("num", [1, 2, 3, 7, 200])
def test_every_culprit_is_found_with_as_many_questions_as_a_halving_needs(num: int) -> None:
    for culprit in range(num):
        found, questions = asked(num, culprit)
        assert found == (culprit - 1, culprit)
        assert len(questions) <= num_questions(num) and len({*questions}) == len(questions)


def test_what_was_skipped_lies_between_the_last_good_and_the_first_bad() -> None:
    for seed in range(300):
        rng = random.Random(seed)
        num = rng.randrange(1, 40)
        culprit = rng.randrange(num)
        skipped = {position for position in range(num - 1) if rng.random() < rng.choice((0.1, 0.5, 1))}
        (good, bad), questions = asked(num, culprit, skipped)
        assert good < culprit <= bad and {*range(good + 1, bad)} <= skipped
        assert good not in skipped and bad not in skipped and len({*questions}) == len(questions)


def test_a_long_row_that_cannot_run_costs_few_questions() -> None:
    found, questions = asked(200, 10, {*range(60, 140)})
    assert found == (9, 10) and len(questions) <= 10


def test_a_culprit_that_cannot_run_is_one_of_several() -> None:
    assert asked(9, 4, {3, 4, 5})[0] == (2, 6)

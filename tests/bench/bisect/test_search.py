"""The search: any first bad commit in any row is found, with few tests, whatever is skipped."""

from __future__ import annotations

import random

import pytest

from bench.bisect.find import search
from bench.bisect.question import Answer


def searched(
    num: int, first_bad: int, skipped: set[int] | None = None
) -> tuple[tuple[int, int], list[int]]:
    tests: list[int] = []

    def test(position: int) -> Answer:
        tests.append(position)
        return "skip" if position in (skipped or ()) else "bad" if position >= first_bad else "good"

    return search(num, test), tests


@pytest.mark.parametrize("num", [1, 2, 3, 7, 200])
def test_every_commit_is_found_with_as_many_tests_as_a_halving_needs(num: int) -> None:
    for first_bad in range(num):
        found, tests = searched(num, first_bad)
        assert found == (first_bad - 1, first_bad)
        assert len(tests) <= (num - 1).bit_length() and len({*tests}) == len(tests)


def test_what_was_skipped_lies_between_the_last_good_and_the_first_bad() -> None:
    for seed in range(300):
        rng = random.Random(seed)
        num = rng.randrange(1, 40)
        first_bad = rng.randrange(num)
        skipped = {
            position for position in range(num - 1) if rng.random() < rng.choice((0.1, 0.5, 1))
        }
        (good, bad), tests = searched(num, first_bad, skipped)
        assert good < first_bad <= bad and {*range(good + 1, bad)} <= skipped
        assert good not in skipped and bad not in skipped and len({*tests}) == len(tests)


def test_a_long_row_that_cannot_run_costs_few_tests() -> None:
    found, tests = searched(200, 10, {*range(60, 140)})
    assert found == (9, 10) and len(tests) <= 10

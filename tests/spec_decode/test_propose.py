"""N-gram drafts against the plainest search."""

from __future__ import annotations

import time

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from hybrid_kv.config import ConfigError
from hybrid_kv.spec_decode.propose import NgramProposer

STALE = -7


def brute_force(tokens: list[int], k: int, max_ngram: int, min_ngram: int) -> list[int]:
    for n in range(max_ngram, min_ngram - 1, -1):
        for start in range(len(tokens) - n):
            if tokens[start : start + n] == tokens[-n:]:
                return tokens[start + n : start + n + k]
    return []


def propose(
    proposer: NgramProposer, rows: list[list[int]], width: int | None = None
) -> list[list[int]]:
    """Behind each row's tokens lies what a reader of stale drafts would find: the row again."""
    width = width or max(map(len, rows)) + 3
    token_ids = np.full((len(rows), width), STALE)
    for i, row in enumerate(rows):
        token_ids[i] = np.resize(row, width)
        token_ids[i, : len(row)] = row
    return proposer.propose(rows, token_ids, np.array([len(row) for row in rows]))


@given(
    st.lists(st.lists(st.integers(0, 2), min_size=1, max_size=30), min_size=1, max_size=4),
    st.integers(1, 5),
    st.integers(1, 5),
    st.integers(0, 4),
)
@example([[1, 1, 1, 1]], 3, 3, 1)  # an occurrence that overlaps the suffix
@example([[5], [5, 5], [5, 6]], 2, 1, 0)
def test_equals_the_plain_search(rows: list[list[int]], k: int, min_ngram: int, more: int) -> None:
    proposer = NgramProposer(k, min_ngram + more, min_ngram)
    assert propose(proposer, rows) == [
        brute_force(row, k, min_ngram + more, min_ngram) for row in rows
    ]


@pytest.mark.parametrize(("k", "longest", "shortest"), [(0, 4, 1), (1, 1, 2), (1, 3, 0)])
def test_impossible_sizes_are_refused(k: int, longest: int, shortest: int) -> None:
    with pytest.raises(ConfigError, match="must be"):
        NgramProposer(k, longest, shortest)


@pytest.mark.parametrize("values", [1, 2, 50_000])
def test_a_long_row_is_no_loop_over_positions(values: int) -> None:
    """A python loop over 4,096 positions takes several times as long."""
    row = np.random.default_rng(0).integers(0, values, (1, 4096))
    proposer, n = NgramProposer(3, 4, 1), np.array([4096])
    times = []
    for _ in range(20):
        start = time.perf_counter()
        proposer.propose([None], row, n)
        times.append(time.perf_counter() - start)
    assert min(times) < 3e-4

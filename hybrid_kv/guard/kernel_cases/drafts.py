"""Drafts from a request's own text: wrong ones cost acceptance and change no token."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import torch

from hybrid_kv.config import ConfigError
from hybrid_kv.guard import definitions
from hybrid_kv.guard.kernel_cases.draw import Compared, Draw, longs
from hybrid_kv.spec_decode.propose import NgramProposer


def ngrams(draw: Draw) -> Iterator[Compared]:
    """Texts of few kinds of tokens; behind what is known of a row lie drafts that were turned down."""
    shortest = draw.number(1, 3)
    longest, count = shortest + draw.number(0, 3), draw.number(1, 4)
    proposer = NgramProposer(count, longest, shortest)
    kinds, rows = draw.one_of(1, 2, 3, 6), 4
    lengths = [draw.one_of(shortest + draw.number(0, 1), *[draw.number(1, 24)] * 3) for _ in range(rows)]
    texts = [draw.numbers(0, kinds - 1, length) for length in lengths]
    stale = [np.array(text + draw.numbers(0, kinds - 1, 4), dtype=np.int64) for text in texts]
    got = proposer.propose([None] * rows, stale, np.array([len(text) for text in texts]))
    for text, drafts in zip(texts, got, strict=True):
        yield "n-gram drafts", longs(drafts), np.array(definitions.ngram_drafts(text, count, longest, shortest))


def lookups(draw: Draw) -> Iterator[Compared]:
    """At least one draft, and suffixes of at least one token, the shortest no longer than the longest."""
    count, longest = draw.number(1, 4), draw.number(1, 3)
    asked = {(count, longest, longest): True, (0, longest, 1): False, (count, longest, 0): False}
    for given, is_possible in (asked | {(count, longest, longest + 1): False}).items():
        try:
            NgramProposer(*given)
        except ConfigError:
            is_possible = not is_possible
        yield f"NgramProposer{given}", torch.tensor(is_possible), np.array(True)


CASES = (ngrams, lookups)

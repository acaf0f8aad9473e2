"""Small operands, and what a case says of them."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from itertools import pairwise
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt
import torch

from hybrid_kv.guard.definitions import Floats
from hybrid_kv.kernels.common.spans import Spans

# What was compared, what the operation gave, and what its definition says.
Compared = tuple[str, torch.Tensor, npt.NDArray[Any]]
T = TypeVar("T")


class Draw:
    """Numbers for one round of cases."""

    def __init__(self, *seed: int) -> None:
        self._rng = np.random.default_rng(seed)

    def number(self, low: int, high: int) -> int:
        """`low` … `high`, both included."""
        return int(self._rng.integers(low, high + 1))

    def numbers(self, low: int, high: int, count: int) -> list[int]:
        return [self.number(low, high) for _ in range(count)]

    def chance(self) -> bool:
        return self.number(0, 1) == 1

    def one_of(self, *options: T) -> T:
        return options[self.number(0, len(options) - 1)]

    def some(self, options: Sequence[T]) -> list[T]:
        """Any of them, in any order; none, too."""
        order = self._rng.permutation(len(options))
        return [options[place] for place in order[: self.number(0, len(options))]]

    def floats(self, *shape: int, dtype: torch.dtype = torch.float64) -> torch.Tensor:
        """Normally distributed."""
        return torch.from_numpy(self._rng.standard_normal(shape)).to(dtype)

    def shares(self, *shape: int, dtype: torch.dtype = torch.float64) -> torch.Tensor:
        """0 … 1."""
        return torch.from_numpy(self._rng.random(shape)).to(dtype)

    def blocks(self, count: int) -> list[int]:
        """1 … `count` in any order, to be taken one by one from the end; 0 is the null block.

        Its neighbour, 1, is among the first four.
        """
        order: list[int] = (2 + self._rng.permutation(max(0, count - 1))).tolist()
        order.insert(max(0, len(order) - self.number(0, 3)), 1)
        return order[:count]

    def pool(self, count: int, *shape: int, dtype: torch.dtype) -> torch.Tensor:
        """`count` blocks with gaps between them, as `cache.layout` hands them out; NaN where nobody writes."""
        elements = math.prod(shape)
        page = elements + self.number(0, 3)
        raw = torch.full((count * page,), torch.nan, dtype=dtype)
        strides = [math.prod(shape[place + 1 :]) for place in range(len(shape))]
        return raw.as_strided((count, *shape), (page, *strides))

    def wanted(self, lengths: Sequence[int], chunk_size: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Rows and offsets of wanted states: around the ends of rows and chunks, in any order."""
        edges = (1, chunk_size - 1, chunk_size, chunk_size + 1, 2 * chunk_size)
        places = [(row, n) for row, end in enumerate(lengths) for n in sorted({*edges, end - 1, end}) if 0 < n <= end]
        chosen = self.some(places)
        return longs([row for row, _ in chosen]), longs([n for _, n in chosen])

    def spans(self, lengths: Sequence[int], blocks: list[int]) -> tuple[Spans, list[list[tuple[int, int]]]]:
        """The spans of a prefill, and per row the offsets and blocks of the states that it leaves.

        Some of the blocks are null, or negative, and get nothing.
        """
        kept: list[list[tuple[int, int]]] = []
        for length in lengths:
            edges = [n for n in sorted({1, 3, 15, 16, 17, length - 1, length}) if 0 < n <= length]
            kept.append([(n, self._block(blocks)) for n in self.some(edges)])
        flat = [(row, *entry) for row, entries in enumerate(kept) for entry in entries]
        rows, offsets, ids = (longs([entry[part] for entry in flat]) for part in range(3))
        ends = [self._block(blocks) for _ in lengths]
        for entries, length, block in zip(kept, lengths, ends, strict=True):
            entries += [(length, block)] if length else []
        return Spans(longs(lengths), longs(ends), rows, offsets, ids, chunk_size=16), kept

    def _block(self, blocks: list[int]) -> int:
        return self.one_of(0, -1, *[blocks.pop()] * 4)


def longs(values: Sequence[Any]) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int64)


def starts(lengths: Sequence[int]) -> list[int]:
    """Where each row begins, if they lie back to back, and where the last one ends."""
    return [0, *np.cumsum(lengths).tolist()]


def own_tokens(lengths: Sequence[int]) -> list[slice]:
    """The tokens of each row."""
    return [slice(begin, end) for begin, end in pairwise(starts(lengths))]


def wide(tensor: torch.Tensor) -> Floats:
    """A copy in float64."""
    return tensor.double().numpy().copy()


Case = Callable[[Draw], Iterator[Compared]]

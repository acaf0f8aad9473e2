"""Prefills cut into spans, and the states that are kept of them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from hypothesis import strategies as st
from hypothesis.strategies import DrawFn

from hybrid_kv.kernels.common.spans import Boundaries, Spans


@dataclass(frozen=True)
class Row:
    """A row of a prefill, as the tests of the kernels draw it.

    Attributes:
        length: its tokens.
        boundaries: tokens after which a state is kept besides the last, 1 … length, in any order.
        initial: whether it has an initial state.
        start: the block that it starts from: one of its own, that of its first kept state or of its
            last, the null block, or a negative id.
        keep: whether the states have blocks; otherwise they have the null block and negative ids.
        accepted: tokens accepted before.
    """

    length: int
    boundaries: tuple[int, ...] = ()
    start: str = "own"
    initial: bool = True
    keep: bool = True
    accepted: int = 1


@st.composite
def rows(draw: DrawFn, lengths: Sequence[int]) -> Row:
    length = draw(st.sampled_from(lengths))
    return Row(
        length=length,
        boundaries=tuple(draw(st.lists(st.integers(1, length), max_size=3))) if length else (),
        initial=draw(st.booleans()) or draw(st.booleans()),
        start=draw(st.sampled_from(["own", "own", "first", "last", "null", "negative"])),
        keep=draw(st.integers(0, 4)) > 0,
        accepted=draw(st.integers(1, 3)),
    )


class Cut:
    """The spans of some rows in separate blocks, and each row's kept states: [(offset, block)]."""

    def __init__(
        self,
        drawn: Sequence[Row],
        chunk_size: int,
        generator: torch.Generator,
        device: str = "cpu",
        index_dtype: torch.dtype = torch.int64,
    ) -> None:
        lengths = torch.tensor([row.length for row in drawn], dtype=torch.int64)
        flat = [(index, offset) for index, row in enumerate(drawn) for offset in row.boundaries]
        order = torch.randperm(len(flat), generator=generator).tolist()
        self.num_blocks = 1 + 2 * len(drawn) + len(flat)
        ids = (1 + torch.randperm(self.num_blocks - 1, generator=generator)).tolist()
        self.sources, last = [ids.pop() for _ in drawn], [ids.pop() for _ in drawn]
        self.kept = [[] for _ in drawn]
        boundaries = []
        for where in order:
            index, offset = flat[where]
            block = ids.pop()
            boundaries.append((index, offset, block if drawn[index].keep else -1))
            self.kept[index].append((offset, block))
        for index, row in enumerate(drawn):
            self.kept[index].append((row.length, last[index]))
            # A block that is written early may be the one that is read; it must have been read by
            # then.
            alternatives = {
                "first": min(self.kept[index])[1],
                "last": last[index],
                "null": 0,
                "negative": -1,
            }
            self.sources[index] = alternatives.get(row.start, self.sources[index])
            if not row.keep:
                last[index], self.kept[index] = 0, []
            elif not row.length:
                self.kept[index] = []
        blocks = torch.tensor(last, dtype=index_dtype, device=device)
        wanted = None
        if boundaries:
            row, offset, block = (torch.tensor(part) for part in zip(*boundaries, strict=True))
            wanted = Boundaries(row, offset, block.to(device, index_dtype))
        self.drawn, self.index_dtype, self.device = drawn, index_dtype, device
        self.spans = Spans(lengths, blocks, wanted, chunk_size)

    def arguments(self, sources: str) -> dict[str, Any]:
        """Of a call, the sources under that name."""
        return {
            "spans": self.spans,
            sources: torch.tensor(self.sources, dtype=self.index_dtype, device=self.device),
            "has_initial_state": torch.tensor(
                [row.initial for row in self.drawn], dtype=torch.bool, device=self.device
            ),
        }

    def rows(self) -> Iterator[tuple[Row, slice, int, list[tuple[int, int]]]]:
        """Return each row with tokens: index, tokens, block read (0: none), and what is kept."""
        first = 0
        for row, source, kept in zip(self.drawn, self.sources, self.kept, strict=True):
            if row.length:
                yield row, slice(first, first + row.length), max(0, source) * row.initial, kept
            first += row.length

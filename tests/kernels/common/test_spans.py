"""How a prefill is cut, against a walk over its tokens one by one."""

from dataclasses import dataclass

import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st

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
def rows(draw, lengths):
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

    def __init__(self, drawn, chunk_size, generator, device="cpu", index_dtype=torch.int64):
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

    def arguments(self, sources):
        """Of a call, the sources under that name."""
        return {
            "spans": self.spans,
            sources: torch.tensor(self.sources, dtype=self.index_dtype, device=self.device),
            "has_initial_state": torch.tensor(
                [row.initial for row in self.drawn], dtype=torch.bool, device=self.device
            ),
        }

    def rows(self):
        """Return each row with tokens: index, tokens, block read (0: none), and what is kept."""
        first = 0
        for row, source, kept in zip(self.drawn, self.sources, self.kept, strict=True):
            if row.length:
                yield row, slice(first, first + row.length), max(0, source) * row.initial, kept
            first += row.length


@given(
    st.lists(rows([0, 1, 2, 15, 16, 17, 40, 65]), max_size=4),
    st.sampled_from([16, 32]),
    st.integers(0, 99),
)
@example([Row(16, (16, 16)), Row(0), Row(33, (1, 16, 32))], 16, 0)
def test_equals_a_walk_over_the_tokens(drawn, chunk_size, seed):
    cut = Cut(drawn, chunk_size, torch.Generator().manual_seed(seed))
    spans, token = cut.spans, 0
    chunks, tiles, ends, found = [], [], [], []
    for index, row in enumerate(drawn):
        assert spans.cu_seqlens[index] == token
        first, here = token, []
        for position in range(row.length):
            # A chunk begins with the row, behind a boundary, and when it would become too long.
            if position == 0 or position in row.boundaries or token - chunks[-1][0] == chunk_size:
                chunks.append([token, token])
            if position % 16 == 0:
                tiles.append([index, first, token, token])
            token += 1
            chunks[-1][1] = tiles[-1][3] = token
        for span in range(spans.row_spans[index], spans.row_spans[index + 1]):
            offset, block = int(spans.cu_spans[span + 1]) - first, int(spans.span_blocks[span])
            here.append(offset)
            inside = spans.chunks[spans.cu_chunks[span] : spans.cu_chunks[span + 1]]
            bounds = [int(spans.cu_spans[span]), *inside[:, 1].tolist()]
            assert bounds[-1] == offset + first and inside[:, 0].tolist() == bounds[:-1]
            if block > 0:
                found.append((index, offset, block))
        assert here == sorted([*row.boundaries, row.length] if row.length else [])
        ends += here
    assert spans.cu_seqlens.tolist()[-1] == spans.num_tokens == token
    assert len(spans.cu_seqlens) == len(spans.row_spans) == len(drawn) + 1
    assert spans.chunks.tolist() == chunks and spans.tiles.tolist() == tiles
    assert int(spans.cu_chunks[-1]) == len(chunks) and spans.cu_spans[0] == 0
    assert sorted(found) == sorted(
        (index, *one) for index, kept in enumerate(cut.kept) for one in kept
    )
    assert spans.span_blocks.dtype == torch.int64
    for part in (spans.row_spans, spans.cu_spans, spans.cu_chunks, spans.chunks, spans.tiles):
        assert part.dtype == torch.int32 and part.is_contiguous() and part.data_ptr() % 16 == 0


@pytest.mark.parametrize("offset", [0, 4, -1])
def test_a_boundary_outside_of_its_row_is_refused(offset):
    wanted = Boundaries(
        torch.tensor([1, 1, 0]), torch.tensor([1, offset, 9]), torch.tensor([3, 4, 6])
    )
    with pytest.raises(ValueError, match=f"boundary {offset} lies outside of the 3 tokens"):
        Spans(torch.tensor([5, 3]), torch.tensor([1, 2]), wanted)


@pytest.mark.parametrize("chunk_size", [0, 8, 48])
def test_chunks_of_another_size_are_refused(chunk_size):
    with pytest.raises(
        ValueError, match=f"chunk_size is {chunk_size}; it must be a power of two >= 16"
    ):
        Spans(torch.tensor([5]), torch.tensor([1]), chunk_size=chunk_size)

"""How a prefill is cut, against a walk over its tokens one by one."""

from __future__ import annotations

import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st

from hybrid_kv.kernels.common.spans import Boundaries, Spans
from tests.support.spans import Cut, Row, rows


@given(
    st.lists(rows([0, 1, 2, 15, 16, 17, 40, 65]), max_size=4),
    st.sampled_from([16, 32]),
    st.integers(0, 99),
)
@example([Row(16, (16, 16)), Row(0), Row(33, (1, 16, 32))], 16, 0)
def test_equals_a_walk_over_the_tokens(drawn: list[Row], chunk_size: int, seed: int) -> None:
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
def test_a_boundary_outside_of_its_row_is_refused(offset: int) -> None:
    wanted = Boundaries(
        torch.tensor([1, 1, 0]), torch.tensor([1, offset, 9]), torch.tensor([3, 4, 6])
    )
    with pytest.raises(ValueError, match=f"boundary {offset} lies outside of the 3 tokens"):
        Spans(torch.tensor([5, 3]), torch.tensor([1, 2]), wanted)


@pytest.mark.parametrize("chunk_size", [0, 8, 48])
def test_chunks_of_another_size_are_refused(chunk_size: int) -> None:
    with pytest.raises(
        ValueError, match=f"chunk_size is {chunk_size}; it must be a power of two >= 16"
    ):
        Spans(torch.tensor([5]), torch.tensor([1]), chunk_size=chunk_size)

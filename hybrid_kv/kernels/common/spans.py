"""Cuts of a prefill's rows, made once per step on the host and read by every Mamba layer.

A *span* is the tokens of a row from one state that is kept to the next: up to a block boundary, or
to the row's end. The scan takes each span in *chunks*, counted from the start of the span. So a
boundary is always the end of a chunk and its state the one that the scan carries anyway; that a
chunk's state is stored as a boundary's (sgl#31833, vllm!34587) cannot happen. The price is at most
one partial chunk per boundary, none where block sizes are multiples of the chunk's. The convolution
takes each row in *tiles* from its start, since only its first tokens need the window.

Shapes considered. (a) Chunks from the row's start whatever the boundaries, states inside a chunk
computed apart (`ssd.chunk_scan`): one more product of matrices for every boundary. (b) Programs
look for their row in `cu_seqlens`: as the host knows all lengths, a search in every program of
every layer. (c) Lists made once. This is (c).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from hybrid_kv.kernels.common.launch import INTS, check, strides
from hybrid_kv.kernels.common.upload import Array, upload

TILE = 16  # tokens of the convolution's tiles
MAX_TOKEN_STRIDE = 2**24

_Ints = npt.NDArray[np.int64]


class Boundaries(NamedTuple):
    """Places inside of rows whose states are kept.

    Each is after a row's first `offset` tokens, 1 … the row's length.
    """

    rows: torch.Tensor  # [M] int64, in any order
    offsets: torch.Tensor  # [M] int64
    blocks: torch.Tensor  # [M] int32 or int64, for the states there


class Spans:
    """The rows of a prefill and the blocks for the states that it passes.

    Args:
        lengths: [num_rows] int64 on the CPU, tokens of each row, which lie back to back. Rows
            without tokens have no spans: nothing is read or written for them.
        state_indices: [num_rows] int32 or int64, the block for what a row's last token leaves
            after.
        boundaries: rows and offsets on the CPU, unless `moved` is given, blocks on the device of
            `state_indices`; None if there are none.
        chunk_size: tokens of a chunk at most, a power of two from 16 on.
        moved: the `cuts` of these, if they are on that device already.

    Attributes:
        cu_seqlens: [num_rows + 1] int32, first token of each row.
        row_spans: [num_rows + 1] int32, first span of each row.
        cu_spans: [num_spans + 1] int32, first token of each span; a span may be empty.
        span_blocks: [num_spans] int64, block for what is there after the span's last token.
        cu_chunks: [num_spans + 1] int32, first chunk of each span.
        chunks: [num_chunks, 2] int32, first token of each chunk and that after its last.
        tiles: [num_tiles, 4] int32, row of each tile, first token of the row, first token of the
            tile, and that after its last.

    Raises:
        ValueError: a boundary lies outside of its row, or `chunk_size` is no power of two >= 16.
    """

    def __init__(
        self,
        lengths: torch.Tensor,
        state_indices: torch.Tensor,
        boundaries: Boundaries | None = None,
        chunk_size: int = 128,
        moved: Sequence[torch.Tensor] = (),
    ) -> None:
        self.num_rows = len(lengths)
        self.num_tokens = int(lengths.sum())
        self.chunk_size = chunk_size
        blocks = state_indices
        if boundaries is not None:
            blocks = torch.cat([blocks, boundaries.blocks.to(blocks.dtype)])
        if not moved:
            none = torch.empty(0, dtype=torch.int64)
            row, offset, _ = boundaries or Boundaries(none, none, none)
            cuts = self.cuts(lengths.numpy(), row.numpy(), offset.numpy(), chunk_size)
            moved = upload(state_indices.device, *cuts)
        (
            self.cu_seqlens,
            self.row_spans,
            self.cu_spans,
            self.cu_chunks,
            self.chunks,
            self.tiles,
            entry,
        ) = moved
        self.span_blocks = blocks[entry].long()

    @staticmethod
    def cuts(tokens: _Ints, row: _Ints, offset: _Ints, chunk_size: int) -> list[Array]:
        """Cut rows into spans, chunks and tiles; return the arrays that the device needs.

        Args:
            tokens: [num_rows], of each row.
            row, offset: [M] each, of the boundaries.
            chunk_size: tokens of a chunk at most.

        Returns:
            int32 arrays: `cu_seqlens`, `row_spans`, `cu_spans`, `cu_chunks`, `chunks`, `tiles`, and
            of each span where its block stands among the rows' and then the boundaries'.

        Raises:
            ValueError: a boundary lies outside of its row, or `chunk_size` is no power of two >=
                16.
        """
        if chunk_size < 16 or chunk_size & (chunk_size - 1):
            raise ValueError(f"chunk_size is {chunk_size}; it must be a power of two >= 16")
        outside = np.flatnonzero((offset < 1) | (offset > tokens[row]))
        if len(outside):
            first = outside[0]
            length = tokens[row[first]]
            raise ValueError(
                f"boundary {offset[first]} lies outside of the {length} tokens of its row"
            )
        ends = tokens.cumsum()
        active = np.flatnonzero(tokens)
        # One entry per span: its row, its end counted in the row, and where its block stands: those
        # of the rows' ends first, then those of the boundaries.
        rows = np.concatenate([active, row])
        offsets = np.concatenate([tokens[active], offset])
        entries = np.concatenate([active, len(tokens) + np.arange(len(row))])
        order = np.lexsort((offsets, rows))
        rows = rows[order]
        offsets = offsets[order]
        entries = entries[order]
        cu_seqlens = np.concatenate([[0], ends])
        cu_spans = np.concatenate([[0], cu_seqlens[rows] + offsets])
        _, starts, stops, cu_chunks = _cut(cu_spans, chunk_size)
        tile_rows, tile_starts, tile_stops, _ = _cut(cu_seqlens, TILE)
        cuts = (
            cu_seqlens,
            np.searchsorted(rows, np.arange(len(tokens) + 1)),
            cu_spans,
            cu_chunks,
            np.stack([starts, stops], axis=1),
            np.stack([tile_rows, cu_seqlens[tile_rows], tile_starts, tile_stops], axis=1),
            entries,
        )
        return [cut.astype(np.int32) for cut in cuts]


def check_scan(
    spans: Spans,
    source_indices: torch.Tensor,
    has_initial_state: torch.Tensor,
    **tokens: torch.Tensor,
) -> None:
    """Check that a scan of spans may read its operands as it assumes to.

    Args:
        tokens: the operands that have an entry for each token, by name.

    Raises:
        ValueError: a number of tokens, stride, shape, dtype or device is another.
    """
    name, first = next(iter(tokens.items()))
    if len(first) < spans.num_tokens:
        raise ValueError(f"{name} has {len(first)} tokens; the spans have {spans.num_tokens}")
    # Offsets in a chunk are 32-bit: half the registers.
    widest = max(strides(*tokens.values()))
    if widest >= MAX_TOKEN_STRIDE:
        raise ValueError(
            f"tokens lie {widest} elements apart; it must be fewer than {MAX_TOKEN_STRIDE}"
        )
    check("spans", spans.chunks, spans.chunks.shape, (torch.int32,), first.device)
    check("source_indices", source_indices, (spans.num_rows,), INTS, first.device)
    check("has_initial_state", has_initial_state, (spans.num_rows,), (torch.bool,), first.device)


def _cut(bounds: _Ints, size: int) -> tuple[_Ints, _Ints, _Ints, _Ints]:
    """Cut each `bounds[i] … bounds[i + 1]` every `size` tokens.

    Returns:
        Segment, start and stop of each piece, and the numbers of pieces summed up, from 0.
    """
    counts = -(-np.diff(bounds) // size)
    cumulative = np.concatenate([[0], counts.cumsum()])
    segment = np.repeat(np.arange(len(counts)), counts)
    starts = bounds[segment] + (np.arange(len(segment)) - cumulative[segment]) * size
    return segment, starts, np.minimum(starts + size, bounds[segment + 1]), cumulative

"""The rule of scheme `recompute`: which block a decode reads, what it flushes, and to which block.

Invariants. The checkpoint lies in the block of column `(base_pos - 1) // block_size` of the
request's block table (column 0 in mode `none`), and so does what a flush writes, for the new
`base_pos`: a block that no other request can have seen. A step that does not flush writes no block,
so a checkpoint may be a cached block that others read too.

Rule for `n_flush`, with `n_hist` the tokens in the ring at the start of the step, T those of the
step and T_max the most that a step can have:

1. The history reaches the next block boundary: all tokens up to it, and the rest, less than T_max,
   stays. One step passes at most one boundary, as `1 + K <= block_size`.
2. Otherwise, `n_hist + T + T_max > ring_len`: all. Were they kept and all T accepted, then the
   T_max of the next step would run into the history that it reads. (It could not flush first:
   programs of other heads may still read.)
3. Otherwise none.

A ring of `3 * T_max - 1` tokens holds what rule 1 leaves, the step and the one after it; `n_hist`
never exceeds `ring_len - T_max`.
"""

from __future__ import annotations

import torch

from hybrid_kv.kernels.recompute.ring import RecomputeCursors, RecomputeStep


def commit_reference(
    cursors: RecomputeCursors,
    rows: torch.Tensor,
    num_gained_tokens: torch.Tensor,
    cu_seqlens: torch.Tensor,
    block_table: torch.Tensor,
    block_size: int | None,
) -> RecomputeStep:
    """Take in what the last step had accepted, decide what this one flushes, and move the cursors.

    A row without tokens only flushes, and only what a boundary demands: that is how a request that
    leaves is finalized. The returned `n_hist` is that before the flush, the cursors' that after it.
    A row of padding has the null block for both of its blocks, so no kernel touches its ring.

    Args:
        cursors: of the group; written.
        rows: [num_reqs] int32 or int64, where each request's cursors and rings are, each at most
            once; -1: padding.
        num_gained_tokens: [num_reqs] int32 or int64, in the request's last decode step, bonus token
            included; any number if there was none since its `restart`.
        cu_seqlens: [num_reqs + 1] int32 or int64, tokens of this step; at most `max_query_len`
            each.
        block_table: [num_reqs, width] int32 or int64 in the order of the batch.
        block_size: tokens of a column; None in mode `none`, which has one column.

    Raises:
        ValueError: a step could pass two boundaries.
    """
    if block_size is not None and block_size < cursors.max_query_len:
        raise ValueError(
            f"block_size={block_size} is shorter than a step of {cursors.max_query_len} tokens"
        )
    padding = rows < 0
    row = rows.clamp(min=0).long()
    lengths = cu_seqlens.diff().long()
    base_pos = cursors.base_pos[row]
    ring_start = cursors.ring_start[row]
    n_hist = cursors.n_hist[row] + torch.minimum(num_gained_tokens, cursors.prev_t[row])
    full = n_hist + lengths + cursors.max_query_len > cursors.ring_len
    n_flush = torch.where(full, n_hist, 0)
    source_column = torch.zeros_like(row)
    target_column = source_column
    if block_size is not None:
        to_boundary = block_size - base_pos % block_size
        n_flush = torch.where(n_hist >= to_boundary, to_boundary, n_flush)
        source_column = (base_pos - 1).clamp(min=0) // block_size
        target_column = (base_pos + n_flush - 1).clamp(min=0) // block_size
    src, dst = (
        block_table.gather(1, columns.masked_fill(padding, 0)[:, None])[:, 0]
        .long()
        .masked_fill(padding, 0)
        for columns in (source_column, target_column)
    )
    n_flush, n_hist, ring_start = (
        values.masked_fill(padding, 0) for values in (n_flush, n_hist, ring_start)
    )
    kept = ~padding
    for target, values in (
        (cursors.base_pos, base_pos + n_flush),
        (cursors.ring_start, (ring_start + n_flush) % cursors.ring_len),
        (cursors.n_hist, n_hist - n_flush),
        (cursors.prev_t, lengths),
    ):
        target[row[kept]] = values[kept]
    return RecomputeStep(row, src, dst, ring_start, n_hist, n_flush, cursors.max_query_len)

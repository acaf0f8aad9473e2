"""What kernels are compared with where no engine runs the same in plain torch."""

from __future__ import annotations

import torch

from hybrid_kv.kernels.block_tables import StagedBlocks, StepBatch, Tables
from hybrid_kv.kernels.slot_mapping import PAD_SLOT, slot_mapping


def update_block_tables_reference(tables: Tables, staged: StagedBlocks, batch: StepBatch) -> None:
    """`update_block_tables` in plain torch.

    Raises:
        IndexError: a row would become longer than its group's width.
    """
    first = 0
    for row, counts, overwrite in zip(staged.rows.tolist(), staged.counts.tolist(), staged.overwrite, strict=True):
        for group, count in enumerate(counts):
            start = 0 if overwrite else int(tables.num_blocks[row, group])
            if start + count > tables.layouts[group].width:
                raise IndexError(f"group {group} row {row}: {start + count} blocks exceed its width")
            tables.tables[group][row, start : start + count] = staged.ids[first : first + count]
            tables.num_blocks[row, group] = start + count
            first += count

    num_reqs, num_tokens = len(batch.rows), len(batch.positions)
    token_rows = batch.rows.repeat_interleave(batch.query_start_loc.diff())
    for group, layout in enumerate(tables.layouts):
        table, out = tables.tables[group], tables.input_tables[group]
        parts = torch.arange(layout.blocks_per_kv_block, dtype=torch.int32, device=table.device)
        out[:num_reqs] = (table[batch.rows].unsqueeze(-1) * layout.kernel_block_stride + parts).flatten(1)
        out[num_reqs : batch.num_reqs_padded] = 0
        if layout.has_slots:
            slots = slot_mapping(table, token_rows, batch.positions, layout.block_size, *tables.cp)
            tables.slot_mappings[group, :num_tokens] = slots
    tables.slot_mappings[:, num_tokens : batch.num_tokens_padded] = PAD_SLOT


def paged_attention_varlen_reference(
    query: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    block_table: torch.Tensor,
    query_start_loc: torch.Tensor,
    seq_lens: torch.Tensor,
    max_query_len: int,
    scale: float,
    grid: int = 0,
) -> torch.Tensor:
    """`paged_attention_varlen` in plain torch, row by row in float32; tokens of no row come out as zeros."""
    out = torch.zeros_like(query, memory_format=torch.contiguous_format)
    block_size, per_kv = key_cache.shape[1], query.shape[1] // key_cache.shape[2]
    starts, lens = query_start_loc.tolist(), seq_lens.tolist()
    for row, (start, stop, total) in enumerate(zip(starts, starts[1:], lens, strict=False)):
        if stop == start or int(block_table[row, 0]) == 0:
            continue
        place = torch.arange(total, device=query.device)
        blocks = block_table[row].long()[place // block_size]
        seen = place <= torch.arange(total - (stop - start), total, device=query.device)[:, None]
        if grid:
            seen &= place % grid != 0
        key, value = (
            cache[blocks, place % block_size].float().repeat_interleave(per_kv, 1) for cache in (key_cache, value_cache)
        )
        # Hidden tokens may hold NaN, which a weight of 0 does not stop.
        unseen = ~seen.any(0)[:, None, None]
        key, value = key.masked_fill(unseen, 0), value.masked_fill(unseen, 0)
        scores = torch.einsum("thd,shd->hts", query[start:stop].float(), key) * scale
        weights = scores.masked_fill(~seen, -torch.inf).softmax(-1).masked_fill(~seen, 0)
        out[start:stop] = torch.einsum("hts,shd->thd", weights, value).to(out.dtype)
    return out

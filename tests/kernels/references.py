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

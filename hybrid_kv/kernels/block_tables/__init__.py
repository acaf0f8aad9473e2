"""Block tables of all groups in one launch per step."""

from hybrid_kv.kernels.block_tables.launch import (
    DeviceTables,
    StagedBlocks,
    StepBatch,
    TableLayout,
    update_block_tables,
    update_block_tables_reference,
)

__all__ = [
    "DeviceTables",
    "StagedBlocks",
    "StepBatch",
    "TableLayout",
    "update_block_tables",
    "update_block_tables_reference",
]

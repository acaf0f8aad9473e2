"""Block tables of all groups: compiled loops on a host, one launch per step on a device."""

from hybrid_kv.kernels.block_tables.host import HostTables
from hybrid_kv.kernels.block_tables.launch import check_update, update_block_tables
from hybrid_kv.kernels.block_tables.tables import (
    DeviceTables,
    StagedBlocks,
    StepBatch,
    TableLayout,
    Tables,
)

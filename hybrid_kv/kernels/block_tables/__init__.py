"""Block tables of all groups: on a host in numpy, on a device in one launch per step."""

from hybrid_kv.kernels.block_tables.host import HostTables
from hybrid_kv.kernels.block_tables.launch import check_update, update_block_tables
from hybrid_kv.kernels.block_tables.tables import DeviceTables, StagedBlocks, StepBatch, TableLayout, Tables

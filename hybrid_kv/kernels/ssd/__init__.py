"""The state-space recurrence of a Mamba-2 layer: arithmetic, a verify step, a prefill."""

from hybrid_kv.kernels.ssd.prefill import CHUNK_BYTES, chunk_scan_prefill
from hybrid_kv.kernels.ssd.reference import (
    chunk_scan,
    chunk_scan_prefill_reference,
    selective_state_update,
    selective_state_update_slots_reference,
)
from hybrid_kv.kernels.ssd.slots import selective_state_update_slots

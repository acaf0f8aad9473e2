"""The gated delta rule, decays per head or key channel: arithmetic, verify steps, a prefill."""

from hybrid_kv.kernels.gated_delta.prefill import gated_delta_prefill
from hybrid_kv.kernels.gated_delta.recompute import gated_delta_flush, gated_delta_recompute
from hybrid_kv.kernels.gated_delta.reference import (
    delta_operands,
    gated_delta_chunk,
    gated_delta_prefill_reference,
    gated_delta_recompute_reference,
    gated_delta_update,
    gated_delta_update_slots_reference,
)
from hybrid_kv.kernels.gated_delta.slots import gated_delta_update_slots

"""Token positions to cache slots."""

from hybrid_kv.kernels.slot_mapping.reference import PAD_SLOT, slot_mapping

__all__ = ["PAD_SLOT", "slot_mapping"]

"""The gated delta rule of gated delta nets and of Kimi Delta Attention, in plain torch."""

from hybrid_kv.kernels.gated_delta.reference import gated_delta_chunk, gated_delta_update

__all__ = ["gated_delta_chunk", "gated_delta_update"]

"""The state-space recurrence of a Mamba-1 layer, in plain torch."""

from hybrid_kv.kernels.selective_scan.reference import selective_scan, selective_scan_update

__all__ = ["selective_scan", "selective_scan_update"]

"""The guard's checks that measure; importing this package registers them."""

from hybrid_kv.measure.guard_checks import accuracy, block_ids

__all__ = ["accuracy", "block_ids"]

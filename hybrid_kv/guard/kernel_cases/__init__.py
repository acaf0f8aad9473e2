"""Operations of `kernels`, and what they are handed, small, each with what its definition says: section *kernels*."""

from hybrid_kv.guard.kernel_cases import (
    attention,
    backends,
    blocks,
    drafts,
    experts,
    metadata,
    replay,
    staging,
    states,
    tables,
)

CASES = (
    *states.CASES, *blocks.CASES, *attention.CASES, *experts.CASES, *tables.CASES, *replay.CASES,
    *backends.CASES, *metadata.CASES, *staging.CASES, *drafts.CASES,
)  # fmt: skip

__all__ = ["CASES"]

"""Operations of `kernels` on small operands, each with what its definition makes of them: section *kernels*."""

from hybrid_kv.guard.kernel_cases import attention, blocks, experts, replay, states, tables

CASES = (*states.CASES, *blocks.CASES, *attention.CASES, *experts.CASES, *tables.CASES, *replay.CASES)

__all__ = ["CASES"]

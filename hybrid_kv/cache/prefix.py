"""The longest prefix of a text that every group can restore, from the blocks that can be found now."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence

from hybrid_kv.cache.block_hash import BlockHashes
from hybrid_kv.cache.block_pool import BlockPool
from hybrid_kv.cache.offload import KVOffload
from hybrid_kv.cache.request_blocks import PrefixHit
from hybrid_kv.cache.spec import KVCacheSpec, MambaSpec

Text = tuple[BlockHashes, Sequence[int]]  # of a request: its hashes, and the tokens that they are of


def longest_hit(
    specs: Sequence[KVCacheSpec],
    unit: int,
    pool: BlockPool,
    offload: KVOffload | None,
    hashes: BlockHashes,
    token_ids: Sequence[int],
) -> PrefixHit:
    """Attention needs all blocks of a prefix, Mamba only the state at its end; the last token is always computed.

    Args:
        specs: of each group.
        unit: tokens; every hit is a multiple of it.
        offload: where blocks may be beside the pool.
    """
    limit = len(token_ids) - 1
    chains = [hashes.chain(spec.block_size, token_ids, limit) for spec in specs]

    def has(group: int, block_idx: int) -> bool:
        key = (group, chains[group][block_idx])
        return pool.lookup(key) is not None or (offload is not None and offload.contains(key))

    own: list[int] = []

    def lacks(tokens: int) -> int | None:
        """The first group that cannot restore a prefix of `tokens` tokens."""
        logical_blocks = [tokens // spec.block_size - 1 for spec in specs]
        lost = (
            group for group, block_idx in enumerate(logical_blocks) if own[group] < tokens or not has(group, block_idx)
        )
        return next(lost, None)

    for group, spec in enumerate(specs):
        candidates = range(limit // spec.block_size)
        if isinstance(spec, MambaSpec):
            found = next((i + 1 for i in reversed(candidates) if has(group, i)), 0)
        else:
            found = next((i for i in candidates if not has(group, i)), len(candidates))
        own.append(found * spec.block_size)
    tokens = min(own) // unit * unit
    while tokens and lacks(tokens) is not None:
        tokens -= unit
    vetoed_by = lacks(tokens + unit) if max(own) >= tokens + unit else None
    return PrefixHit(tokens, tuple(own), vetoed_by, tuple(chains))


def shared_tokens(block_size: int, unit: int, text: Text, other: Text, end: int) -> int:
    """How many tokens a text could take from the first `end` of another one, if all of them were cached."""
    (hashes, token_ids), (other_hashes, other_ids) = text, other
    limit = min(end, len(token_ids) - 1)
    own, others = hashes.chain(block_size, token_ids, limit), other_hashes.chain(block_size, other_ids, limit)
    if limit < block_size or own[0] != others[0]:
        return 0  # as for most pairs: every waiting prompt is compared with every prefill in flight
    # Chained hashes are equal up to the first difference of the texts, and never again.
    equal = bisect_left(range(limit // block_size), True, key=lambda i: own[i] != others[i])
    return equal * block_size // unit * unit

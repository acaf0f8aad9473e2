"""The longest prefix of a text that every group can restore from blocks that can be found now."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence

from hybrid_kv.cache.block_hash import BlockHashes
from hybrid_kv.cache.block_pool import BlockPool
from hybrid_kv.cache.offload import KVOffload
from hybrid_kv.cache.request_blocks import PrefixHit
from hybrid_kv.cache.spec import KVCacheSpec, MambaSpec

# Of a request: its hashes, and the tokens that they are of.
Text = tuple[BlockHashes, Sequence[int]]


def longest_hit(
    specs: Sequence[KVCacheSpec],
    unit: int,
    pool: BlockPool,
    offload: KVOffload | None,
    hashes: BlockHashes,
    token_ids: Sequence[int],
) -> PrefixHit:
    """Return the longest prefix: attention needs all its blocks, Mamba only the state at its end.

    The last token is always computed.

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

    ends: list[int] = []

    def lacks(tokens: int) -> int | None:
        """Return the first group that cannot restore a prefix of `tokens` tokens."""
        logical_blocks = [tokens // spec.block_size - 1 for spec in specs]
        lost = (
            group
            for group, block_idx in enumerate(logical_blocks)
            if ends[group] < tokens or not has(group, block_idx)
        )
        return next(lost, None)

    for group, spec in enumerate(specs):
        candidates = range(limit // spec.block_size)
        if isinstance(spec, MambaSpec):
            num_blocks = next((i + 1 for i in reversed(candidates) if has(group, i)), 0)
        else:
            num_blocks = next((i for i in candidates if not has(group, i)), len(candidates))
        ends.append(num_blocks * spec.block_size)
    tokens = min(ends) // unit * unit
    while tokens and lacks(tokens) is not None:
        tokens -= unit
    vetoed_by = lacks(tokens + unit) if max(ends) >= tokens + unit else None
    return PrefixHit(tokens, tuple(ends), vetoed_by, tuple(chains))


def shared_tokens(block_size: int, unit: int, prompt: Text, other: Text, end: int) -> int:
    """Return how many tokens a text could take from the first `end` of another one.

    All of those are taken to be cached.
    """
    hashes, token_ids = prompt
    other_hashes, other_ids = other
    limit = min(end, len(token_ids) - 1)
    hashes_of_prompt = hashes.chain(block_size, token_ids, limit)
    others = other_hashes.chain(block_size, other_ids, limit)
    if limit < block_size or hashes_of_prompt[0] != others[0]:
        return 0  # as for most pairs: every waiting prompt is compared with every prefill in flight

    # Chained hashes are equal up to the first difference of the texts, and never again.
    def differs(block_idx: int) -> bool:
        return hashes_of_prompt[block_idx] != others[block_idx]

    different = True
    equal = bisect_left(range(limit // block_size), different, key=differs)
    return equal * block_size // unit * unit

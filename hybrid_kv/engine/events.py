"""Events by which an engine tells a router of its prefix cache.

So the router can send a prompt where most of it is cached.

    log = EventLog(llm)
    known = KnownCache(log.groups, log.hit_granularity)
    known.apply(log.take())  # again and again
    known.predict(prompt)  # tokens that this engine would restore

Contract. A block is named by its group and its chained hash, as in the engine's own lookups. A
router that counts blocks of one size finds nothing: the blocks of a hybrid's groups have unequal
sizes, and are larger than what a router expects (vllm!43258). So the engine says once which blocks
each group has; the router answers the engine's own question: how much of a prompt every group can
restore.

What is reported is the difference since the last time, so that a key is in one of two sets and
events have no order. A router that misses one forgets all that it knew: it predicts too little
until the next `snapshot`, never too much. Events that come twice, or after later ones, say
nothing, and neither do those of a log that another one has followed. What an offload tier holds is
not reported, and neither are partial blocks (`cache.partial_blocks`): the engine may restore more
than is predicted.
"""

from __future__ import annotations

import secrets
from collections.abc import Sequence
from dataclasses import dataclass, replace

from hybrid_kv.cache.block_hash import BlockHashes
from hybrid_kv.cache.block_pool import BlockKey
from hybrid_kv.cache.request_blocks import LogicalBlockRules
from hybrid_kv.engine.llm import LLM
from hybrid_kv.observe import EngineObserver


@dataclass(frozen=True)
class Group:
    """Blocks of `block_size` tokens.

    `num_tail_blocks`: from so many blocks before its end a prefix is restored: a state's own, those
    of a sliding window. None: all blocks are needed. `hash_size`: tokens of a hash of its chain, if
    not those of a block.
    """

    block_size: int
    num_tail_blocks: int | None = None
    hash_size: int | None = None


@dataclass(frozen=True)
class CacheEvents:
    """The keys that lookups find since the last events, and those that they do not find any more.

    Attributes:
        number: one more than that of the last ones.
        is_snapshot: `stored` is all that lookups find.
        log: which log they are from; an engine that starts again has another one.
    """

    number: int
    stored: frozenset[BlockKey]
    removed: frozenset[BlockKey] = frozenset()
    is_snapshot: bool = False
    log: str = ""


class EventLog(EngineObserver):
    """Hears from now on what an engine publishes and loses; the first events are a snapshot."""

    def __init__(self, llm: LLM) -> None:
        partial = llm.manager.partial
        unit = None if partial is None else partial.unit
        rules = [LogicalBlockRules(group.layer_specs[0]) for group in llm.manager.config.groups]
        self.groups = tuple(Group(group.block_size, group.num_tail_blocks, unit) for group in rules)
        self.hit_granularity = llm.manager.retention.unit
        self._pool = llm.manager.pool
        self._name = secrets.token_hex(8)
        self._number = 0
        self._is_stored: dict[BlockKey, bool] = {}  # of keys that changed
        llm.observers.append(self)

    def on_publish(
        self,
        request_id: str,
        group: int,
        logical_blocks: Sequence[int],
        blocks: Sequence[tuple[BlockKey, int]],
    ) -> None:
        self._is_stored.update((key, True) for key, _ in blocks)

    def on_unpublish(self, keys: Sequence[BlockKey]) -> None:
        self._is_stored.update((key, False) for key in keys)

    def take(self) -> CacheEvents:
        """Return the changes since the last events."""
        if not self._number:
            return self.snapshot()
        stored = frozenset(key for key, is_stored in self._is_stored.items() if is_stored)
        return self._next(
            CacheEvents(self._number, stored, frozenset(self._is_stored.keys() - stored))
        )

    def snapshot(self) -> CacheEvents:
        """All that lookups find, for a router that begins, or has missed events."""
        return self._next(
            CacheEvents(self._number, frozenset(self._pool.published_keys()), is_snapshot=True)
        )

    def _next(self, events: CacheEvents) -> CacheEvents:
        self._number += 1
        self._is_stored.clear()
        return replace(events, log=self._name)


class KnownCache:
    """A router's knowledge of one engine's cache.

    Args:
        groups, hit_granularity: those of the engine's `EventLog`.

    Attributes:
        keys: that its lookups find, as far as the router knows.
    """

    def __init__(self, groups: Sequence[Group], hit_granularity: int) -> None:
        self.groups = groups
        self.hit_granularity = hit_granularity
        self.keys: set[BlockKey] = set()
        self._next = 0
        self._log = ""
        self._ended: set[str] = set()  # logs that another one has followed

    def apply(self, events: CacheEvents) -> None:
        """Take over what has changed.

        After a gap, or from a new log, drop all known keys and keep only those of these events.

        Those that come twice or late say nothing: what they stored may be gone.
        """
        is_new = events.log != self._log
        if events.log in self._ended or (events.number < self._next and not is_new):
            return
        if is_new:
            self._ended.add(self._log)
            self._log = events.log
        if events.is_snapshot or is_new or events.number != self._next:
            self.keys.clear()
        self.keys |= events.stored
        self.keys -= events.removed
        self._next = events.number + 1

    def predict(self, token_ids: Sequence[int], salt: str = "") -> int:
        """Return how many tokens of a prompt the engine would restore.

        The last one is always computed.
        """
        limit = len(token_ids) - 1
        hashes = BlockHashes(salt)
        chains = []
        for group in self.groups:
            hash_size = group.hash_size or group.block_size
            step = group.block_size // hash_size
            chains.append(hashes.chain(hash_size, token_ids, limit)[step - 1 :: step])
        ends = range(limit // self.hit_granularity * self.hit_granularity, 0, -self.hit_granularity)
        return next(
            (
                end
                for end in ends
                if all(self._has(index, chains[index], end) for index in range(len(chains)))
            ),
            0,
        )

    def _has(self, index: int, chain: Sequence[bytes], end: int) -> bool:
        """Return whether a group can restore so many tokens."""
        group = self.groups[index]
        count = end // group.block_size
        tail = count if group.num_tail_blocks is None else min(group.num_tail_blocks, count)
        return all((index, block) in self.keys for block in chain[count - tail : count])

"""Notifications of blocks that change hands.

The manager calls each of its observers at the moment named here. An observer may look at the pool
and raise; it changes nothing that it is given, and may keep it: new ids never change. Subclasses
override what they want to hear of: by default nothing happens.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from hybrid_kv.cache.block_pool import BlockIds, BlockKey


class BlockCopy(NamedTuple):
    """A block of a group whose content another one gets."""

    group: int
    source: int
    target: int


class CacheObserver:
    """An observer of `KVCacheManager`.

    Logical blocks come group by group, as int32 block ids; 0, the null block, is a gap.
    """

    def on_hit(self, request_id: str, logical_blocks: Sequence[BlockIds]) -> None:
        """Hear that a new request took published blocks.

        They are all logical blocks of its hit, null where it needs none.
        """

    def on_allocate(self, request_id: str, logical_blocks: Sequence[BlockIds]) -> None:
        """Hear that a request got fresh blocks: new logical blocks, null where it needs none."""

    def on_load(
        self, request_id: str, logical_blocks: Sequence[tuple[BlockKey, int]], ids: BlockIds
    ) -> None:
        """Hear that a request got fresh blocks `ids`, one for each key and logical block.

        The offload tier fills them from here on.
        """

    def on_publish(
        self,
        request_id: str,
        group: int,
        logical_blocks: Sequence[int],
        blocks: Sequence[tuple[BlockKey, int]],
    ) -> None:
        """Hear that lookups find the keys and blocks of a request's logical blocks.

        Where another block came first they find that one. It is called once for each group that has
        completed some, also where none of these is kept.
        """

    def on_copy_blocks(self, request_id: str, num_tokens: int, copies: Sequence[BlockCopy]) -> None:
        """Hear that fresh blocks of a request are about to get the content of others.

        Of attention it counts as far as the first `num_tokens` tokens go, which end inside the
        block; a state is that after these.
        """

    def on_publish_partial(
        self, request_id: str, num_tokens: int, blocks: Sequence[tuple[BlockKey, int]]
    ) -> None:
        """Hear that lookups find blocks for a request's first `num_tokens` tokens.

        They are no logical blocks of it (`cache.partial_blocks`).
        """

    def on_unpublish(self, keys: Sequence[BlockKey]) -> None:
        """Hear that lookups do not find these keys any more.

        Their blocks are handed out, or the cache is reset.
        """

    def on_free(self, request_id: str, ids: BlockIds, ended: bool = False) -> None:
        """Hear that a request is about to give blocks back; all that it holds if it `ended`."""

    def on_reset(self) -> None:
        """Hear that nothing is published any more."""

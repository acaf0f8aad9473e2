"""Notifications of blocks that change hands.

The manager calls each of its observers at the moment named here. An observer may look at the pool
and raise; it changes nothing that it is given, and may keep it: new ids never change. Subclasses
override what they want to hear of: by default nothing happens.
"""

from __future__ import annotations

from collections.abc import Sequence

from hybrid_kv.cache.block_pool import BlockIds, BlockKey


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

    def on_unpublish(self, keys: Sequence[BlockKey]) -> None:
        """Hear that lookups do not find these keys any more.

        Their blocks are handed out, or the cache is reset.
        """

    def on_free(self, request_id: str, ids: BlockIds, ended: bool = False) -> None:
        """Hear that a request is about to give blocks back; all that it holds if it `ended`."""

    def on_reset(self) -> None:
        """Hear that nothing is published any more."""

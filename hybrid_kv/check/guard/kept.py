"""Blocks that can be restored from the device and from host memory, and the cost of restoring them.

It follows from which request takes, publishes and frees which block, by the tokens that it stands
for: no hash, no queue and no counter of the cache is used. So hits, loads and losses are exact in a
full pool and a full tier, too.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Sequence

from hybrid_kv.attention.rollback import RollbackStep
from hybrid_kv.cache.block_pool import BlockIds, BlockKey
from hybrid_kv.cache.observe import BlockCopy
from hybrid_kv.cache.offload import Page
from hybrid_kv.check.guard.published import (
    longest_attended,
    longest_hit,
    longest_hit_at_units,
)
from hybrid_kv.check.guard.step import RuleError, Track
from hybrid_kv.engine.llm import LLM
from hybrid_kv.observe import EngineObserver
from hybrid_kv.request import Request

Name = tuple[int, Hashable]  # of a block: its group, and what tells its tokens up to its end


class Device:
    """The blocks that can be found on the device.

    Attributes:
        num_lost: of them, those that were handed out again.
    """

    def __init__(self) -> None:
        self.num_lost = 0
        # The first block of a name is found; the others are there if it is lost.
        self._blocks: dict[Name, dict[int, None]] = {}
        self._names: dict[int, Name] = {}

    def __contains__(self, name: Name) -> bool:
        return name in self._blocks

    def __len__(self) -> int:
        return len(self._blocks)

    def found(self, name: Name) -> int | None:
        """Return the block that is found by this name."""
        return next(iter(self._blocks.get(name, ())), None)

    def take(self, ids: Iterable[int]) -> None:
        """Give blocks to an owner who fills them anew."""
        for block in ids:
            if block in self._names:
                self.num_lost += 1
                self._forget(block)

    def publish(self, name: Name, block: int) -> bool:
        """Publish a block; return whether it is the one that is found from now on."""
        if block in self._names:
            return False
        self._names[block] = name
        equal = self._blocks.setdefault(name, {})
        equal[block] = None
        return len(equal) == 1

    def give_back(self, ids: Iterable[int]) -> None:
        """Forget equal blocks but the one that is found."""
        for block in ids:
            name = self._names.get(block)
            if name is not None and next(iter(self._blocks[name])) != block:
                self._forget(block)

    def clear(self) -> None:
        """Forget all blocks."""
        self._blocks.clear()
        self._names.clear()

    def _forget(self, block: int) -> None:
        name = self._names.pop(block)
        del self._blocks[name][block]
        if not self._blocks[name]:
            del self._blocks[name]


class HostCopies:
    """Copies in so many bytes of host memory; the least recently used ones leave.

    Args:
        block_bytes: of each group.

    Attributes:
        stored, loaded: blocks, by group.
        num_left: copies that had to leave.
    """

    def __init__(self, limit: int, block_bytes: Sequence[int]) -> None:
        self.limit = limit
        self.block_bytes = block_bytes
        self.stored = [0] * len(block_bytes)
        self.loaded = [0] * len(block_bytes)
        self.num_left = self.used = 0
        self._names: dict[Name, None] = {}  # in the order of use

    def __contains__(self, name: Name) -> bool:
        return name in self._names

    def fits(self, group: int) -> bool:
        """Return whether a block of this group can be kept at all."""
        return self.block_bytes[group] <= self.limit

    def store(self, names: Sequence[Name]) -> None:
        """Copy from the device what is not there yet."""
        for name in names:
            self.stored[name[0]] += name not in self._names and self.fits(name[0])
        self.keep(names)

    def load(self, names: Sequence[Name]) -> None:
        """Copy blocks to the device."""
        for name in names:
            self.loaded[name[0]] += 1
        self.keep(names)

    def keep(self, names: Sequence[Name]) -> None:
        """Use copies together, the last one last: none leaves before all are there."""
        for name in names:
            if self.fits(name[0]):
                self.used += self.block_bytes[name[0]] * (name not in self._names)
                self._names.pop(name, None)
                self._names[name] = None
        while self.used > self.limit:
            name = next(iter(self._names))
            del self._names[name]
            self.used -= self.block_bytes[name[0]]
            self.num_left += 1


class KeptBlocks(EngineObserver):
    """The blocks in device and host memory of one engine.

    Args:
        tracks: of each request, by number.

    Attributes:
        hits: of each request, how many tokens could be restored when it was admitted last.
        junctions: and how many attention had, if these were more; else 0.
        host: None without host memory.
        loses: whether the host has nothing to give in this step, though it still says so.
        has_lost: whether the step has asked it for something.
    """

    def __init__(self, llm: LLM, tracks: Sequence[Track]) -> None:
        self.hits: dict[str, int] = {}
        self.junctions: dict[str, int] = {}
        self.device = Device()
        self.host: HostCopies | None = None
        self._llm = llm
        self._tracks = tracks
        groups = llm.plan.config.groups
        self._specs = [group.spec for group in groups]
        if llm.manager.offload is not None:
            block_bytes = [
                sum(spec.page_size_bytes for spec in group.layer_specs) for group in groups
            ]
            self.host = HostCopies(llm.config.cache.kv_offload_bytes, block_bytes)
            self._fetch = llm.manager.offload.fetch
            llm.manager.offload.fetch = self.fetch  # type: ignore[method-assign]
        self.loses = self.has_lost = False
        self._holders: set[str] = set()
        self._new: list[Name] = []  # published by one call of the cache, which stores them together
        self._last = "", -1  # request and group of the last ones

    @property
    def has_all(self) -> bool:
        """Return whether all that was ever published can be restored."""
        if self._llm.config.cache.prefix_match_unit is not None:
            return False  # The host has whole blocks alone.
        self._store()
        host = self.host
        return (
            host is not None and all(map(host.fits, range(len(self._specs)))) and not host.num_left
        )

    def fetch(self, keys: Sequence[BlockKey]) -> list[Page] | None:
        """Call `KVOffload.fetch`, or return None in a step in which the host loses its copies."""
        self.has_lost |= self.loses
        return None if self.loses else self._fetch(keys)

    def check(self) -> None:
        """Compare the engine's counts with those kept here, before each step.

        Raises:
            RuleError: `findable`, `evictions` or `tier`; the engine counts something else.
        """
        self._store()
        self.loses = self.has_lost = False
        pool = self._llm.manager.pool
        if pool.num_published_blocks != len(self.device):
            raise RuleError(
                "findable",
                f"{pool.num_published_blocks} blocks can be "
                f"found, {len(self.device)} were published",
            )
        if pool.num_evictions != self.device.num_lost:
            raise RuleError(
                "evictions",
                f"{pool.num_evictions} evictions are said to "
                f"be, {self.device.num_lost} blocks were lost",
            )
        host = self.host
        tier = self._llm.manager.offload
        if host is None or tier is None:
            return
        stats = tier.stats
        blocks = sum(host.stored), sum(host.loaded), sum(host.loaded), 0, 0, host.num_left
        counted = (
            stats.stored_blocks,
            stats.loaded_blocks,
            stats.host_hits,
            stats.folder_hits,
            stats.misses,
            stats.host_evictions,
        )
        if counted != blocks:
            raise RuleError(
                "tier",
                "blocks stored, loaded, hits of host and folder, "
                f"misses and evictions are {blocks}, not {counted}",
            )
        due = host.used, self._bytes(host.stored), self._bytes(host.loaded)
        num_bytes = tier.host_used, stats.stored_bytes, stats.loaded_bytes
        if num_bytes != due:
            raise RuleError("tier", f"bytes used, stored and loaded are {due}, not {num_bytes}")

    def _bytes(self, counts: Sequence[int]) -> int:
        assert self.host is not None
        return sum(count * size for count, size in zip(counts, self.host.block_bytes, strict=True))

    def on_hit(self, request_id: str, logical_blocks: Sequence[BlockIds]) -> None:
        self._admit(request_id)

    def on_allocate(self, request_id: str, logical_blocks: Sequence[BlockIds]) -> None:
        self._admit(request_id)
        for ids in logical_blocks:
            self.device.take(ids.tolist())

    def on_load(
        self, request_id: str, logical_blocks: Sequence[tuple[BlockKey, int]], ids: BlockIds
    ) -> None:
        self._admit(request_id)
        names = [
            self._name(request_id, group, block_idx) for (group, _), block_idx in logical_blocks
        ]
        self.device.take(ids.tolist())
        for name, block in zip(names, ids.tolist(), strict=True):
            if name in self.device:
                raise RuleError(
                    "loaded-again",
                    f"request {request_id} loads a block that it finds on the device",
                )
            self.device.publish(name, block)
        if self.host is not None:
            self.host.load(names)

    def on_publish(
        self,
        request_id: str,
        group: int,
        logical_blocks: Sequence[int],
        blocks: Sequence[tuple[BlockKey, int]],
    ) -> None:
        if self._last[0] != request_id or self._last[1] >= group:
            self._store()
        self._last = request_id, group
        for block_idx, (_, block) in zip(logical_blocks, blocks, strict=True):
            name = self._name(request_id, group, block_idx)
            if self.device.publish(name, block):
                self._new.append(name)

    def on_copy_blocks(self, request_id: str, num_tokens: int, copies: Sequence[BlockCopy]) -> None:
        """Check that blocks which are copied are held, and are none of those that are written."""
        sources = {copy.source for copy in copies}
        lost = sources & {copy.target for copy in copies}
        lost |= {source for source in sources if not self._llm.manager.pool.ref_count[source]}
        if lost:
            raise RuleError(
                "copied-unheld",
                f"request {request_id} copies blocks {sorted(lost)}, which are free or written to",
            )

    def on_publish_partial(
        self, request_id: str, num_tokens: int, blocks: Sequence[tuple[BlockKey, int]]
    ) -> None:
        """Check that the step that fills the blocks was taken in, and note them."""
        running = self._llm.scheduler.running
        request = next(request for request in running if request.request_id == request_id)
        if request.progress.computed < num_tokens:
            raise RuleError(
                "published-early",
                f"request {request_id}: {request.progress.computed} tokens are in the cache, and "
                f"blocks for {num_tokens} can be found",
            )
        prefix = self._tracks[int(request_id)].prefix(num_tokens)
        for (group, _), block in blocks:
            self.device.publish((group, prefix), block)

    def on_free(self, request_id: str, ids: BlockIds, ended: bool = False) -> None:
        self.device.give_back(ids.tolist())
        if ended:
            self._holders.discard(request_id)

    def on_reset(self) -> None:
        self.device.clear()

    def on_flush(self, request: Request, group: int, step: RollbackStep) -> None:
        self._store()

    def _store(self) -> None:
        """Store in the host what was published last."""
        if self.host is not None:
            self.host.store(self._new)
        self._new.clear()
        self._last = "", -1

    def _name(self, request_id: str, group: int, block_idx: int) -> Name:
        return group, self._tracks[int(request_id)].prefix(
            (block_idx + 1) * self._specs[group].block_size
        )

    def _admit(self, request_id: str) -> None:
        """Note what a request could take, before it takes anything."""
        if request_id in self._holders:
            return
        self._store()
        self._holders.add(request_id)
        request = next(
            waiting for waiting in self._llm.scheduler.waiting if waiting.request_id == request_id
        )
        is_asked = self._llm.manager.enable_prefix_caching and request.params.reads_prefix_cache
        track = self._tracks[int(request_id)]

        def is_there(group: int, end: int) -> bool:
            name = group, track.prefix(end)
            return name in self.device or (
                self.host is not None and not self.has_lost and name in self.host
            )

        def is_at_hand(group: int, end: int) -> bool:
            return (group, track.prefix(end)) in self.device

        unit = self._llm.config.cache.prefix_match_unit
        hit = 0
        if is_asked and unit is not None:
            hit = longest_hit_at_units(self._specs, request.num_tokens, unit, is_there, is_at_hand)
        elif is_asked:
            hit = longest_hit(self._specs, request.num_tokens, is_there)
        attended = longest_attended(self._specs, request.num_tokens, is_there) if is_asked else 0
        self.hits[request_id] = hit
        self.junctions[request_id] = attended if attended > hit else 0

"""The blocks that each request holds, in every group, and the prefixes that can be found again.

Contract. A request's blocks are *logical blocks*: logical block i of an attention group holds the
tokens of block i; logical block i of a Mamba group in modes `align` and `all` is for the state
after block i, or, while the request is inside that block, for its running state (see
`attention.mamba`). A logical block without a block holds the null block.

- Mode `none`: one state, however long the request.
- Mode `align`: chunks end on block boundaries. Logical blocks before that of the last computed
  token are freed, those that a chunk jumps over never get a block: a request holds at most 2.
- Mode `all`: a state at every boundary, all kept until the request ends: `ceil(tokens /
  block_size)`.

These are the states of scheme `slots`, which holds K more for drafts. Of a sliding window the
logical blocks wholly before the window of the next token are freed, in every mode.

A rollback scheme may write states some tokens late (`StateProgress`): only then is that of a
logical block published, and are the logical blocks before it freed.

Of states and windows only those are published that `cache.retention` keeps. With a
`prefix_match_unit` hits may end inside blocks: see `cache.partial_blocks`.

A block is *published* under the hash of all tokens up to its end once it holds exactly their K/V or
the state after them: after the step that computed them, never when it is scheduled (vllm!56525),
and only as far as tokens are known (accepted). A *hit* is the longest prefix that every group can
restore: attention needs all of its blocks, a sliding window those of the `window - 1` tokens before
the end, Mamba only the state at the end. The last token of a request is never taken from the cache:
its logits are needed.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from math import lcm

import numpy as np

from hybrid_kv.cache.block_hash import BlockHashes
from hybrid_kv.cache.block_pool import NULL_BLOCK, BlockIds, BlockKey, BlockPool
from hybrid_kv.cache.observe import CacheObserver
from hybrid_kv.cache.offload import KVOffload, Page
from hybrid_kv.cache.partial_blocks import PartialBlockManager
from hybrid_kv.cache.prefix import LocatedHit, longest_hit, shared_tokens
from hybrid_kv.cache.request_blocks import (
    NO_HIT,
    NO_IDS,
    LogicalBlockRules,
    NewBlocks,
    PrefixHit,
    Refusal,
    RequestBlocks,
)
from hybrid_kv.cache.retention import Retention
from hybrid_kv.cache.spec import (
    KVCacheConfig,
    KVCacheSpec,
    MambaSpec,
    RollbackSpec,
    SlotsSpec,
    StateProgress,
)
from hybrid_kv.errors import ConfigError
from hybrid_kv.kernels.common.integers import cdiv


class HitLostError(Exception):
    """The offload tier no longer has the blocks of a hit, or they are bad; nothing was taken."""


class KVCacheManager:
    """The manager of all groups' blocks: allocates them together, finds and publishes prefixes.

    Args:
        enable_prefix_caching: publish blocks and look for hits; needs Mamba groups in mode `align`
            or `all`.
        num_lookahead_tokens: positions after the scheduled tokens that a step may write (a
            drafting head's K/V).
        max_model_len: no position from here on is ever written.
        num_uncertain_tokens: drafts of the step in flight that may count when the next one is
            scheduled.
        observers: notified when blocks change hands; more may join later.
        retention_interval: of `cache.retention`.

    Attributes:
        retention: what stays of states and windows.
        partial: the blocks of hits that end inside one; None unless `match_at` was called.
        offload: a further tier for published blocks; a hit may come from both.
    """

    def __init__(
        self,
        config: KVCacheConfig,
        enable_prefix_caching: bool,
        num_lookahead_tokens: int = 0,
        max_model_len: int | None = None,
        num_uncertain_tokens: int = 0,
        observers: Sequence[CacheObserver] = (),
        retention_interval: int | None = None,
    ) -> None:
        self.config = config
        self.pool = BlockPool(config.num_blocks, self._notify_unpublished)
        self.enable_prefix_caching = enable_prefix_caching
        self.num_lookahead_tokens = num_lookahead_tokens
        self.max_model_len = max_model_len
        self.offload: KVOffload | None = None
        self.observers = observers
        # What decides a group's logical blocks: its layers may differ in bytes, never in that.
        self._specs: list[KVCacheSpec] = [group.layer_specs[0] for group in config.groups]
        for spec in self._specs:
            if not isinstance(spec, MambaSpec):
                continue
            mode = spec.mode
            if enable_prefix_caching and not mode.keeps_states:
                raise ConfigError(
                    "prefix caching with Mamba layers needs mamba_cache_mode align or all: "
                    f"mode {mode.name} keeps no state"
                )
            # Were blocks shorter, a step could pass two boundaries.
            needed = 1 + spec.num_speculative_tokens
            if mode.gives_back and not spec.rollback.writes_late:
                needed += num_uncertain_tokens
            if mode.keeps_states and spec.block_size < needed:
                raise ConfigError(
                    f"num_speculative_tokens={spec.num_speculative_tokens} needs Mamba blocks of "
                    f"at least {needed} "
                    f"tokens, not {spec.block_size}; raise block_size"
                )
        self.retention = Retention(
            retention_interval, lcm(*(spec.block_size for spec in self._specs))
        )
        self._groups = [LogicalBlockRules(spec) for spec in self._specs]
        self.partial: PartialBlockManager | None = None
        self._giving_back = [i for i, group in enumerate(self._groups) if group.gives_back]
        # All groups of states have one mode, and one block size.
        self._states = next((spec for spec in self._specs if isinstance(spec, MambaSpec)), None)
        self._nothing = NewBlocks(NO_IDS, array("i", [0] * len(self._specs)))
        self._refusal: Refusal | None = None
        self._held: dict[str, list[RequestBlocks]] = {}
        # Tokens that a decode may reach before it needs a logical block more.
        self._covered: dict[str, int] = {}
        # Published blocks, the ends of their logical blocks, and their keys: a block that was
        # evicted since is another's.
        self._given_back: dict[str, dict[int, tuple[int, BlockKey]]] = {}

    def match_at(self, unit: int) -> None:
        """Let hits end at every multiple of `unit` tokens from here on, inside of blocks, too.

        No request holds blocks yet. The unit divides all block sizes (`cache.plan` sees to that).
        """
        self._groups = [LogicalBlockRules(spec, unit) for spec in self._specs]
        self.partial = PartialBlockManager(
            unit, self.retention.unit, self._groups, self.pool, self.observers
        )

    @property
    def hit_granularity(self) -> int:
        """Tokens of which every hit is a multiple."""
        return self.retention.unit if self.partial is None else self.partial.unit

    def can_ever_fit(self, num_tokens: int) -> bool:
        """Return whether a request of `num_tokens` cached tokens fits in an empty pool."""
        longest = self._with_lookahead(num_tokens)
        most = sum(spec.max_blocks_per_request(longest) for spec in self._specs)
        if self.partial is not None:
            most += self.partial.most_blocks
        return most <= self.pool.num_blocks - 1

    def _with_lookahead(self, num_tokens: int) -> int:
        return min(num_tokens + self.num_lookahead_tokens, self.max_model_len or num_tokens)

    @property
    def rollback(self) -> RollbackSpec:
        """The scheme by which the groups of states roll back rejected drafts."""
        return self._states.rollback if self._states is not None else SlotsSpec()

    @property
    def states_block_size(self) -> int | None:
        """Tokens between the states that are kept; None if none are."""
        return (
            self._states.block_size
            if self._states is not None and self._states.mode.keeps_states
            else None
        )

    @property
    def keeps_inside(self) -> bool:
        """True if a prefill leaves something to hit at each boundary that it passes."""
        return self._states is None or self._states.mode.keeps_inside

    def chunk_end(self, start: int, end: int, num_tokens: int, junction: int = 0) -> int:
        """Return where a chunk from `start` that can reach `end` should end.

        Args:
            num_tokens: known tokens of the request.
            junction: of its hit.
        """
        states = self._states
        if states is None:
            return end
        if self.partial is not None and self.retention.interval is None:
            end = self.partial.chunk_end(start, end)
        return states.mode.chunk_end(
            start, end, num_tokens, states.block_size, self.retention.unit, junction
        )

    def find_longest_cache_hit(
        self, hashes: BlockHashes, token_ids: Sequence[int], use_offload: bool
    ) -> PrefixHit:
        """Return the longest prefix of a request that every group can restore.

        Nothing is read or taken yet.
        """
        if not self.enable_prefix_caching:
            return NO_HIT
        offload = self.offload if use_offload else None
        if self.partial is not None:
            return self.partial.longest_hit(offload, hashes, token_ids)
        return longest_hit(
            self._groups, self.hit_granularity, self.pool, offload, hashes, token_ids
        )

    def shared_tokens(
        self,
        hashes: BlockHashes,
        token_ids: Sequence[int],
        other: BlockHashes,
        other_ids: Sequence[int],
        end: int,
    ) -> int:
        """Return how many tokens a request could take from the first `end` of another one.

        All of those are taken to be cached.
        """
        texts = (hashes, token_ids), (other, other_ids)
        return shared_tokens(self._groups[0].hash_size, self.hit_granularity, *texts, end)

    def longest_kept(self, num_tokens: int, resume_points: Sequence[int]) -> int:
        """Return how much of a prefix whole blocks can restore once a request has computed it.

        Args:
            resume_points: of that request.
        """
        if all(group.num_tail_blocks is None for group in self._groups):
            return num_tokens
        return self.retention.longest_kept(num_tokens, resume_points)

    def may_fit(self, request_id: str) -> bool:
        """Return whether retrying a rejected request could succeed now.

        A lookup is linear in the prompt, so retry only after enough blocks are free or one of its
        keys was published. A request that could do with less for another reason (its hit was
        evicted, the budget leaves a shorter chunk) waits on, at most until no other request runs.
        """
        refusal = self._refusal
        if refusal is None or refusal.request_id != request_id:
            return True
        return self.pool.num_free_blocks >= refusal.num_needed

    def allocate_slots(
        self,
        request_id: str,
        num_computed_tokens: int,
        num_new_tokens: int,
        is_decode: bool,
        hit: PrefixHit = NO_HIT,
        num_seen_tokens: int = 0,
        num_partial_tokens: int = 0,
    ) -> NewBlocks | None:
        """Make room for `num_new_tokens` tokens after `num_computed_tokens`.

        Returns the *new* logical blocks, or None if the pool is too full; a hit is taken with them
        or not at all. What the offload tier has of it is read only when there is room.

        Args:
            num_computed_tokens: confirmed ones; drafts that may still be rejected do not count
                (vllm!33997).
            is_decode: the step verifies drafts (possibly none), so it needs logical blocks for 1 +
                K states.
            hit: of a request that starts; then `num_computed_tokens` is its length.
            num_seen_tokens: by the state that the next step reads (`RollbackSpec.num_seen`); of a
                request that starts, any.
            num_partial_tokens: after which the step leaves partial blocks
                (`PartialBlockManager.due`); 0: it leaves none.

        Raises:
            HitLostError: what the hit needs of the offload tier is not there any more; look again
                without the tier.
        """
        end = num_computed_tokens + num_new_tokens
        ahead = self._with_lookahead(end)
        rows = self._held.get(request_id)
        if rows is None:
            return self._start(request_id, (end, ahead), is_decode, hit, num_partial_tokens)
        if self._giving_back:
            self._give_back(request_id, rows, num_computed_tokens, num_seen_tokens)
        if is_decode and ahead <= self._covered.get(request_id, 0):
            return self._nothing
        counts, needed = self._count_missing(rows, end, ahead, is_decode)
        num_partial = self._num_partial(num_partial_tokens)
        if not any(counts) and not num_partial:
            if is_decode:
                self._covered[request_id] = self._num_covered(rows)
            return self._nothing
        ids = self.pool.allocate(needed + num_partial)
        if ids is None:
            return None
        new = self._append(rows, counts, ids[:needed], is_decode)
        for observer in self.observers:
            observer.on_allocate(request_id, new.per_group())
        if self.partial is not None:
            self.partial.reserve(request_id, num_partial_tokens, ids[needed:])
        return new

    def _num_partial(self, num_tokens: int) -> int:
        """Return how many partial blocks a step leaves after so many tokens; 0 if these are 0."""
        if self.partial is None or not num_tokens:
            return 0
        return len(self.partial.groups_of(num_tokens))

    def _start(
        self,
        request_id: str,
        ends: tuple[int, int],
        is_decode: bool,
        hit: PrefixHit,
        num_partial_tokens: int,
    ) -> NewBlocks | None:
        """Allocate for a request that holds nothing yet: its hit, and room after that.

        Args:
            ends: of the step, and of what it may write.
        """
        located = LocatedHit(hit, self._groups, self.pool)
        counts, needed = self._count_missing(located.rows, *ends, is_decode)
        num_partial = self._num_partial(num_partial_tokens)
        room = needed + num_partial + located.num_needed(self.pool)
        if room > self.pool.num_free_blocks:
            self._refusal = Refusal(request_id, room, hit.keys())
            return None
        pages = located.fetch(self.offload)
        if pages is None:
            raise HitLostError(
                f"request {request_id}: {len(located.absent)} blocks of its hit are lost"
            )
        self._refusal = None
        loaded, fresh = located.take(self.pool, needed + num_partial)
        # From here on all of it is the request's: whatever is raised, `free` finds it.
        self._held[request_id] = located.rows
        new = self._append(located.rows, counts, fresh[:needed], is_decode)
        try:
            self._fill(request_id, located, new, pages, loaded)
            if self.partial is not None:
                self.partial.reserve(request_id, num_partial_tokens, fresh[needed:])
                self.partial.restore(request_id, hit.num_tokens, located.copies())
        except BaseException:
            self.free(request_id)
            raise
        finally:
            located.release(self.pool)
        # Only now: what failed to load must not be found.
        for absent, block in zip(located.absent, loaded.tolist(), strict=True):
            self.pool.publish(absent.key, block)
        return NewBlocks.of(located.rows) if hit.num_tokens else new

    def _fill(
        self,
        request_id: str,
        located: LocatedHit,
        new: NewBlocks,
        pages: Sequence[Page],
        loaded: BlockIds,
    ) -> None:
        """Report a hit that was taken and what follows it, and load what the pool lacks of it."""
        for observer in self.observers:
            if len(located.pooled):
                observer.on_hit(request_id, located.pooled_rows)
            observer.on_allocate(request_id, new.per_group())
            if located.absent:
                places = [(absent.key, absent.block_idx) for absent in located.absent]
                observer.on_load(request_id, places, loaded)
        if located.absent:
            assert self.offload is not None
            self.offload.load(pages, loaded.tolist())

    def adopt(self, request_id: str, num_computed_tokens: int) -> NewBlocks | None:
        """Make room for a decode of a request whose first tokens were computed elsewhere.

        Of states there is one, after the last of them, of a sliding window what the next token
        reads: logical blocks before that stay null, and are never published. Neither is a block
        that the window begins in: its first tokens stay away.

        Returns:
            All logical blocks, for the caller to fill; None if the pool is too full.
        """
        rows = [RequestBlocks() for _ in self._groups]
        for group, row in zip(self._groups, rows, strict=True):
            if group.mode is not None:
                last_token = num_computed_tokens - 1
                row.published = group.mode.state_block_idx(last_token, group.block_size)
                row.extend(np.zeros(row.published, dtype=np.int32))
            elif group.window is not None:
                begin = group.window.first_seen(num_computed_tokens)
                row.published = cdiv(begin, group.block_size)
                row.extend(np.zeros(begin // group.block_size, dtype=np.int32))
        end = num_computed_tokens + 1
        counts, needed = self._count_missing(rows, end, self._with_lookahead(end), is_decode=True)
        ids = self.pool.allocate(needed)
        if ids is None:
            return None
        self._held[request_id] = rows
        new = self._append(rows, counts, ids, is_decode=True)
        for observer in self.observers:
            observer.on_allocate(request_id, new.per_group())
        return NewBlocks.of(rows)

    def _count_missing(
        self, rows: Sequence[RequestBlocks], end: int, ahead: int, is_decode: bool
    ) -> tuple[list[int], int]:
        """Return the logical blocks that each group lacks, and the blocks for them.

        They are missing until token `end`, or `ahead` where steps write beyond it.
        """
        counts = []
        needed = 0
        for group, row in zip(self._groups, rows, strict=True):
            mode = group.mode
            block_size = group.block_size
            if mode is None:
                count = num_blocks = max(0, cdiv(ahead, block_size) - row.length)
            else:
                drafts = group.drafts if is_decode or not mode.keeps_states else 0
                count = max(0, mode.num_logical_blocks(end, block_size) + drafts - row.length)
                num_blocks = mode.num_blocks(count, is_decode)
            counts.append(count)
            needed += num_blocks
        return counts, needed

    def _num_covered(self, rows: Sequence[RequestBlocks]) -> int:
        """Return how far a decode of a request with these logical blocks may reach.

        Most steps need no more than this look.
        """
        return min(
            row.length * group.block_size
            if group.mode is None
            else group.mode.num_covered(row.length - group.drafts, group.block_size)
            for group, row in zip(self._groups, rows, strict=True)
        )

    def _append(
        self, rows: Sequence[RequestBlocks], counts: Sequence[int], ids: BlockIds, is_decode: bool
    ) -> NewBlocks:
        """Give each row as many logical blocks more.

        There are fewer blocks than logical blocks where an align chunk jumps over some: those get
        the null block, the chunk's last ones the blocks.
        """
        flat = ids if len(ids) == sum(counts) else np.zeros(sum(counts), dtype=np.int32)
        begin = used = 0
        for group, row, count in zip(self._groups, rows, counts, strict=True):
            if not count:
                continue
            if flat is not ids:
                blocks = count if group.mode is None else group.mode.num_blocks(count, is_decode)
                flat[begin + count - blocks : begin + count] = ids[used : used + blocks]
                used += blocks
            row.extend(flat[begin : begin + count])
            begin += count
        return NewBlocks(flat, array("i", counts))

    def _give_back(
        self, request_id: str, rows: Sequence[RequestBlocks], num_computed: int, num_seen: int
    ) -> None:
        """Free the blocks that no step from here on reads.

        The arguments are those of `LogicalBlockRules.first_needed`. All go at once: the pool's cost
        is per call.
        """
        depths: dict[int, int] = {}
        for index in self._giving_back:
            group = self._groups[index]
            row = rows[index]
            first = group.first_needed(num_computed, num_seen)
            if group.window is not None and self.enable_prefix_caching:
                # What a step in flight completes is published when it has been accounted for.
                first = min(first, row.published)
            if first > row.first:
                for block, block_idx in row.give_back(first).items():
                    depths[block] = (block_idx + 1) * group.block_size
        if not depths:
            return
        ids = np.array(list(depths), dtype=np.int32)
        for observer in self.observers:
            observer.on_free(request_id, ids)
        keys = [(block, depth, self.pool.key_of(block)) for block, depth in depths.items()]
        self.pool.free(ids)
        given_back = self._given_back.setdefault(request_id, {})
        given_back.update({block: (depth, key) for block, depth, key in keys if key is not None})

    def completes_blocks(self, request_id: str, progress: StateProgress) -> bool:
        """Return whether `cache_blocks` has anything to do."""
        if not self.enable_prefix_caching:
            return False
        # Each step checks this for each request: a loop needs no generator.
        for group, row in zip(self._groups, self._held[request_id], strict=True):
            if row.published < group.num_complete(progress):
                return True
        return self.partial is not None and self.partial.is_complete(request_id, progress.computed)

    def cache_blocks(
        self,
        request_id: str,
        hashes: BlockHashes,
        token_ids: Sequence[int],
        progress: StateProgress,
        is_decode: bool,
        resume_points: Sequence[int] = (),
    ) -> None:
        """Publish the blocks that a step has completed, as far as they are kept.

        Args:
            token_ids: of the request, at least the computed ones.
            progress: after the step.
            resume_points: see `cache.retention`.
        """
        if not self.enable_prefix_caching:
            return
        published: list[tuple[BlockKey, int]] = []
        for index, (group, row) in enumerate(
            zip(self._groups, self._held[request_id], strict=True)
        ):
            block_size = group.block_size
            mode = group.mode
            first = row.published
            end = group.num_complete(progress)
            if first >= end:
                continue
            chain = hashes.chain(group.hash_size, token_ids, progress.computed)
            if mode is not None:
                first = mode.first_published(first, end, progress.computed, block_size, is_decode)
            kept = self.retention.kept_blocks(
                range(first, end), block_size, group.num_tail_blocks, resume_points
            )
            if self.partial is not None:
                kept = self.partial.kept_blocks(group, range(first, end), kept, resume_points)
            step = block_size // group.hash_size
            keys = [
                ((index, chain[(block_idx + 1) * step - 1]), row[block_idx]) for block_idx in kept
            ]
            published += [(key, block) for key, block in keys if self.pool.publish(key, block)]
            for observer in self.observers:
                observer.on_publish(request_id, index, kept, keys)
            row.published = end
        if published and self.offload is not None:
            self.offload.store(published)
        published += self._publish_partial(request_id, hashes, token_ids, progress.computed)
        if self._refusal is not None and not self._refusal.keys.isdisjoint(
            key for key, _ in published
        ):
            self._refusal = None

    def _publish_partial(
        self, request_id: str, hashes: BlockHashes, token_ids: Sequence[int], num_computed: int
    ) -> list[tuple[BlockKey, int]]:
        """Publish the partial blocks that a step has filled, and drop the request's references.

        They are lost with its other blocks, by their depth: see `free`.
        """
        partial = self.partial
        if partial is None or not partial.is_complete(request_id, num_computed):
            return []
        num_tokens = partial.pending[request_id].num_tokens
        chain = hashes.chain(partial.unit, token_ids, num_tokens)
        published = partial.publish(request_id, self._held[request_id], chain)
        ids = np.array([block for _, block in published], dtype=np.int32)
        for observer in self.observers:
            observer.on_free(request_id, ids)
        self.pool.free(ids)
        self._given_back.setdefault(request_id, {}).update(
            (block, (num_tokens, key)) for key, block in published if self.pool.key_of(block) == key
        )
        return published

    def block_ids(self, request_id: str) -> list[BlockIds]:
        """Return all ids that the request holds, per group, in table order."""
        rows = self._held.get(request_id)
        return [NO_IDS for _ in self._specs] if rows is None else [row.held() for row in rows]

    def free(self, request_id: str) -> None:
        """Return everything the request holds.

        The deepest blocks of all groups go first, so that they are evicted first and together: a
        prefix needs each of its attention blocks and the states after them, in no group is a block
        worth more than its neighbours there.
        """
        rows = self._held.pop(request_id, None)
        if rows is None:
            return
        self._covered.pop(request_id, None)
        ids = np.concatenate([row.held() for row in rows])
        ends = np.concatenate(
            [row.ends(spec.block_size) for spec, row in zip(self._specs, rows, strict=True)]
        )
        if self.partial is not None:
            pending, num_tokens = self.partial.release(request_id)
            ids = np.concatenate([ids, pending])
            ends = np.concatenate([ends, np.full(len(pending), num_tokens)])
        for observer in self.observers:
            observer.on_free(request_id, ids, ended=True)
        self.pool.free(ids[np.argsort(-ends, kind="stable")])
        given_back = self._given_back.pop(request_id, None)
        if given_back:
            depths = {
                block: end
                for block, (end, key) in given_back.items()
                if self.pool.key_of(block) == key
            }
            depths.update(zip(ids.tolist(), ends.tolist(), strict=True))
            self.pool.refresh(
                np.array(sorted(depths, key=depths.__getitem__, reverse=True), dtype=np.int32)
            )

    def reset_prefix_cache(self) -> None:
        """Forget all published blocks; running requests keep theirs."""
        self.pool.reset()
        self._refusal = None
        for observer in self.observers:
            observer.on_reset()

    def _notify_unpublished(self, keys: Sequence[BlockKey]) -> None:
        for observer in self.observers:
            observer.on_unpublish(keys)

    def check_integrity(self, running: Sequence[str] = ()) -> None:
        """Raise AssertionError unless pool and tier are whole and references have owners.

        Only `running` requests may hold any.
        """
        self.pool.check_integrity()
        if self.offload is not None:
            self.offload.check_integrity()
        strangers = sorted((self._held.keys() | self._given_back.keys()) - set(running))
        assert not strangers, f"requests that do not run hold blocks: {strangers}"
        owned = np.concatenate(
            [NO_IDS, *(ids for request in self._held for ids in self.block_ids(request))]
        )
        if self.partial is not None:
            assert self.partial.pending.keys() <= self._held.keys(), "partial blocks have no owner"
            reserved = self.partial.pending.values()
            filling = [block for pending in reserved for block in pending.blocks.values()]
            owned = np.concatenate([owned, np.array(filling, dtype=np.int32)])
        counts = np.bincount(owned, minlength=self.pool.num_blocks)
        counts[NULL_BLOCK] = 1
        wrong = np.flatnonzero(counts != self.pool.ref_count)
        assert not len(wrong), f"blocks {wrong.tolist()} have other reference counts than owners"
        shared = np.flatnonzero(counts > 1)
        unpublished = shared[~self.pool.may_be_shared(shared)]
        assert not len(unpublished), (
            f"blocks {unpublished.tolist()} have two owners but were never published"
        )

"""The observer of one engine: its reports are compared with the requests' tokens."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from hashlib import blake2b
from typing import Any

import numpy as np
import torch

from hybrid_kv.attention.mamba import BoundaryCopies
from hybrid_kv.attention.paged import AttentionPart
from hybrid_kv.attention.rollback import RollbackStep
from hybrid_kv.cache.backend import AttentionGroup
from hybrid_kv.cache.block_pool import NULL_BLOCK, BlockIds, BlockKey, BlockPool
from hybrid_kv.cache.observe import BlockCopy
from hybrid_kv.cache.spec import MambaSpec, window_of
from hybrid_kv.config import SchedulerConfig
from hybrid_kv.observe import EngineObserver
from hybrid_kv.request import Request, ScheduledRequest
from hybrid_kv.sanitizer.ledger import Ledger
from hybrid_kv.sanitizer.rules_attention import check_attention, check_block, check_drafts
from hybrid_kv.sanitizer.rules_mamba import check_mamba, expect_copy
from hybrid_kv.sanitizer.rules_rollback import RollbackRules, rollback_rules
from hybrid_kv.sanitizer.shadow import Array, DraftLayers, Owner, Shadow, TrackedStep, to_numpy

NUM_KEYS = 2**16  # the first ones, whose checksums are kept, to know them when they are loaded


class Sanitizer(EngineObserver):
    """The observer that raises at the first broken rule of the package's docstring.

    Args:
        buffers: the raw memory; buffer i belongs to the i-th layer of every group.
        private_tier: all that is loaded was published here. If others may have filed it, their
            bytes for the same tokens differ rightly (padding, rows of drafts, rounding), so only
            other tokens' bytes are an error.
        row_memory: of the rollback scheme, by layer; tensors [num_rows, …], poisoned whenever a row
            gets a new owner.
        heads: the layers of a drafting head.

    Raises (from every method):
        SanitizerError: a rule is broken.
    """

    def __init__(
        self,
        pool: BlockPool,
        groups: Sequence[AttentionGroup],
        buffers: Sequence[torch.Tensor],
        limits: SchedulerConfig,
        private_tier: bool,
        row_memory: Mapping[str, Any],
        heads: DraftLayers,
    ) -> None:
        self.private_tier = private_tier
        self.shadows = [Shadow(group, pool.num_blocks, heads) for group in groups]
        # Longer than the model allows, by the drafts of a step that passes its end.
        self.ledger = Ledger(
            pool, self.shadows, buffers, limits.max_num_seqs, limits.max_model_len + 32
        )
        self.rollback = [
            rollback_rules(self.ledger, shadow, limits.max_num_seqs) for shadow in self.shadows
        ]
        self._row_memory = row_memory
        self._published_bytes: dict[BlockKey, set[int]] = {}
        self._all_bytes: set[int] = set()  # of all keys
        self._copies: list[
            Callable[[TrackedStep], None]
        ] = []  # checks of those of the step in flight
        # Copies that are due: owner, group, target, and a checksum of the source.
        self._copied: list[tuple[Owner, Shadow, int, int]] = []
        self._metadata: dict[str, Any] = {}  # of the step, by layer

    # Blocks change hands.

    def on_hit(self, request_id: str, logical_blocks: Sequence[BlockIds]) -> None:
        """Check that the blocks of a hit are published, and unchanged since."""
        ledger = self.ledger
        owner = self.ledger.owner(request_id)
        for shadow, row in zip(self.shadows, logical_blocks, strict=True):
            ids = row[row != NULL_BLOCK]
            ledger.log(ledger.step + 1, "hit", shadow, ids, request_id)
            for block_idx, block in zip(np.flatnonzero(row).tolist(), ids.tolist(), strict=True):
                if not ledger.published[block]:
                    ledger.fail(
                        "hit-unpublished", "taken as a hit and not published", owner, shadow, block
                    )
                if ledger.keys[block][1] not in (None, ledger.checksum(shadow, block)):
                    ledger.fail(
                        "hit-overwritten",
                        "its bytes changed after it was published",
                        owner,
                        shadow,
                        block,
                    )
                owner.restored.append((shadow, (block_idx + 1) * shadow.block_size, block))
            ledger.references[ids] += 1
            ledger.held[owner.index, ids] = shadow.id + 1

    def on_allocate(self, request_id: str, logical_blocks: Sequence[BlockIds]) -> None:
        """Check that no other request holds or finds the new blocks; they hold nothing."""
        owner = self.ledger.owner(request_id)
        for shadow, row in zip(self.shadows, logical_blocks, strict=True):
            ids = row[row != NULL_BLOCK]
            if len(ids):
                self.ledger.take(owner, shadow, ids, "allocate")

    def on_load(
        self, request_id: str, logical_blocks: Sequence[tuple[BlockKey, int]], ids: BlockIds
    ) -> None:
        """Take fresh blocks that are published and filled from elsewhere before the next step."""
        owner = self.ledger.owner(request_id)
        for (key, block_idx), block in zip(logical_blocks, ids.tolist(), strict=False):
            shadow = self.shadows[key[0]]
            self.ledger.take(owner, shadow, np.array([block]), "load")
            self.ledger.published[block] = True
            self.ledger.keys[block] = key, None
            owner.loaded.append((shadow, block_idx, block))

    def on_publish(
        self,
        request_id: str,
        group: int,
        logical_blocks: Sequence[int],
        blocks: Sequence[tuple[BlockKey, int]],
    ) -> None:
        """Check that blocks which lookups find from now on hold the request's accepted tokens."""
        owner = self.ledger.owner(request_id)
        shadow = self.shadows[group]
        for block_idx, (key, block) in zip(logical_blocks, blocks, strict=True):
            self._publish(owner, shadow, (block_idx + 1) * shadow.block_size, key, block)

    def on_publish_partial(
        self, request_id: str, num_tokens: int, blocks: Sequence[tuple[BlockKey, int]]
    ) -> None:
        """Check what lookups find for the first tokens of a request that end inside a block."""
        self._check_copied()
        owner = self.ledger.owner(request_id)
        for key, block in blocks:
            self._publish(owner, self.shadows[key[0]], num_tokens, key, block)

    def _publish(self, owner: Owner, shadow: Shadow, end: int, key: BlockKey, block: int) -> None:
        """Check that a block holds what a prefix of `end` tokens reads of it; it is published."""
        ledger = self.ledger
        accepted = min(
            owner.request.num_tokens if owner.request is not None else 0, owner.computed or 0
        )
        ledger.log(ledger.step, "publish", shadow, np.array([block]), owner.name)
        if ledger.held[owner.index, block] != shadow.id + 1:
            problem = "published by a request that does not hold it"
            ledger.fail("publish-unheld", problem, owner, shadow, block)
        if end > accepted:
            problem = f"published for {end} tokens, {accepted} of them are computed and accepted"
            ledger.fail("publish-unaccepted", problem, owner, shadow, block)
        self.rollback[shadow.id].check_publish(owner, end, block)
        rule = "publish-state" if shadow.is_mamba else "publish-slots"
        ledger.check_prefix(rule, owner, shadow, end, block)
        ledger.published[block] = True
        checksum = ledger.checksum(shadow, block)
        ledger.keys[block] = key, checksum
        # A key that went and came again would lack the bytes that a tier may still have.
        if key in self._published_bytes or len(self._published_bytes) < NUM_KEYS:
            self._published_bytes.setdefault(key, set()).add(checksum)
            self._all_bytes.add(checksum)

    def on_copy_blocks(self, request_id: str, num_tokens: int, copies: Sequence[BlockCopy]) -> None:
        """Check where blocks are copied from and to; `_check_copied` checks that they were."""
        ledger = self.ledger
        owner = ledger.owner(request_id)
        for group, source, target in copies:
            shadow = self.shadows[group]
            ledger.log(ledger.step + 1, "copy", shadow, np.array([source, target]), request_id)
            checksum = ledger.checksum(shadow, source)
            if ledger.held[owner.index, source] != group + 1:
                if not ledger.published[source]:
                    problem = "copied, and neither published nor the request's"
                    ledger.fail("hit-unpublished", problem, owner, shadow, source)
                if ledger.keys[source][1] not in (None, checksum):
                    problem = "its bytes changed after it was published"
                    ledger.fail("hit-overwritten", problem, owner, shadow, source)
                owner.restored.append((shadow, num_tokens, target))
            if ledger.references[target] != 1 or ledger.held[owner.index, target] != group + 1:
                problem = "copied into, and not the request's alone"
                ledger.fail("write-unheld", problem, owner, shadow, target)
            shadow.copy(source, target, num_tokens)
            self._copied.append((owner, shadow, target, checksum))

    def _check_copied(self) -> None:
        """Check that blocks hold the bytes that their sources had when the copy was due."""
        for owner, shadow, target, checksum in self._copied:
            if self.ledger.checksum(shadow, target) != checksum:
                problem = "it is no copy of its source as that was when the copy was due"
                self.ledger.fail("copy-bytes", problem, owner, shadow, target)
        self._copied.clear()

    def on_reset(self) -> None:
        """Forget all that is published."""
        self.ledger.published[:] = False
        self.ledger.keys.clear()

    def on_free(self, request_id: str, ids: BlockIds, ended: bool = False) -> None:
        """Check that a request holds what it frees, and frees all where it `ended`."""
        ledger = self.ledger
        owner = self.ledger.owner(request_id)
        ledger.log(ledger.step, "free", None, ids, request_id)
        # After a report the engine clears up, whatever state it is in.
        strange = ids[ledger.held[owner.index, ids] == 0]
        if len(strange) and not ledger.has_failed:
            ledger.fail(
                "free-unheld",
                "freed by a request that does not hold it",
                owner,
                None,
                int(strange[0]),
            )
        ledger.held[owner.index, ids] = 0
        ledger.references[ids] -= 1
        if ended:
            if not ledger.has_failed:
                self._check_end(owner)
            ledger.forget(owner)

    def _check_end(self, owner: Owner) -> None:
        ledger = self.ledger
        computed = min(
            owner.computed or 0, 0 if owner.request is None else owner.request.num_computed_tokens
        )
        for rollback in self.rollback:
            rollback.check_end(owner, computed)
        left = np.flatnonzero(ledger.held[owner.index])
        if len(left):
            ledger.fail(
                "free-leak", "its request ended and did not free it", owner, None, int(left[0])
            )

    def on_failure(self) -> None:
        """Let the engine clear up, whatever state it is in."""
        self.ledger.has_failed = True

    # Steps.

    def on_step(
        self,
        batch: Sequence[ScheduledRequest],
        input_ids: torch.Tensor,
        positions: torch.Tensor,
        metadata: dict[str, Any],
    ) -> None:
        """Hold tokens, positions and the metadata of every group against the requests."""
        ledger = self.ledger
        ledger.step += 1
        ledger.has_failed = False
        lost = np.flatnonzero(ledger.pool.ref_count[1:] != ledger.references[1:])
        if len(lost):
            block = 1 + int(lost[0])
            problem = (
                f"{ledger.references[block]} requests hold it, the pool counts "
                f"{ledger.pool.ref_count[block]}"
            )
            ledger.fail("free-held", problem, None, None, block)
        self._check_copied()
        owners = [ledger.owner(item.request.request_id) for item in batch]
        for owner, item in zip(owners, batch, strict=True):
            self._begin(owner, item)
        for owner in owners:
            for shadow, end, block in owner.restored:
                ledger.check_prefix("hit-prefix", owner, shadow, end, block)
            owner.restored.clear()
        ledger.batch = step = TrackedStep(owners, batch, ledger.step)
        pairs = ("input-token", input_ids, step.tokens), ("position", positions, step.positions)
        for rule, given, expected in pairs:
            actual = to_numpy(given)[: len(expected)]
            template = "position {}: the model gets {}, not {}"
            ledger.require(
                actual == expected,
                rule,
                None,
                step.rows,
                None,
                template,
                step.positions,
                actual,
                expected,
            )
        self._metadata = metadata
        for shadow, rollback in zip(self.shadows, self.rollback, strict=True):
            self._check_group(shadow, rollback)

    def _check_group(self, shadow: Shadow, rollback: RollbackRules) -> None:
        """Hold the metadata of a group against the step."""
        ledger = self.ledger
        names = shadow.group.layer_names
        parts = [self._metadata[names[layer]] for layer in shadow.layers]
        if any(other is not parts[0] for other in parts):
            ledger.fail(
                "layer-metadata", "layers of one group get different metadata", None, shadow
            )
        if parts and shadow.is_mamba:
            check_mamba(ledger, shadow, parts[0], ledger.batch, rollback)
        elif parts and not shadow.is_stored:
            check_attention(ledger, shadow, parts[0], ledger.batch)

    def _begin(self, owner: Owner, item: ScheduledRequest) -> None:
        """Begin a step of a request: new here, or where the last step left it."""
        if owner.request is None:
            self._meet(owner, item.request, item.num_computed_tokens)
        elif owner.computed != item.num_computed_tokens:
            problem = (
                f"it continues after {item.num_computed_tokens} tokens, but {owner.computed} are "
                "in the cache"
            )
            self.ledger.fail("position", problem, owner)
        self.ledger.learn(owner, item.drafts or ())
        self._restore(owner)

    def _meet(self, owner: Owner, request: Request, num_computed_tokens: int) -> None:
        """Start a request in a row that is its alone."""
        owner.request = request
        owner.computed = num_computed_tokens
        salt = blake2b(request.params.cache_salt.encode(), digest_size=8).digest()
        owner.prefix[0] = int.from_bytes(salt, "little", signed=True)
        owner.known = self.ledger.learn(owner, request.token_ids)
        for rollback in self.rollback:
            rollback.restart(request.row)
        memories = self._row_memory.values()
        fields = (value for memory in memories for value in vars(memory).values())
        for tensor in filter(torch.is_tensor, fields):
            tensor[request.row].view(torch.int8).fill_(-1)

    def on_arrival(self, request: Request, logical_blocks: Sequence[BlockIds]) -> None:
        """Take for right what another engine computed."""
        owner = self.ledger.owner(request.request_id)
        computed = request.num_computed_tokens
        self._meet(owner, request, computed)
        owner.flushed = computed
        positions = np.arange(computed)
        origin = np.full(computed, (self.ledger.step + 1 << 32) + owner.serial)
        entries = np.stack([owner.prefix[1 : computed + 1], positions + 1, origin], axis=1)
        for shadow, row in zip(self.shadows, logical_blocks, strict=True):
            spec = shadow.group.spec
            if isinstance(spec, MambaSpec):
                block = row[spec.mode.state_block_idx(computed - 1, spec.block_size)]
                shadow.state[block] = shadow.cells[block, 0] = entries[-1]
            else:
                size = shadow.block_size
                window = window_of(spec)
                kept = positions[0 if window is None else max(0, computed - window + 1) :]
                slots = row[kept // size] * size + kept % size
                shadow.slots[slots] = entries[kept]

    def _restore(self, owner: Owner) -> None:
        """Take loaded blocks for the tokens that they should hold, unless their bytes are known."""
        ledger = self.ledger
        for shadow, block_idx, block in owner.loaded:
            tokens = (
                np.arange(block_idx * shadow.block_size, (block_idx + 1) * shadow.block_size) + 1
            )
            origin = np.full_like(tokens, (ledger.step << 32) + owner.serial)
            entries = np.stack([owner.prefix[tokens], tokens, origin], axis=1)
            shadow.state[block] = entries[-1]
            shadow.cells[block] = 0 if shadow.is_mamba else entries
            shadow.cells[block, 0] = entries[-1 if shadow.is_mamba else 0]
            key = ledger.keys[block][0]
            checksum = ledger.checksum(shadow, block)
            strange = checksum not in self._published_bytes.get(key, {checksum})
            if strange and (self.private_tier or checksum in self._all_bytes):
                problem = "loaded bytes that were never published for its tokens"
                ledger.fail("load-bytes", problem, owner, shadow, block)
            ledger.keys[block] = key, checksum
        owner.loaded.clear()

    def on_flush(self, request: Request, group: int, step: RollbackStep) -> None:
        """Check that a flushed state is the request's, and due."""
        owner = self.ledger.owner(request.request_id)
        self.rollback[group].check_flush(owner, request.num_computed_tokens, step)

    def on_copy(
        self,
        group: int,
        copies: BoundaryCopies,
        block_table: torch.Tensor,
        layers: Sequence[tuple[torch.Tensor, ...]],
        copies_states: bool,
    ) -> None:
        """Remember copies; `on_commit` checks their outcome."""
        check = expect_copy(
            self.ledger, self.shadows[group], copies, block_table, layers, copies_states
        )
        self._copies.append(check)

    def on_commit(self, tokens: Sequence[Sequence[int]]) -> None:
        """Check that the right drafts are accepted, all and only those; then the copies."""
        ledger = self.ledger
        step = self.ledger.batch
        for owner, drafts, end, new in zip(
            step.owners, step.drafts, step.ends.tolist(), tokens, strict=True
        ):
            pairs = enumerate(zip(drafts, new, strict=False))
            count = next((j for j, (draft, token) in pairs if draft != token), len(drafts))
            if len(new) != 1 + count and (new or drafts):
                ledger.fail(
                    "accept", f"the drafts {list(drafts)} became the tokens {list(new)}", owner
                )
            owner.computed = end - len(drafts) + count
            owner.known = ledger.learn(owner, new)
        for check in self._copies:
            check(step)
        self._copies.clear()

    def on_draft(
        self, group: int, rows: Array, positions: torch.Tensor, slots: torch.Tensor
    ) -> None:
        """Check the writes of a head: tokens not computed yet, and the target's own slots."""
        check_drafts(self.ledger, self.shadows[group], rows, positions, slots, self.ledger.batch)

    def on_store(self, group: int) -> None:
        """Check what a block drafter writes: without it, its later reads find nothing there."""
        shadow = self.shadows[group]
        if shadow.is_stored:
            metadata = self._metadata[shadow.group.layer_names[0]]
            check_attention(self.ledger, shadow, metadata, self.ledger.batch)

    def on_block(self, group: int, rows: Array, segment: AttentionPart) -> None:
        """Check what a block drafter reads: the computed and accepted tokens in its window."""
        check_block(self.ledger, self.shadows[group], rows, segment, self.ledger.batch)

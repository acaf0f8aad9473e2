"""A shadow of the cache: what every slot and page holds, followed from each request's tokens and each step's metadata.

The shadow of a token's K/V, of a convolution window and of an SSM state is the hash of *all tokens up to it*. What a
step reads must be the prefix of the request that reads it; what it writes is that prefix, one token longer at a time.
Which slots and blocks are read and written is taken from what the model gets (slots, block tables, `MambaMetadata`);
what they should hold follows from the request's token ids alone. So neither the block tables, nor the metadata
builders, nor the block hashes are trusted, and the first broken rule is named before the model runs:

- `input-token`, `position`, `row-length`: the model gets other tokens, positions or lengths than the request has;
  `layer-metadata`: a layer gets other metadata than its group.
- `read-slot`, `read-window`, `read-state`: what is read is not the request's prefix; `read-unheld`: nor is the block.
- `initial-state`: a row at position 0 reads a state, or a later one does not.
- `write-shared`, `write-unheld`, `write-twice`, `write-padding`: a block is written that others may read, that is not
  the request's, that another token of the step writes, or that no token owns.
- `pad-slot`, `pad-row`: padding points at a live slot or block. `index-range`: an index is outside its array.
- `accept`, `copy-rejected`, `copy-state`, `copy-bytes`: accepted drafts, and the copies of boundary states.
- `publish-unaccepted`, `publish-unheld`, `publish-slots`, `publish-state`: a published block is not exactly its tokens,
  all of them accepted. `hit-unpublished`, `hit-overwritten`, `hit-prefix`, `load-bytes`: a hit is not that.
- In scheme `replay` `read-history`, `history-length`, `ring-row`, `ring-full`: what a decode replays from its ring is
  not what follows its state, or the ring is not its own. `flush-unaccepted`, `flush-boundary`, `flush-shared`,
  `flush-unheld`: what is folded was not accepted, passes the end of a block, or goes where others may read or write.
  `publish-unflushed`: a block is published before its state is written. `finalize-lost`: its request ends before that.
- `allocate-held`, `free-held`, `free-unheld`, `free-leak`, `evict-findable`: the life of a block.

Fresh blocks are poisoned: bytes 0xFF are NaN in every float format and -1 in integers. Layers of a drafting head
write in passes of their own; only where they write is checked: `draft-slot` if the target has another token there, or
none at that place of a block.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from typing import TYPE_CHECKING, Any, NoReturn

import numpy as np
import numpy.typing as npt
import torch

from hybrid_kv.cache.block_pool import NULL_BLOCK, BlockIds, BlockKey, BlockPool
from hybrid_kv.cache.spec import MambaSpec
from hybrid_kv.config import CheckFailedError
from hybrid_kv.kernels.slot_mapping import PAD_SLOT
from hybrid_kv.watch import States, Watcher

if TYPE_CHECKING:
    from hybrid_kv.attention.mamba import BoundaryCopies, MambaMetadata
    from hybrid_kv.attention.paged import PagedAttentionMetadata
    from hybrid_kv.cache.backend import AttentionGroup
    from hybrid_kv.config import SchedulerConfig
    from hybrid_kv.kernels.replay import ReplayRing, ReplayStep
    from hybrid_kv.request import Request, ScheduledRequest

Array = npt.NDArray[Any]

NUM_EVENTS = 4096  # kept for reports
NUM_KEYS = 2**16  # the first ones, whose checksums are kept, to know them when they are loaded
HASH, TOKENS, ORIGIN = range(3)  # of an entry: what is there, how many tokens, and which step and request wrote it


class SanitizerError(CheckFailedError, AssertionError):
    """The first broken `rule`; the message has the request, the group, the block and its history."""

    def __init__(self, rule: str, report: str) -> None:
        super().__init__(report)
        self.rule = rule


class _Owner:
    """A request that holds blocks."""

    def __init__(self, name: str, index: int, serial: int, max_tokens: int) -> None:
        self.name, self.index, self.serial = name, index, serial
        self.request: Request | None = None  # from its first step on
        self.known = 0  # tokens; behind them lie the step's drafts
        self.computed: int | None = None  # of them in the cache
        self.tokens = np.zeros(max_tokens, dtype=np.int64)
        self.prefix = np.zeros(max_tokens + 1, dtype=np.int64)  # [n]: hash of the first n tokens
        self.flushed = 0  # tokens that its last written states have seen
        self.restored: list[tuple[_Shadow, int, int]] = []  # column, block: what the first step does not compute …
        self.loaded: list[tuple[_Shadow, int, int]] = []  # … because it was a hit, or came from elsewhere


class _Shadow:
    """What the blocks of one group hold. An entry of zeros: nothing that the request could want."""

    def __init__(self, group: AttentionGroup, num_blocks: int, num_rows: int, draft_layers: Collection[str]) -> None:
        spec = group.spec
        self.group, self.id, self.block_size = group, group.group_id, spec.block_size
        self.layers = [i for i, name in enumerate(group.layer_names) if name not in draft_layers]
        self.is_mamba = isinstance(spec, MambaSpec)
        width = 1 + spec.num_speculative_tokens if isinstance(spec, MambaSpec) else spec.block_size
        # [block, slot in the block]; of a Mamba group [block, row where a convolution window begins].
        self.cells = np.zeros((num_blocks, width, 3), dtype=np.int64)
        self.slots = self.cells.reshape(-1, 3)
        self.state = np.zeros((num_blocks, 3), dtype=np.int64)
        # In scheme `replay` [row of the engine, place in the ring].
        ring_len = spec.replay.ring_len if isinstance(spec, MambaSpec) and spec.replay is not None else 0
        self.ring = np.zeros((num_rows if ring_len else 0, ring_len, 3), dtype=np.int64)
        self.keeps_boundaries = isinstance(spec, MambaSpec) and spec.mode.keeps_states


class _Step:
    """A step's batch without padding, and what each of its tokens leaves in the cache."""

    def __init__(self, owners: list[_Owner], batch: Sequence[ScheduledRequest], number: int) -> None:
        self.owners, self.drafts = owners, [item.drafts or () for item in batch]
        self.lengths = np.array([item.num_tokens for item in batch])
        self.computed = np.array([item.num_computed_tokens for item in batch])
        self.ends = self.computed + self.lengths
        self.starts = np.cumsum(self.lengths) - self.lengths
        self.all_rows = np.arange(len(owners))
        self.rows = np.repeat(self.all_rows, self.lengths)  # of each token
        self.index = np.array([owner.index for owner in owners])
        spans = list(zip(owners, self.computed.tolist(), self.ends.tolist(), strict=True))
        self.begin = np.array([owner.prefix[begin] for owner, begin, _ in spans])
        self.tokens = np.concatenate([owner.tokens[begin:end] for owner, begin, end in spans])
        self.positions = np.arange(len(self.rows)) + (self.computed - self.starts)[self.rows]
        hashes = np.concatenate([owner.prefix[begin + 1 : end + 1] for owner, begin, end in spans])
        origin = (number << 32) + np.array([owner.serial for owner in owners])
        self.entries = np.stack([hashes, self.positions + 1, origin[self.rows]], axis=1)
        # Attention reads every position of a row.
        self.seen = np.concatenate([owner.prefix[1 : end + 1] for owner, _, end in spans])
        self.seen_rows = np.repeat(self.all_rows, self.ends)
        self.seen_positions = np.arange(len(self.seen)) - np.repeat(np.cumsum(self.ends) - self.ends, self.ends)


@dataclass(frozen=True)
class _Copy:
    """Boundary states on their way home. `checks`: views, and what they must hold at `home`."""

    shadow: _Shadow
    rows: Array  # of the batch
    drafts: Array  # row of `window` where the window begins
    ends: Array  # tokens up to the boundary
    home: Array
    window: Array
    state: Array | None
    checks: list[tuple[torch.Tensor, torch.Tensor]]


class Sanitizer(Watcher):
    """Follows one engine: what its parts report is held against the requests' tokens.

    Args:
        buffers: the raw memory; buffer i belongs to the i-th layer of every group.
        private_tier: all that is loaded was published here. If others may have filed it, their bytes for the same
            tokens differ rightly (padding, rows of drafts, rounding), so only other tokens' bytes are an error.
        rings: of scheme `replay`, by layer; poisoned whenever a row gets a new owner.
        draft_layers: names of a drafting head's layers.
    """

    _batch: _Step

    def __init__(
        self,
        pool: BlockPool,
        groups: Sequence[AttentionGroup],
        buffers: Sequence[torch.Tensor],
        limits: SchedulerConfig,
        private_tier: bool = False,
        rings: Mapping[str, ReplayRing] | None = None,
        draft_layers: Collection[str] = (),
    ) -> None:
        self.pool, self.num_blocks, self.private_tier = pool, pool.num_blocks, private_tier
        self.shadows = [_Shadow(group, pool.num_blocks, limits.max_num_seqs, draft_layers) for group in groups]
        self.rings = [part for ring in (rings or {}).values() for part in (ring.x, ring.B, ring.dt)]
        self.pages = [buffer.view(pool.num_blocks, -1) for buffer in buffers]
        self.owners: dict[str, _Owner] = {}
        self.held = np.zeros((limits.max_num_seqs, pool.num_blocks), dtype=np.int8)  # [owner, block]: group + 1
        self.references = np.zeros(pool.num_blocks, dtype=np.int32)
        self.published = np.zeros(pool.num_blocks, dtype=bool)
        self.keys: dict[int, tuple[BlockKey, int | None]] = {}  # and checksums, of published blocks
        self._published_bytes: dict[BlockKey, set[int]] = {}
        self._all_bytes: set[int] = set()  # of all keys
        self.step = -1
        self._max_tokens = limits.max_model_len + 32
        # Odd, so that no bit of a token is lost.
        self._factors = np.random.default_rng(0).integers(-(2**62), 2**62, self._max_tokens) * 2 + 1
        self._free = list(range(limits.max_num_seqs))
        self._names: list[str] = []  # of owners, by serial
        self._copies: list[_Copy] = []
        self._events: deque[tuple[int, str, int, Array, list[str], Array | None]] = deque(maxlen=NUM_EVENTS)
        self._failed = False

    # Blocks change hands.

    def on_hit(self, request_id: str, columns: Sequence[BlockIds]) -> None:
        """A new request took published blocks: its columns, group by group, null where it needs none."""
        owner = self._owner(request_id)
        for shadow, row in zip(self.shadows, columns, strict=True):
            ids = row[row != NULL_BLOCK]
            self._log(self.step + 1, "hit", shadow, ids, request_id)
            for column, block in zip(np.flatnonzero(row).tolist(), ids.tolist(), strict=True):
                if not self.published[block]:
                    self._fail("hit-unpublished", "taken as a hit and not published", owner, shadow, block)
                if self.keys[block][1] not in (None, self._checksum(shadow, block)):
                    self._fail("hit-overwritten", "its bytes changed after it was published", owner, shadow, block)
                owner.restored.append((shadow, column, block))
            self.references[ids] += 1
            self.held[owner.index, ids] = shadow.id + 1

    def on_allocate(self, request_id: str, columns: Sequence[BlockIds]) -> None:
        """A request got fresh blocks: its new columns, group by group, null where it needs none."""
        owner = self._owner(request_id)
        for shadow, row in zip(self.shadows, columns, strict=True):
            if len(ids := row[row != NULL_BLOCK]):
                self._take(owner, shadow, ids, "allocate")

    def _take(self, owner: _Owner, shadow: _Shadow, ids: BlockIds, kind: str) -> None:
        """Blocks that hold nothing, whatever they held before."""
        self._log(self.step + 1, kind, shadow, ids, owner.name)
        if len(taken := ids[self.references[ids] > 0]):
            self._fail("allocate-held", "handed out while somebody holds it", owner, shadow, int(taken[0]))
        for block in ids[self.published[ids]].tolist():
            if self.pool.lookup(self.keys.pop(block)[0]) == block:
                self._fail("evict-findable", "evicted, and a lookup still finds it", owner, shadow, block)
        self.published[ids] = False
        self.references[ids] = 1
        self.held[owner.index, ids] = shadow.id + 1
        for other in self.shadows:
            other.cells[ids] = 0
            other.state[ids] = 0
        for pages in self.pages:
            pages.index_fill_(0, torch.from_numpy(ids).to(pages.device).long(), -1)

    def on_load(self, request_id: str, columns: Sequence[tuple[BlockKey, int]], ids: BlockIds) -> None:
        """Fresh blocks, one for each key and column, are published and filled from elsewhere before the next step."""
        owner = self._owner(request_id)
        for (key, column), block in zip(columns, ids.tolist(), strict=False):
            shadow = self.shadows[key[0]]
            self._take(owner, shadow, np.array([block]), "load")
            self.published[block] = True
            self.keys[block] = key, None
            owner.loaded.append((shadow, column, block))

    def on_publish(self, request_id: str, group: int, first: int, blocks: Sequence[tuple[BlockKey, int]]) -> None:
        """Keys and blocks of columns from `first` on: what lookups find from now on must hold the request's tokens."""
        owner, shadow = self._owner(request_id), self.shadows[group]
        accepted = min(owner.request.num_tokens if owner.request is not None else 0, owner.computed or 0)
        for column, (key, block) in enumerate(blocks, first):
            # Of two blocks with the same content, lookups find the first.
            if self.pool.lookup(key) != block:
                continue
            self._log(self.step, "publish", shadow, np.array([block]), request_id)
            if self.held[owner.index, block] != group + 1:
                self._fail("publish-unheld", "published by a request that does not hold it", owner, shadow, block)
            if (end := (column + 1) * shadow.block_size) > accepted:
                what = f"published for {end} tokens, {accepted} of them are computed and accepted"
                self._fail("publish-unaccepted", what, owner, shadow, block)
            if len(shadow.ring) and owner.flushed < end:
                what = f"published for {end} tokens, its states have seen {owner.flushed} of them"
                self._fail("publish-unflushed", what, owner, shadow, block)
            self._check_prefix("publish-state" if shadow.is_mamba else "publish-slots", owner, shadow, column, block)
            self.published[block] = True
            self.keys[block] = key, (checksum := self._checksum(shadow, block))
            # A key that went and came again would lack the bytes that a tier may still have.
            if key in self._published_bytes or len(self._published_bytes) < NUM_KEYS:
                self._published_bytes.setdefault(key, set()).add(checksum)
                self._all_bytes.add(checksum)

    def on_reset(self) -> None:
        """Nothing is published any more."""
        self.published[:] = False
        self.keys.clear()

    def on_free(self, request_id: str, ids: BlockIds, ended: bool = False) -> None:
        """A request gave blocks back; all it has if it `ended`."""
        owner = self._owner(request_id)
        self._log(self.step, "free", None, ids, request_id)
        # After a report the engine clears up, whatever state it is in.
        if not self._failed and len(strange := ids[self.held[owner.index, ids] == 0]):
            self._fail("free-unheld", "freed by a request that does not hold it", owner, None, int(strange[0]))
        self.held[owner.index, ids] = 0
        self.references[ids] -= 1
        if ended:
            self._check_end(owner)
            if not self._failed and len(left := np.flatnonzero(self.held[owner.index])):
                self._fail("free-leak", "its request ended and did not free it", owner, None, int(left[0]))
            self.held[owner.index] = 0
            self._free.append(owner.index)
            del self.owners[request_id]

    def on_failure(self) -> None:
        """The engine clears up, whatever state it is in."""
        self._failed = True

    def _check_end(self, owner: _Owner) -> None:
        """No block that a request has completed may be lost because its state is not written yet."""
        computed = min(owner.computed or 0, 0 if owner.request is None else owner.request.num_computed_tokens)
        for shadow in self.shadows:
            end = computed // shadow.block_size * shadow.block_size
            if len(shadow.ring) and shadow.keeps_boundaries and owner.flushed < end and not self._failed:
                what = f"ends with the state after {end} tokens in its ring, its blocks have that after {owner.flushed}"
                self._fail("finalize-lost", what, owner, shadow)

    # Steps.

    def on_step(
        self,
        batch: Sequence[ScheduledRequest],
        input_ids: torch.Tensor,
        positions: torch.Tensor,
        metadata: dict[str, Any],
    ) -> None:
        """The metadata is built, and the model has not run."""
        self.step += 1
        self._failed = False
        if len(lost := np.flatnonzero(self.pool.ref_count[1:] != self.references[1:])):
            block = 1 + int(lost[0])
            what = f"{self.references[block]} requests hold it, the pool counts {self.pool.ref_count[block]}"
            self._fail("free-held", what, None, None, block)
        owners = [self._owner(item.request.request_id) for item in batch]
        for owner, item in zip(owners, batch, strict=True):
            if owner.request is None:
                owner.request, owner.computed = item.request, item.num_computed_tokens
                salt = blake2b(item.request.params.cache_salt.encode(), digest_size=8).digest()
                owner.prefix[0] = int.from_bytes(salt, "little", signed=True)
                owner.known = self._learn(owner, item.request.token_ids)
                for shadow in self.shadows:
                    shadow.ring[item.request.row : item.request.row + 1] = 0
                for part in self.rings:
                    part[item.request.row].view(torch.int8).fill_(-1)
            elif owner.computed != item.num_computed_tokens:
                what = f"it continues after {item.num_computed_tokens} tokens, but {owner.computed} are in the cache"
                self._fail("position", what, owner)
            self._learn(owner, item.drafts or ())
            self._restore(owner)
        for owner in owners:
            for shadow, column, block in owner.restored:
                self._check_prefix("hit-prefix", owner, shadow, column, block)
            owner.restored.clear()
        self._batch = step = _Step(owners, batch, self.step)
        pairs = ("input-token", input_ids, step.tokens), ("position", positions, step.positions)
        for rule, given, expected in pairs:
            actual, text = _numpy(given)[: len(expected)], "position {}: the model gets {}, not {}"
            self._require(actual == expected, rule, None, step.rows, None, text, step.positions, actual, expected)
        for shadow in self.shadows:
            parts = [metadata[shadow.group.layer_names[layer]] for layer in shadow.layers]
            if any(part is not parts[0] for part in parts):
                self._fail("layer-metadata", "layers of one group get different metadata", None, shadow)
            if parts:
                (self._check_mamba if shadow.is_mamba else self._check_attention)(shadow, parts[0], step)

    def on_fold(self, request: Request, group: int, replay: ReplayStep) -> None:
        """A request is about to give up its row; what is due of its history will be folded."""
        owner = self._owner(request.request_id)
        self._check_replay(self.shadows[group], [owner], np.array([request.num_computed_tokens]), replay, None)

    def on_copy(
        self, group: int, copies: BoundaryCopies, block_table: torch.Tensor, states: Sequence[States], kernel: int
    ) -> None:
        """Boundary states are about to be copied; `on_commit` checks what has become of them."""
        table, (rows, drafts) = _numpy(block_table).astype(np.int64), (copies.rows, copies.drafts)
        home, window = table[rows, copies.columns], table[rows, copies.anchors]
        state = None
        taps = torch.from_numpy(drafts[:, None] + np.arange(kernel - 1))
        checks = []
        for conv_state, ssm_state in states:
            checks.append((conv_state[:, : kernel - 1], conv_state[torch.from_numpy(window)[:, None], taps]))
            if ssm_state is not None:
                state = table[rows, copies.anchors + drafts]
                checks.append((ssm_state, ssm_state[torch.from_numpy(state)]))
        ends = (copies.columns + 1) * self.shadows[group].block_size
        self._copies.append(_Copy(self.shadows[group], rows, drafts, ends, home, window, state, checks))

    def on_commit(self, tokens: Sequence[Sequence[int]]) -> None:
        """The step has run. `tokens`: for each request of the batch none, or its accepted drafts and one more."""
        step = self._batch
        for owner, drafts, end, new in zip(step.owners, step.drafts, step.ends.tolist(), tokens, strict=True):
            pairs = enumerate(zip(drafts, new, strict=False))
            count = next((j for j, (draft, token) in pairs if draft != token), len(drafts))
            if len(new) != 1 + count and (new or drafts):
                self._fail("accept", f"the drafts {list(drafts)} became the tokens {list(new)}", owner)
            owner.computed = end - len(drafts) + count
            owner.known = self._learn(owner, new)
        for copy in self._copies:
            self._commit_copy(copy, step)
        self._copies.clear()

    def on_draft(self, group: int, rows: Array, positions: Array, slots: torch.Tensor) -> None:
        """A head is about to write K and V, after `on_commit`; `rows` of the batch. `PAD_SLOT` writes nothing."""
        shadow, step, places = self.shadows[group], self._batch, _numpy(slots)
        real = places != PAD_SLOT
        rows, positions, places = rows[real], positions[real], places[real]
        blocks = places // shadow.block_size
        self._check_range(shadow, rows, blocks)
        self._check_writes(shadow, rows, blocks, step)
        text = "a head writes position {} into slot {}, which holds {}"
        same = places % shadow.block_size == positions % shadow.block_size
        self._require(same, "draft-slot", shadow, rows, blocks, text, positions, places, shadow.slots[places])
        # Of tokens that the target has computed it is the target's slot.
        known = positions < np.array([owner.computed for owner in step.owners])[rows]
        rows, positions, places = rows[known], positions[known], places[known]
        expected = np.array(
            [step.owners[row].prefix[p + 1] for row, p in zip(rows.tolist(), positions.tolist(), strict=True)]
        )
        found = shadow.slots[places]
        same = found[:, HASH] == expected
        self._require(same, "draft-slot", shadow, rows, places // shadow.block_size, text, positions, places, found)

    def _commit_copy(self, copy: _Copy, step: _Step) -> None:
        shadow, rows, home, ends = copy.shadow, copy.rows, copy.home, copy.ends
        owners = [step.owners[row] for row in rows.tolist()]
        accepted = np.array([owner.computed for owner in owners])
        text = "gets the state after {} tokens, {} are accepted"
        self._require(ends <= accepted, "copy-rejected", shadow, rows, home, text, ends, accepted)
        self._check_writes(shadow, rows, home, step)
        parts = {"window": shadow.cells[copy.window, copy.drafts]}
        if copy.state is not None:
            parts["state"] = shadow.state[copy.state]
        expected = [owner.prefix[end] for owner, end in zip(owners, ends.tolist(), strict=True)]
        for what, entries in parts.items():
            text = f"gets a {what} for the end of token {{1}} that holds {{0}}"
            self._require(entries[:, HASH] == expected, "copy-state", shadow, rows, home, text, entries, ends - 1)
        for view, content in copy.checks:
            same = _numpy((view[torch.from_numpy(home)] == content).flatten(1).all(1))
            self._require(same, "copy-bytes", shadow, rows, home, "the copy did not arrive in every layer")
        shadow.cells[home] = 0
        shadow.cells[home, 0] = parts["window"]
        shadow.state[home] = parts.get("state", shadow.state[home])
        self._log_rows("copy", shadow, rows, home)

    # What a step reads and writes.

    def _check_attention(self, shadow: _Shadow, metadata: PagedAttentionMetadata, step: _Step) -> None:
        size, kernel_size, rows = shadow.block_size, shadow.group.kernel_block_size, step.rows
        slots, padding = np.split(_numpy(metadata.slot_mapping.slots), [len(rows)])
        if (padding != PAD_SLOT).any():
            self._fail("pad-slot", f"padding has the slots {padding.tolist()}", None, shadow)
        blocks, entries = slots // size, shadow.slots
        self._check_range(shadow, rows, blocks)
        self._check_writes(shadow, rows, blocks, step)
        self._check_once(shadow, rows, blocks, entries, slots)
        entries[slots] = step.entries
        self._log_rows("write", shadow, rows, blocks)

        self._check_lengths(shadow, [part.rows.lengths for part in metadata.parts], step)
        told = np.concatenate([_numpy(part.rows.flat(part.positions)) for part in metadata.parts])[: len(rows)]
        text = "attention is told position {} and not {}"
        self._require(told == step.positions, "position", shadow, rows, blocks, text, told, step.positions)
        table = np.concatenate([_numpy(part.block_table) for part in metadata.parts]).astype(np.int64)
        if table.shape[1] * kernel_size < step.ends.max():
            what = f"{table.shape[1]} columns of {kernel_size} tokens for a row of {step.ends.max()}"
            self._fail("index-range", what, None, shadow)
        if ((table[len(step.owners) :] * kernel_size) // size != NULL_BLOCK).any():
            self._fail("pad-row", "a padding row of the block table has live blocks", None, shadow)
        rows, positions = step.seen_rows, step.seen_positions
        slots = table[rows, positions // kernel_size] * kernel_size + positions % kernel_size
        blocks = slots // size
        self._check_range(shadow, rows, blocks)
        text = "position {} is read from slot {}, which holds {}"
        seen = entries[slots]
        self._check_reads("read-slot", shadow, rows, blocks, seen, step.seen, text, positions, slots, seen)

    def _check_mamba(self, shadow: _Shadow, metadata: MambaMetadata, step: _Step) -> None:
        split, num_rows, every = metadata.num_decodes, len(step.owners), step.all_rows
        windows, sources, states = (
            _numpy(part) for part in (metadata.window_indices, metadata.source_indices, metadata.state_indices)
        )
        for part in (windows, sources, *states.T):
            if (part[num_rows:] != NULL_BLOCK).any():
                self._fail("pad-row", f"padding has the blocks {part[num_rows:].tolist()}", None, shadow)
            self._check_range(shadow, every, part[:num_rows])
        parts = [part.lengths for part in (metadata.decode_rows, metadata.prefill_rows) if part is not None]
        self._check_lengths(shadow, parts, step)

        initial = np.ones(num_rows, dtype=bool)
        if metadata.has_initial_state is not None:
            initial[split:] = _numpy(metadata.has_initial_state)
        text = "at position {}, a row has an initial state: {}"
        ok = initial == (step.computed > 0)
        self._require(ok, "initial-state", shadow, every, sources[:num_rows], text, step.computed, initial)
        rows = np.flatnonzero(initial)
        # Out of range is an error also where the value will be dropped.
        first = _numpy(metadata.num_accepted_tokens) - 1
        if (wrong := first[(first < 0) | (first >= shadow.cells.shape[1])]).size:
            self._fail("index-range", f"a window begins at row {wrong[0]}", None, shadow)
        windows, sources, first = windows[rows], sources[rows], first[rows]
        begin, computed = step.begin[rows], step.computed[rows]
        cells, state = shadow.cells[windows, first], shadow.state[sources]
        text = "row {2} of a window is read after {1} tokens; it holds {0}"
        self._check_reads("read-window", shadow, rows, windows, cells, begin, text, cells, computed, first)
        later = rows >= (split if len(shadow.ring) else 0)  # In scheme `replay` decodes are another matter.
        text = "a state is read after {1} tokens; it holds {0}"
        args = rows[later], sources[later], state[later], begin[later]
        self._check_reads("read-state", shadow, *args, text, state[later], computed[later])
        if len(shadow.ring):
            num_decodes = min(split, num_rows)
            if (metadata.replay is None) != (split == 0):
                self._fail("history-length", f"{split} decodes, and nothing tells what they replay", None, shadow)
            if metadata.replay is not None:
                if (_numpy(metadata.replay.step.src)[num_decodes:] != NULL_BLOCK).any():
                    self._fail("pad-row", "padding replays a live block", None, shadow)
                owners = step.owners[:num_decodes]
                self._check_replay(shadow, owners, step.computed, metadata.replay.step, step)
            for owner, end in zip(step.owners[num_decodes:], step.ends[num_decodes:].tolist(), strict=True):
                owner.flushed = end

        # A decode leaves a state after each token; a prefill after its last, and at the boundaries that it passes.
        states = states[:num_rows]
        counts = np.where(every < split, step.lengths if not len(shadow.ring) else 1, 1)
        owned = np.arange(states.shape[1]) < counts[:, None]
        ok = (counts <= states.shape[1]) & (owned | (states == NULL_BLOCK)).all(1)
        text = "the states of {} tokens go to the {}"
        rows = np.fromiter(states.tolist(), dtype=object)  # an entry of its own for each, printed if need be
        self._require(ok, "write-padding", shadow, every, states[:, -1], text, counts, rows)
        rows, drafts = np.nonzero(owned)
        tokens = step.starts[rows] + np.where(rows < split, drafts, step.lengths[rows] - 1)
        targets, anchors = states[owned], states[rows, 0]
        replayed = rows < split if len(shadow.ring) else np.zeros(len(rows), dtype=bool)
        if metadata.boundary_rows is not None:
            assert metadata.boundary_offsets is not None and metadata.boundary_indices is not None
            more, offsets = split + _numpy(metadata.boundary_rows), _numpy(metadata.boundary_offsets)
            homes = _numpy(metadata.boundary_indices)
            inside = np.clip(more, split, num_rows - 1)
            ok = (more == inside) & (offsets > 0) & (offsets <= step.lengths[inside])
            self._require(ok, "index-range", shadow, inside, homes, "a boundary {} tokens into the row", offsets)
            added = more, np.zeros_like(more), step.starts[more] + offsets - 1, homes, homes
            rows, drafts, tokens, targets, anchors = map(
                np.concatenate, zip((rows, drafts, tokens, targets, anchors), added, strict=True)
            )
            replayed = np.concatenate([replayed, np.zeros(len(more), dtype=bool)])
            self._check_range(shadow, rows, targets)
        self._check_writes(shadow, rows, targets, step)
        before = shadow.state[targets[replayed]]
        self._check_once(shadow, rows, targets, shadow.state, targets)
        shadow.state[targets] = step.entries[tokens]
        shadow.state[targets[replayed]] = before  # only their windows
        shadow.cells[anchors] = 0
        shadow.cells[anchors, drafts] = step.entries[tokens]
        for row in range(split if len(shadow.ring) else 0):
            if row < num_rows:
                window = step.entries[step.starts[row] : step.starts[row] + step.lengths[row]]
                shadow.cells[states[row, 0], : len(window)] = window
        self._log_rows("write", shadow, rows, targets)

    def _check_replay(
        self, shadow: _Shadow, owners: Sequence[_Owner], computed: Array, replay: ReplayStep, step: _Step | None
    ) -> None:
        """The state that each decode starts from, its history, what of it is folded, and where its tokens go."""
        parts = (replay.rows, replay.src, replay.dst, replay.ring_start, replay.n_hist, replay.n_flush)
        rows = np.stack([_numpy(part)[: len(owners)] for part in parts], axis=1).tolist()
        size, ring_len = shadow.block_size, shadow.ring.shape[1]
        for i, (owner, (row, source, target, start, history, flush)) in enumerate(zip(owners, rows, strict=True)):
            assert owner.request is not None
            if row != owner.request.row:
                self._fail("ring-row", f"it replays row {row}, which is not its own", owner, shadow)
            if not (0 <= source < self.num_blocks and 0 <= target < self.num_blocks):
                self._fail("index-range", f"there is no block {source} or {target}", owner, shadow)
            entry, end = shadow.state[source], int(computed[i])
            base = int(entry[TOKENS])
            if self.held[owner.index, source] != shadow.id + 1:
                self._fail("read-unheld", "read by a request that does not hold it", owner, shadow, source)
            if not base or base > end or entry[HASH] != owner.prefix[base]:
                what = f"a state is read after {end - history} tokens; it holds {self._holds(entry)}"
                self._fail("read-state", what, owner, shadow, source)
            if flush > history or base + flush > end:
                what = f"{flush} tokens are folded behind {base}, {end} are accepted"
                self._fail("flush-unaccepted", what, owner, shadow, target)
            if base + history != end:
                what = f"{history} tokens are replayed behind {base}, {end} are in the cache"
                self._fail("history-length", what, owner, shadow, source)
            places = (start + np.arange(history)) % ring_len
            wrong = np.flatnonzero(shadow.ring[row, places, HASH] != owner.prefix[base + 1 : end + 1])
            if len(wrong):
                place = int(places[wrong[0]])
                what = f"token {base + int(wrong[0])} is replayed from place {place} of the ring, which holds "
                self._fail("read-history", what + self._holds(shadow.ring[row, place]), owner, shadow)
            if flush:
                self._log(self.step, "fold", shadow, np.array([target]), owner.name)
                if self.held[owner.index, target] != shadow.id + 1:
                    self._fail("flush-unheld", "folded into by a request that does not hold it", owner, shadow, target)
                if self.references[target] > 1 or self.published[target]:
                    self._fail("flush-shared", "folded into though others may read it", owner, shadow, target)
                if shadow.keeps_boundaries and 0 < (base + flush) % size < flush:
                    what = f"{flush} tokens are folded behind {base}: past the end of a block, whose state is lost"
                    self._fail("flush-boundary", what, owner, shadow, target)
                shadow.state[target] = shadow.ring[row, places[flush - 1]]
            elif source != target:
                self._fail("read-state", f"nothing is folded, and block {target} is read", owner, shadow, source)
            owner.flushed = base + flush
            if step is None:
                continue
            new = step.entries[step.starts[i] : step.starts[i] + step.lengths[i]]
            if history + len(new) > ring_len:
                what = f"{len(new)} tokens behind {history} do not fit in a ring of {ring_len}"
                self._fail("ring-full", what, owner, shadow)
            shadow.ring[row, (start + history + np.arange(len(new))) % ring_len] = new

    def _check_lengths(self, shadow: _Shadow, parts: Sequence[torch.Tensor], step: _Step) -> None:
        lengths = np.concatenate([_numpy(part) for part in parts])[: len(step.owners)]
        text = "the row has {} tokens and not {}"
        self._require(lengths == step.lengths, "row-length", shadow, step.all_rows, None, text, lengths, step.lengths)

    def _check_range(self, shadow: _Shadow, rows: Array, blocks: Array) -> None:
        ok = (blocks >= 0) & (blocks < self.num_blocks)
        self._require(ok, "index-range", shadow, rows, None, "there is no block {}", blocks)

    def _check_reads(
        self, rule: str, shadow: _Shadow, rows: Array, blocks: Array, entries: Array, expected: Array, *text: Any
    ) -> None:
        self._require(entries[:, HASH] == expected, rule, shadow, rows, blocks, *text)
        held = self.held[self._batch.index[rows], blocks] == shadow.id + 1
        self._require(held, "read-unheld", shadow, rows, blocks, "read by a request that does not hold it")

    def _check_writes(self, shadow: _Shadow, rows: Array, blocks: Array, step: _Step) -> None:
        exclusive = (self.references[blocks] <= 1) & ~self.published[blocks]
        self._require(exclusive, "write-shared", shadow, rows, blocks, "written though others may read it")
        held = self.held[step.index[rows], blocks] == shadow.id + 1
        self._require(held, "write-unheld", shadow, rows, blocks, "written by a request that does not hold it")

    def _check_once(self, shadow: _Shadow, rows: Array, blocks: Array, entries: Array, index: Array) -> None:
        order = np.arange(len(index))
        entries[index, ORIGIN] = order  # overwritten in a moment
        ok = entries[index, ORIGIN] == order
        self._require(ok, "write-twice", shadow, rows, blocks, "two tokens of the step write to {}", index)

    def _check_prefix(self, rule: str, owner: _Owner, shadow: _Shadow, column: int, block: int) -> None:
        """A block must hold the request's tokens up to the end of `column`, or the state after them."""
        begin, end = column * shadow.block_size, (column + 1) * shadow.block_size
        if shadow.is_mamba:
            entries, expected = np.stack([shadow.cells[block, 0], shadow.state[block]]), owner.prefix[[end, end]]
        else:
            entries, expected = shadow.cells[block], owner.prefix[begin + 1 : end + 1]
        same = entries[:, HASH] == expected
        if shadow.layers and not same.all():
            i = int(np.argmin(same))
            part = ("the window", "the state")[i] if shadow.is_mamba else f"slot {block * shadow.block_size + i}"
            what = f"for tokens {begin} … {end - 1} of the request, {part} holds {self._holds(entries[i])}"
            self._fail(rule, what, owner, shadow, block)

    # What requests have.

    def _owner(self, name: str) -> _Owner:
        if name not in self.owners:
            if not self._free:
                self._fail(
                    "allocate-held", f"request {name} gets blocks, but {len(self.owners)} others hold some", None
                )
            self.owners[name] = _Owner(name, self._free.pop(), len(self._names), self._max_tokens)
            self._names.append(name)
        return self.owners[name]

    def _learn(self, owner: _Owner, tokens: Sequence[int]) -> int:
        """Extend the prefixes of the known tokens; returns how many tokens they have now."""
        begin, end = owner.known, owner.known + len(tokens)
        if end > begin:
            owner.tokens[begin:end] = tokens
            terms = (owner.tokens[begin:end] + 1) * self._factors[begin:end]
            owner.prefix[begin + 1 : end + 1] = owner.prefix[begin] + np.cumsum(terms)
        return end

    def _restore(self, owner: _Owner) -> None:
        """What is loaded is taken for what it should be, unless its bytes are known."""
        for shadow, column, block in owner.loaded:
            tokens = np.arange(column * shadow.block_size, (column + 1) * shadow.block_size) + 1
            origin = np.full_like(tokens, (self.step << 32) + owner.serial)
            entries = np.stack([owner.prefix[tokens], tokens, origin], axis=1)
            shadow.state[block] = entries[-1]
            shadow.cells[block] = 0 if shadow.is_mamba else entries
            shadow.cells[block, 0] = entries[-1 if shadow.is_mamba else 0]
            key, checksum = self.keys[block][0], self._checksum(shadow, block)
            strange = checksum not in self._published_bytes.get(key, {checksum})
            if strange and (self.private_tier or checksum in self._all_bytes):
                self._fail("load-bytes", "loaded bytes that were never published for its tokens", owner, shadow, block)
            self.keys[block] = key, checksum
        owner.loaded.clear()

    def _checksum(self, shadow: _Shadow, block: int) -> int:
        """Of the block's bytes in all layers of the group; 64 bits, or chance would find it among all published."""
        return hash(tuple(_numpy(self.pages[layer][block]).tobytes() for layer in shadow.layers))

    # Reports.

    def _log(self, step: int, kind: str, shadow: _Shadow | None, ids: Array, name: str) -> None:
        self._events.append((step, kind, -1 if shadow is None else shadow.id, ids, [name], None))

    def _log_rows(self, kind: str, shadow: _Shadow, rows: Array, blocks: Array) -> None:
        names = [owner.name for owner in self._batch.owners]
        self._events.append((self.step, kind, shadow.id, blocks, names, rows))

    def _holds(self, entry: Array) -> str:
        if not entry[HASH]:
            return "nothing"
        step, serial = divmod(int(entry[ORIGIN]), 1 << 32)
        return f"the first {entry[TOKENS]} tokens of request {self._names[serial]} (step {step})"

    def _require(
        self, ok: Array, rule: str, shadow: _Shadow | None, rows: Array, blocks: Array | None, text: str, *values: Any
    ) -> None:
        """All of `ok`, whose entries belong to `rows` of the batch and to `blocks`; `text` takes their `values`."""
        if not ok.all():
            i = int(np.argmin(ok))
            given = [value[i] if np.ndim(value) < 2 else self._holds(value[i]) for value in values]
            block = None if blocks is None else int(blocks[i])
            self._fail(rule, text.format(*given), self._batch.owners[rows[i]], shadow, block)

    def _fail(
        self, rule: str, what: str, owner: _Owner | None, shadow: _Shadow | None = None, block: int | None = None
    ) -> NoReturn:
        self._failed = True
        lines = [f"{rule} in step {self.step}: {f'block {block}: ' if block is not None else ''}{what}"]
        if owner is not None:
            row = "" if owner.request is None else f" in row {owner.request.row}"
            lines.append(f"request {owner.name}{row}: {owner.known} tokens, {owner.computed or 0} of them in the cache")
        if shadow is not None:
            spec, layers = shadow.group.spec, ", ".join(shadow.group.layer_names)
            lines.append(f"group {shadow.id}: {type(spec).__name__}, blocks of {shadow.block_size} tokens: {layers}")
        if block is not None:
            holders = [other.name for other in self.owners.values() if self.held[other.index, block]]
            state = "published" if self.published[block] else "not published"
            lines.append(f"block {block}: {state}, held by {', '.join(holders) or 'nobody'}; history:")
            lines += [f"  {line}" for line in self._history(block)[-6:]]
        raise SanitizerError(rule, "\n".join(lines))

    def _history(self, block: int) -> list[str]:
        lines = []
        for step, kind, group, blocks, names, rows in self._events:
            found = np.flatnonzero(blocks == block)
            if len(found):
                who = names if rows is None else dict.fromkeys(names[row] for row in rows[found].tolist())
                where = f", group {group}" if group >= 0 else ""
                lines.append(f"step {step}: {kind} by request {', '.join(who)}{where}")
        return lines


def _numpy(tensor: torch.Tensor) -> Array:
    array: Array = tensor.cpu().numpy()
    return array

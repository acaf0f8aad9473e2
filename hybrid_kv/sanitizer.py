"""A shadow of the cache: what every slot and page holds, followed from the request's tokens and the step's metadata.

The shadow of a token's K/V, of a convolution window and of an SSM state is the hash of *all tokens up to it*. What a
step reads must be the prefix of the request that reads it; what it writes is that prefix, one token longer at a time.
Which slots and blocks it reads and writes is taken from what the model gets (slots, block tables, `MambaMetadata`);
what they should hold follows from the request's token ids alone. So neither the block tables, nor the metadata
builders, nor the block hashes are trusted, and the first rule that breaks is named before the step runs:

- `input-token`, `position`, `row-length`: the model gets other tokens, positions or lengths than the request has.
- `read-slot`, `read-window`, `read-state`: what is read is not the request's prefix; `read-unheld`: it is not its block.
- `initial-state`: a row at position 0 reads a state, or a later one does not.
- `write-shared`, `write-unheld`, `write-twice`, `write-padding`: a block is written that somebody else may read, that
  is not the request's, that another token of the step writes, or that no token owns.
- `pad-slot`, `pad-row`: padding points at a live slot or block. `index-range`: an index is outside its array.
- `accept`, `copy-rejected`, `copy-state`, `copy-bytes`: accepted drafts, and the copies of boundary states.
- `publish-unaccepted`, `publish-unheld`, `publish-slots`, `publish-state`: a block is published that is not exactly its
  tokens, accepted ones. `hit-unpublished`, `hit-overwritten`, `hit-prefix`: a hit that is not the request's prefix.
- `allocate-held`, `free-unheld`, `free-leak`, `evict-findable`: the life of a block.

Fresh blocks are poisoned (bytes 0xFF: NaN in every float format, -1 in integers). Layers of a drafting head (`mtp.`)
write in passes of their own and are not followed.
"""

from __future__ import annotations

import zlib
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from hashlib import blake2b
from typing import TYPE_CHECKING, Any, NoReturn

import numpy as np
import numpy.typing as npt
import torch

from hybrid_kv.cache.block_pool import NULL_BLOCK, BlockIds, BlockKey, BlockPool
from hybrid_kv.cache.spec import MambaSpec
from hybrid_kv.kernels.slot_mapping import PAD_SLOT

if TYPE_CHECKING:
    from hybrid_kv.attention.mamba import BoundaryCopies, MambaMetadata
    from hybrid_kv.attention.paged import PagedAttentionMetadata
    from hybrid_kv.cache.backend import AttentionGroup
    from hybrid_kv.engine.scheduler import Request, ScheduledRequest

Ints = npt.NDArray[np.int64]
Bools = npt.NDArray[np.bool_]

HISTORY = 4096  # events kept for reports
HASH, TOKENS, ORIGIN = range(3)  # of a shadow entry; all zero: nothing that anybody wrote


class SanitizerError(AssertionError):
    """The first broken rule, and the history of the block."""

    def __init__(self, rule: str, report: str) -> None:
        super().__init__(report)
        self.rule = rule


class _Owner:
    """A request that holds blocks: its tokens, and the hashes of its prefixes."""

    def __init__(self, name: str, index: int, serial: int, max_tokens: int) -> None:
        self.name, self.index, self.serial = name, index, serial
        self.request: Request | None = None
        self.tokens: Ints = np.zeros(max_tokens, dtype=np.int64)
        self.prefix: Ints = np.zeros(max_tokens + 1, dtype=np.int64)  # [p]: hash of the first p tokens
        self.known = 0  # tokens; behind them lie the step's drafts
        self.computed: int | None = None  # accepted tokens in the cache, None before its first step
        self.restored: list[tuple[int, int, int]] = []  # group, column, block of hits that its first step will read
        self.loaded: list[tuple[int, int, int]] = []


class _Shadow:
    """What the blocks of one group hold: `slots` of an attention group, `window` and `state` of a Mamba group."""

    def __init__(self, group: AttentionGroup, num_blocks: int) -> None:
        self.group, self.id, self.block_size = group, group.group_id, group.spec.block_size
        self.layers = [i for i, name in enumerate(group.layer_names) if not name.startswith("mtp.")]
        self.is_mamba = isinstance(group.spec, MambaSpec)
        width = 1 + group.spec.num_speculative_blocks if isinstance(group.spec, MambaSpec) else self.block_size
        # [block, offset of a slot or first row of a window].
        self.cells: Ints = np.zeros((num_blocks, width, 3), dtype=np.int64)
        self.state: Ints = np.zeros((num_blocks, 3), dtype=np.int64)

    @property
    def slots(self) -> Ints:
        return self.cells.reshape(-1, 3)


class _Step:
    """One step's batch: real rows only, and for each of their tokens the row and what it will leave in the cache."""

    def __init__(self, owners: list[_Owner], items: Sequence[ScheduledRequest], number: int) -> None:
        self.owners = owners
        self.lengths = np.array([item.num_tokens for item in items])
        self.computed = np.array([item.num_computed_tokens for item in items])
        self.drafts = [item.drafts for item in items]
        self.ends = self.computed + self.lengths
        self.index = np.array([owner.index for owner in owners])
        self.starts = np.cumsum(self.lengths) - self.lengths
        self.rows = np.repeat(np.arange(len(owners)), self.lengths)
        self.positions = np.arange(len(self.rows)) + (self.computed - self.starts)[self.rows]
        spans = list(zip(owners, self.computed.tolist(), self.ends.tolist(), strict=True))
        self.tokens = np.concatenate([owner.tokens[begin:end] for owner, begin, end in spans])
        self.begin = np.array([owner.prefix[begin] for owner, begin, _ in spans])
        serials = np.array([owner.serial for owner in owners])
        hashes = np.concatenate([owner.prefix[begin + 1 : end + 1] for owner, begin, end in spans])
        self.entries = np.stack([hashes, self.positions + 1, (number << 32) + serials[self.rows]], axis=1)
        # Everything that attention sees: all positions of every row.
        self.seen_rows = np.repeat(np.arange(len(owners)), self.ends)
        self.seen_positions = np.arange(len(self.seen_rows)) - np.repeat(np.cumsum(self.ends) - self.ends, self.ends)
        self.seen = np.concatenate([owner.prefix[1 : end + 1] for owner, _, end in spans])


class Sanitizer:
    """Follows one engine. Its hooks are called where blocks change hands and around each step.

    Args:
        buffers: the raw memory; buffer i belongs to the i-th layer of every group.
    """

    def __init__(
        self,
        pool: BlockPool,
        groups: Sequence[AttentionGroup],
        buffers: Sequence[torch.Tensor],
        max_num_seqs: int,
        max_model_len: int,
    ) -> None:
        self.pool = pool
        self.shadows = [_Shadow(group, pool.num_blocks) for group in groups]
        self.pages = [buffer.view(pool.num_blocks, -1) for buffer in buffers]
        self.held = np.zeros((max_num_seqs, pool.num_blocks), dtype=np.int8)  # group + 1
        self.references = np.zeros(pool.num_blocks, dtype=np.int32)
        self.published = np.zeros(pool.num_blocks, dtype=bool)
        self.keys: dict[int, tuple[BlockKey, int]] = {}  # of published blocks, with the checksum of the page
        self.owners: dict[str, _Owner] = {}
        self.step = -1
        self._names: list[str] = []  # by serial
        self._free = list(range(max_num_seqs))
        self._max_tokens = max_model_len + 32
        # Odd factors: an even one would forget the highest bit of a token.
        self._factors = np.random.default_rng(0).integers(-(2**62), 2**62, self._max_tokens, dtype=np.int64) * 2 + 1
        self._batch = _Step.__new__(_Step)
        self._copies: list[tuple[_Shadow, Ints, Ints, Ints, Ints, Ints, list[tuple[torch.Tensor, torch.Tensor]]]] = []
        self._events: deque[tuple[int, str, str, int, Any]] = deque(maxlen=HISTORY)
        self._failed = False

    # Blocks change hands.

    def on_hit(self, request_id: str, rows: Sequence[BlockIds]) -> None:
        """A new request took published blocks: per group its columns, null where it needs none."""
        owner = self._owner(request_id)
        for shadow, row in zip(self.shadows, rows, strict=True):
            columns = np.flatnonzero(row)
            ids = row[columns]
            self._events.append((self.step + 1, "hit", request_id, shadow.id, ids))
            for column, block in zip(columns.tolist(), ids.tolist(), strict=True):
                if not self.published[block]:
                    self._fail("hit-unpublished", "a hit took a block that is not published", owner, shadow, block)
                if self.keys[block][1] != self._checksum(shadow, block):
                    self._fail("hit-overwritten", "its bytes have changed since it was published", owner, shadow, block)
                owner.restored.append((shadow.id, column, block))
            self.references[ids] += 1
            self.held[owner.index, ids] = shadow.id + 1

    def on_allocate(self, request_id: str, per_group: Sequence[BlockIds]) -> None:
        """A request got fresh blocks: they hold nothing, whatever they held before."""
        owner = self._owner(request_id)
        for shadow, part in zip(self.shadows, per_group, strict=True):
            ids = part[part != NULL_BLOCK]
            if not len(ids):
                continue
            self._events.append((self.step + 1, "allocate", request_id, shadow.id, ids))
            in_range = (ids > NULL_BLOCK) & (ids < self.pool.num_blocks)
            self._require(in_range, "index-range", shadow, ids, owner, lambda i: "no such block")
            free = self.references[ids] == 0
            self._require(free, "allocate-held", shadow, ids, owner, lambda i: "handed out although somebody holds it")
            for block in ids[self.published[ids]].tolist():
                if self.pool.lookup(self.keys.pop(block)[0]) == block:
                    self._fail("evict-findable", "handed out, and a lookup still finds it", owner, shadow, block)
            self.published[ids] = False
            self.references[ids] = 1
            self.held[owner.index, ids] = shadow.id + 1
            for other in self.shadows:
                other.cells[ids] = 0
                other.state[ids] = 0
            for pages in self.pages:
                pages.index_fill_(0, torch.from_numpy(ids).to(pages.device).long(), -1)

    def on_load(self, request_id: str, group: int, column: int, block: int) -> None:
        """A block that the request holds was filled from elsewhere with its tokens up to the end of `column`."""
        self._owner(request_id).loaded.append((group, column, block))

    def on_free(self, request_id: str, ids: BlockIds, ended: bool = False) -> None:
        """A request gave blocks back; all that it has if it `ended`."""
        owner = self._owner(request_id)
        self._events.append((self.step, "free", request_id, -1, ids))
        groups = self.held[owner.index, ids]
        if not self._failed and not groups.all():
            block = int(ids[groups == 0][0])
            self._fail("free-unheld", "freed by a request that does not hold it", owner, None, block)
        self.held[owner.index, ids] = 0
        self.references[ids] -= 1
        if ended:
            if not self._failed and len(left := np.flatnonzero(self.held[owner.index])):
                self._fail("free-leak", "the request ended and did not give it back", owner, None, int(left[0]))
            self.held[owner.index] = 0
            self._free.append(owner.index)
            del self.owners[request_id]

    def on_publish(self, request_id: str, group: int, column: int, block: int, key: BlockKey) -> None:
        """A block became findable: from now on it must hold exactly the request's tokens up to the end of `column`."""
        owner, shadow = self._owner(request_id), self.shadows[group]
        self._events.append((self.step, "publish", request_id, group, np.array([block])))
        self._learn(owner)
        end = (column + 1) * shadow.block_size
        if self.held[owner.index, block] != group + 1:
            self._fail("publish-unheld", "published by a request that does not hold it", owner, shadow, block)
        if end > min(owner.computed or 0, owner.known):
            what = f"published for {end} tokens, of which {owner.computed or 0} are computed and accepted"
            self._fail("publish-unaccepted", what, owner, shadow, block)
        if shadow.layers:
            rule = "publish-state" if shadow.is_mamba else "publish-slots"
            self._check_prefix(rule, owner, shadow, column, block)
        self.published[block] = True
        self.keys[block] = key, self._checksum(shadow, block)

    def on_reset(self) -> None:
        """Nothing is published any more."""
        self.published[:] = False
        self.keys.clear()

    # Steps.

    def on_step(
        self,
        batch: Sequence[ScheduledRequest],
        input_ids: torch.Tensor,
        positions: torch.Tensor,
        metadata: dict[str, Any],
    ) -> None:
        """The metadata is ready and the model has not run."""
        self.step += 1
        owners = []
        for item in batch:
            owner = self._owner(item.request.request_id)
            owner.request = item.request
            owners.append(owner)
            self._learn(owner, item.drafts)
            if owner.computed not in (None, item.num_computed_tokens):
                what = f"it continues after {item.num_computed_tokens} tokens, but {owner.computed} are in the cache"
                self._fail("position", what, owner)
            self._settle(owner)
        self._batch = step = _Step(owners, batch, self.step)
        num_tokens = len(step.rows)
        for rule, given, expected in (
            ("input-token", input_ids, step.tokens),
            ("position", positions, step.positions),
        ):
            actual = _numpy(given)[:num_tokens]
            same = actual == expected
            self._require(
                same, rule, None, None, step.rows,
                lambda i: f"token {step.positions[i]}: the model gets {actual[i]} and not {expected[i]}",  # noqa: B023
            )  # fmt: skip
        for shadow in self.shadows:
            # Layers of a group mostly share one object.
            for given in {id(m): m for m in (metadata[shadow.group.layer_names[i]] for i in shadow.layers)}.values():
                (self._check_mamba if shadow.is_mamba else self._check_attention)(shadow, given, step)

    def on_copy(
        self,
        group: int,
        copies: BoundaryCopies,
        block_table: torch.Tensor,
        states: Sequence[tuple[torch.Tensor, torch.Tensor]],
        kernel: int,
    ) -> None:
        """Boundary states are about to be copied; what must have become of them is checked by `on_commit`."""
        table = _numpy(block_table).astype(np.int64)
        rows, drafts = copies.rows, copies.drafts
        home, window = table[rows, copies.columns], table[rows, copies.anchors]
        state = table[rows, copies.anchors + drafts]
        taps = torch.from_numpy(drafts[:, None] + np.arange(kernel - 1))
        expected = [
            (conv_state[torch.from_numpy(window)[:, None], taps], ssm_state[torch.from_numpy(state)])
            for conv_state, ssm_state in states
        ]
        self._copies.append((self.shadows[group], rows, drafts, home, window, state, expected))
        self._views = states
''' placeholder '''

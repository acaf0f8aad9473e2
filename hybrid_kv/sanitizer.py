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
from collections.abc import Callable, Sequence
from dataclasses import dataclass
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


@dataclass(frozen=True)
class _Copy:
    """Boundary states on their way home, in one group. `checks`: parts of a view and what they must become."""

    shadow: _Shadow
    rows: Ints
    drafts: Ints
    home: Ints
    window: Ints
    state: Ints
    checks: list[tuple[torch.Tensor, torch.Tensor]]


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
        self._batch: _Step | None = None
        self._copies: list[_Copy] = []
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
            if len(taken := ids[self.references[ids] > 0]):
                self._fail("allocate-held", "handed out although somebody holds it", owner, shadow, int(taken[0]))
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
            self._restore(owner)
        self._batch = step = _Step(owners, batch, self.step)
        num_tokens = len(step.rows)
        for rule, given, expected in (
            ("input-token", input_ids, step.tokens),
            ("position", positions, step.positions),
        ):
            actual = _numpy(given)[:num_tokens]
            same = actual == expected
            if not same.all():
                i = int(np.argmin(same))
                what = f"position {step.positions[i]}: the model gets {actual[i]}, not {expected[i]}"
                self._fail(rule, what, owners[step.rows[i]])
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
        """Boundary states are about to be copied; `on_commit` checks what has become of them."""
        table, (rows, drafts) = _numpy(block_table).astype(np.int64), (copies.rows, copies.drafts)
        home, window, state = (table[rows, c] for c in (copies.columns, copies.anchors, copies.anchors + drafts))
        taps = torch.from_numpy(drafts[:, None] + np.arange(kernel - 1))
        checks = []
        for conv_state, ssm_state in states:
            checks.append((conv_state[:, : kernel - 1], conv_state[torch.from_numpy(window)[:, None], taps]))
            checks.append((ssm_state, ssm_state[torch.from_numpy(state)]))
        self._copies.append(_Copy(self.shadows[group], rows, drafts, home, window, state, checks))

    def on_commit(self, tokens: Sequence[Sequence[int]]) -> None:
        """The step is over.

        Args:
            tokens: what each row of the batch got: none, or its accepted drafts and one token more.
        """
        step = self._batch
        assert step is not None, "a step was committed that never began"
        accepted = []
        for owner, drafts, end, new in zip(step.owners, step.drafts, step.ends.tolist(), tokens, strict=True):
            count = next(
                (j for j, pair in enumerate(zip(drafts, new, strict=False)) if pair[0] != pair[1]), len(drafts)
            )
            if len(new) != (1 + count if new else 0) or len(drafts) > count == len(new):
                self._fail("accept", f"drafts {list(drafts)} became tokens {list(new)}", owner)
            accepted.append(count)
            owner.computed = end - len(drafts) + count
        for copy in self._copies:
            self._commit_copy(copy, step, np.array(accepted))
        self._copies.clear()

    def _commit_copy(self, copy: _Copy, step: _Step, accepted: Ints) -> None:
        shadow, rows, drafts, home = copy.shadow, copy.rows, copy.drafts, copy.home
        self._require(
            drafts <= accepted[rows],
            "copy-rejected",
            shadow,
            home,
            rows,
            step,
            lambda i: f"gets the state after draft {drafts[i]}, but {accepted[rows[i]]} drafts were accepted",
        )
        self._check_writes(shadow, home, rows, step)
        window, state = shadow.cells[copy.window, drafts], shadow.state[copy.state]
        expected = step.entries[step.starts[rows] + drafts, HASH]
        for what, entries in (("window", window), ("state", state)):
            self._require(
                entries[:, HASH] == expected,
                "copy-state",
                shadow,
                home,
                rows,
                step,
                lambda i: f"gets a {what} that holds {self._holds(entries[i])}",
            )
        # Where the rows of a window overlap their own target, only the target can be compared.
        for view, content in copy.checks:
            same = (view[torch.from_numpy(home)] == content).flatten(1).all(1)
            self._require(
                _numpy(same), "copy-bytes", shadow, home, rows, step, lambda i: "was not copied in all layers"
            )
        shadow.cells[home] = 0
        shadow.cells[home, 0], shadow.state[home] = window, state
        self._log("copy", shadow, step.owners, rows, home)

    # What a step reads and writes.

    def _check_attention(self, shadow: _Shadow, metadata: PagedAttentionMetadata, step: _Step) -> None:
        slots, num_tokens, size = _numpy(metadata.slots), len(step.rows), shadow.block_size
        if (slots[num_tokens:] != PAD_SLOT).any():
            self._fail("pad-slot", f"padding has the slots {slots[num_tokens:].tolist()}", None, shadow)
        slots, rows = slots[:num_tokens], step.rows
        blocks = slots // size
        self._check_range(shadow, blocks, rows, step, "slots")
        self._check_writes(shadow, blocks, rows, step)
        order = np.arange(num_tokens)
        entries = shadow.slots
        entries[slots, ORIGIN] = order
        self._require(
            entries[slots, ORIGIN] == order,
            "write-twice",
            shadow,
            blocks,
            rows,
            step,
            lambda i: f"slot {slots[i]} is written by position {step.positions[i]} and by another token",
        )
        entries[slots] = step.entries
        self._log("write", shadow, step.owners, rows, blocks)

        kernel_size = shadow.group.kernel_block_size
        tables, lengths, given = [], [], []
        for part in metadata.parts:
            table = _numpy(part.block_table)
            tables.append(table)
            lengths.append(_numpy(part.rows.lengths))
            given.append(_numpy(part.rows.flat(part.positions)))
        self._check_lengths(shadow, np.concatenate(lengths), step)
        self._require(
            np.concatenate(given)[:num_tokens] == step.positions,
            "position",
            shadow,
            blocks,
            rows,
            step,
            lambda i: f"attention is told another position than {step.positions[i]}",
        )
        width = max(table.shape[1] for table in tables)
        if width * kernel_size < step.ends.max():
            self._fail("index-range", f"{width} columns of {kernel_size} tokens are too few", None, shadow)
        table = np.concatenate(tables)
        if (table[len(step.owners) :] // (size // kernel_size) != NULL_BLOCK).any():
            self._fail("pad-row", "a padding row of the block table has live blocks", None, shadow)
        rows, positions = step.seen_rows, step.seen_positions
        column, offset = np.divmod(positions, kernel_size)
        slots = table[rows, column].astype(np.int64) * kernel_size + offset
        blocks = slots // size
        self._check_range(shadow, blocks, rows, step, "the block table")
        self._check_reads(
            "read-slot",
            shadow,
            blocks,
            rows,
            entries[slots, HASH] == step.seen,
            step,
            lambda i: (
                f"position {positions[i]} is read from slot {slots[i]}, which holds {self._holds(entries[slots[i]])}"
            ),
        )

    def _check_mamba(self, shadow: _Shadow, metadata: MambaMetadata, step: _Step) -> None:
        split, num_rows = metadata.num_decodes, len(step.owners)
        windows, sources, accepted, states = (
            _numpy(part)
            for part in (
                metadata.window_indices, metadata.source_indices, metadata.num_accepted_tokens, metadata.state_indices
            )
        )  # fmt: skip
        every = np.arange(num_rows)
        for part in (windows, sources, states):
            if (part[num_rows:] != NULL_BLOCK).any():
                self._fail("pad-row", f"padding reads or writes blocks {part[num_rows:].tolist()}", None, shadow)
            first = part[:num_rows].reshape(num_rows, -1)
            self._check_range(shadow, first.ravel(), np.repeat(every, first.shape[1]), step, "the metadata")
        self._check_lengths(shadow, np.concatenate([
            _numpy(part.lengths) for part in (metadata.decode_rows, metadata.prefill_rows) if part is not None
        ]), step)  # fmt: skip

        initial = np.ones(num_rows, dtype=bool)
        if metadata.has_initial_state is not None:
            initial[split:] = _numpy(metadata.has_initial_state)
        self._require(
            initial == (step.computed > 0),
            "initial-state",
            shadow,
            sources,
            every,
            step,
            lambda i: (
                f"a row that starts at position {step.computed[i]} {'reads a' if initial[i] else 'ignores its'} state"
            ),
        )
        rows = np.flatnonzero(initial)
        windows, sources, first = windows[rows], sources[rows], accepted[rows] - 1
        in_range = (first >= 0) & (first < shadow.cells.shape[1])
        self._require(in_range, "index-range", shadow, windows, rows, step, lambda i: f"window row {first[i]}")
        begin, cells = step.begin[rows], shadow.cells[windows, first]
        self._check_reads(
            "read-window",
            shadow,
            windows,
            rows,
            cells[:, HASH] == begin,
            step,
            lambda i: (
                f"after {step.computed[rows[i]]} tokens, row {first[i]} of a window holds {self._holds(cells[i])}"
            ),
        )
        state = shadow.state[sources]
        self._check_reads(
            "read-state",
            shadow,
            sources,
            rows,
            state[:, HASH] == begin,
            step,
            lambda i: f"after {step.computed[rows[i]]} tokens, it starts from {self._holds(state[i])}",
        )

        # A decode leaves a state after each token, a prefill one after its last, and those at the boundaries it passes.
        counts = np.where(every < split, step.lengths, 1)
        states = states[:num_rows]
        owned = np.arange(states.shape[1]) < counts[:, None]
        self._require(
            (counts <= states.shape[1]) & ((states == NULL_BLOCK) | owned).all(1),
            "write-padding",
            shadow,
            states[:, -1],
            every,
            step,
            lambda i: f"{counts[i]} states go to {states[i].tolist()}",
        )
        rows, drafts = np.nonzero(owned)
        targets, anchors = states[owned], states[rows, 0]
        tokens = step.starts[rows] + np.where(rows < split, drafts, step.lengths[rows] - 1)
        if metadata.boundary_rows is not None:
            assert metadata.boundary_offsets is not None and metadata.boundary_indices is not None
            more = split + _numpy(metadata.boundary_rows)
            offsets, homes = _numpy(metadata.boundary_offsets), _numpy(metadata.boundary_indices)
            inside = (more >= split) & (more < num_rows)
            inside[inside] &= (offsets[inside] > 0) & (offsets[inside] <= step.lengths[more[inside]])
            self._require(
                inside,
                "index-range",
                shadow,
                homes,
                np.minimum(more, num_rows - 1),
                step,
                lambda i: f"a boundary {offsets[i]} tokens into row {more[i]}",
            )
            rows, targets = np.concatenate([rows, more]), np.concatenate([targets, homes])
            drafts, anchors = np.concatenate([drafts, 0 * more]), np.concatenate([anchors, homes])
            tokens = np.concatenate([tokens, step.starts[more] + offsets - 1])
        self._check_range(shadow, targets, rows, step, "the boundaries")
        self._check_writes(shadow, targets, rows, step)
        order = np.arange(len(targets))
        shadow.state[targets, ORIGIN] = order
        self._require(
            shadow.state[targets, ORIGIN] == order,
            "write-twice",
            shadow,
            targets,
            rows,
            step,
            lambda i: "two states of the step go to it",
        )
        shadow.state[targets] = step.entries[tokens]
        shadow.cells[anchors] = 0
        shadow.cells[anchors, drafts] = step.entries[tokens]
        self._log("write", shadow, step.owners, rows, targets)

    def _check_lengths(self, shadow: _Shadow, lengths: Ints, step: _Step) -> None:
        num_rows = len(step.owners)
        same = lengths[:num_rows] == step.lengths
        self._require(
            same,
            "row-length",
            shadow,
            None,
            np.arange(num_rows),
            step,
            lambda i: f"the row has {lengths[i]} tokens and not {step.lengths[i]}",
        )

    def _check_range(self, shadow: _Shadow, blocks: Ints, rows: Ints, step: _Step, where: str) -> None:
        inside = (blocks >= 0) & (blocks < self.pool.num_blocks)
        self._require(inside, "index-range", shadow, None, rows, step, lambda i: f"block {blocks[i]} in {where}")

    def _check_reads(
        self, rule: str, shadow: _Shadow, blocks: Ints, rows: Ints, same: Bools, step: _Step, what: Callable[[int], str]
    ) -> None:
        self._require(same, rule, shadow, blocks, rows, step, what)
        held = self.held[step.index[rows], blocks] == shadow.id + 1
        self._require(held, "read-unheld", shadow, blocks, rows, step, lambda i: "read, and not the request's")

    def _check_writes(self, shadow: _Shadow, blocks: Ints, rows: Ints, step: _Step) -> None:
        shared = (self.references[blocks] > 1) | self.published[blocks]
        self._require(
            ~shared, "write-shared", shadow, blocks, rows, step, lambda i: "written though others may read it"
        )
        held = self.held[step.index[rows], blocks] == shadow.id + 1
        self._require(held, "write-unheld", shadow, blocks, rows, step, lambda i: "written, and not the request's")

    # What requests know, and what blocks should hold.

    def _owner(self, name: str) -> _Owner:
        if name not in self.owners:
            if not self._free:
                raise SanitizerError("allocate-held", f"request {name} gets blocks, but every row of a step is taken")
            self.owners[name] = _Owner(name, self._free.pop(), len(self._names), self._max_tokens)
            self._names.append(name)
        return self.owners[name]

    def _learn(self, owner: _Owner, drafts: Sequence[int] = ()) -> None:
        """Extend the prefixes of a request by its new tokens; `drafts` follow them for one step."""
        request, begin = owner.request, owner.known
        if request is None:
            return
        prompt, output = request.prompt_token_ids, request.output_token_ids
        owner.known = len(prompt) + len(output)
        if not begin:
            digest = blake2b(request.params.cache_salt.encode(), digest_size=8).digest()
            owner.prefix[0] = int.from_bytes(digest, "little", signed=True)
            new = [*prompt, *output, *drafts]
        else:
            new = [*output[begin - len(prompt) :], *drafts]
        if new:
            end = begin + len(new)
            owner.tokens[begin:end] = new
            terms = (owner.tokens[begin:end] + 1) * self._factors[begin:end]
            owner.prefix[begin + 1 : end + 1] = owner.prefix[begin] + np.cumsum(terms)

    def _restore(self, owner: _Owner) -> None:
        """Blocks that a request did not compute: loaded ones get what they must hold, hits must hold it."""
        for group, column, block in owner.loaded:
            shadow = self.shadows[group]
            begin, end = column * shadow.block_size, (column + 1) * shadow.block_size
            entries = np.zeros((shadow.block_size, 3), dtype=np.int64)
            entries[:, HASH] = owner.prefix[begin + 1 : end + 1]
            entries[:, TOKENS] = np.arange(begin + 1, end + 1)
            entries[:, ORIGIN] = (self.step << 32) + owner.serial
            shadow.state[block] = entries[-1]
            shadow.cells[block, : 1 if shadow.is_mamba else None] = entries[-1:] if shadow.is_mamba else entries
        for group, column, block in owner.restored:
            if self.shadows[group].layers:
                self._check_prefix("hit-prefix", owner, self.shadows[group], column, block)
        owner.loaded, owner.restored = [], []

    def _check_prefix(self, rule: str, owner: _Owner, shadow: _Shadow, column: int, block: int) -> None:
        """A block must hold the request's tokens up to the end of `column`, or the state after them."""
        begin, end = column * shadow.block_size, (column + 1) * shadow.block_size
        if shadow.is_mamba:
            entries = np.stack([shadow.cells[block, 0], shadow.state[block]])
            expected = owner.prefix[[end, end]]
        else:
            entries, expected = shadow.cells[block], owner.prefix[begin + 1 : end + 1]
        same = entries[:, HASH] == expected
        if end > owner.known or not same.all():
            i = int(np.argmin(same))
            part = ("the window", "the state")[i] if shadow.is_mamba else f"slot {block * shadow.block_size + i}"
            what = f"for tokens {begin} … {end - 1} of the request, {part} holds {self._holds(entries[i])}"
            self._fail(rule, what, owner, shadow, block)

    def _checksum(self, shadow: _Shadow, block: int) -> int:
        """Of the bytes that the block has in the group's layers."""
        checksum = 0
        for layer in shadow.layers:
            checksum = zlib.crc32(_numpy(self.pages[layer][block]), checksum)
        return checksum

    # Reports.

    def _log(self, kind: str, shadow: _Shadow, owners: list[_Owner], rows: Ints, blocks: Ints) -> None:
        self._events.append((self.step, kind, "", shadow.id, (owners, rows, blocks)))

    def _holds(self, entry: Ints) -> str:
        if not entry[HASH]:
            return "nothing"
        step, serial = divmod(int(entry[ORIGIN]), 1 << 32)
        return f"the first {entry[TOKENS]} tokens of request {self._names[serial]} (written in step {step})"

    def _require(
        self,
        ok: Bools,
        rule: str,
        shadow: _Shadow,
        blocks: Ints | None,
        rows: Ints,
        step: _Step,
        what: Callable[[int], str],
    ) -> None:
        """All of `ok`, whose entries belong to `rows` of the batch and to `blocks`."""
        if not ok.all():
            i = int(np.argmin(ok))
            self._fail(rule, what(i), step.owners[rows[i]], shadow, None if blocks is None else int(blocks[i]))

    def _fail(
        self, rule: str, what: str, owner: _Owner | None, shadow: _Shadow | None = None, block: int | None = None
    ) -> NoReturn:
        self._failed = True
        lines = [f"sanitizer: {rule} in step {self.step}: {what}"]
        if owner is not None:
            row = "" if owner.request is None else f", row {owner.request.row}"
            known = f"{owner.known} tokens known, {owner.computed or 0} computed"
            lines.append(f"  request {owner.name}: {known}{row}")
        if shadow is not None:
            group = shadow.group
            kind = f"{type(group.spec).__name__}, block_size {shadow.block_size}"
            lines.append(f"  group {shadow.id}: {kind}, layers {', '.join(group.layer_names)}")
        if block is not None:
            users = [o.name for o in self.owners.values() if self.held[o.index, block]]
            state = "published" if self.published[block] else "not published"
            lines.append(f"  block {block}: held by {' and '.join(users) or 'nobody'}, {state}; its history:")
            lines += [f"    {line}" for line in self._history(block)[-6:]]
        raise SanitizerError(rule, "\n".join(lines))

    def _history(self, block: int) -> list[str]:
        lines = []
        for step, kind, name, group, what in self._events:
            names = [name]
            if isinstance(what, tuple):
                owners, rows, blocks = what
                names = list(dict.fromkeys(owners[row].name for row in rows[blocks == block].tolist()))
            elif block not in what:
                continue
            place = f", group {group}" if group >= 0 else ""
            lines += [f"step {step}: {kind} by request {name}{place}" for name in names]
        return lines


def _numpy(tensor: torch.Tensor) -> npt.NDArray[Any]:
    return tensor.cpu().numpy()

"""The holders of blocks, the published blocks, and the checks that all rules share."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import Any, NoReturn

import numpy as np
import torch

from hybrid_kv.cache.block_pool import BlockIds, BlockKey, BlockPool
from hybrid_kv.config import CheckFailedError
from hybrid_kv.sanitizer.shadow import (
    HASH,
    ORIGIN,
    TOKENS,
    Array,
    Owner,
    Shadow,
    TrackedStep,
    to_numpy,
)

NUM_EVENTS = 4096  # kept for reports
NUM_LINES = 6  # of a block's history, the last ones


class SanitizerError(CheckFailedError, AssertionError):
    """The first broken `rule`; the message has the request, the group, the block, its history."""

    def __init__(self, rule: str, report: str) -> None:
        super().__init__(report)
        self.rule = rule


class History:
    """The last events of all blocks, and the names of the requests that wrote them."""

    def __init__(self) -> None:
        self.names: list[str] = []  # of requests, by serial number
        # Step, kind, group, block ids, names of requests, and which of them each block belongs to
        # (None: all of them).
        self._events: deque[tuple[int, str, int, Array, list[str], Array | None]] = deque(
            maxlen=NUM_EVENTS
        )

    def log(
        self,
        step: int,
        kind: str,
        shadow: Shadow | None,
        blocks: Array,
        names: list[str],
        rows: Array | None = None,
    ) -> None:
        """Note an event of blocks.

        Args:
            rows: of each block, the place of its request in `names`; None: all blocks are the first
                one's.
        """
        self._events.append((step, kind, -1 if shadow is None else shadow.id, blocks, names, rows))

    def of(self, block: int) -> list[str]:
        """Return the last events of a block, a line each."""
        lines = []
        for step, kind, group, blocks, names, rows in self._events:
            places = np.flatnonzero(blocks == block)
            if len(places):
                who = (
                    names
                    if rows is None
                    else dict.fromkeys(names[row] for row in rows[places].tolist())
                )
                where = f", group {group}" if group >= 0 else ""
                lines.append(f"step {step}: {kind} by request {', '.join(who)}{where}")
        return lines[-NUM_LINES:]

    def holds(self, entry: Array) -> str:
        """Describe an entry of a shadow."""
        if not entry[HASH]:
            return "nothing"
        step, serial = divmod(int(entry[ORIGIN]), 1 << 32)
        return f"the first {entry[TOKENS]} tokens of request {self.names[serial]} (step {step})"


class Ledger:
    """The pool as it should be.

    Args:
        max_owners: requests that may hold blocks at the same time.
        buffers: the raw memory; buffer i belongs to the i-th layer of every group.

    Attributes:
        held: [owner, block] int8, group + 1 or 0.
        references: [block] int32, how many hold it.
        published: [block] bool.
        keys: of published blocks, with a checksum of their bytes once these are there.
        batch: the step in flight, or the last one.
        has_failed: something was reported or raised; until the next step the engine clears up,
            whatever state it is in.
    """

    batch: TrackedStep

    def __init__(
        self,
        pool: BlockPool,
        shadows: Sequence[Shadow],
        buffers: Sequence[torch.Tensor],
        max_owners: int,
        length: int,
    ) -> None:
        self.pool = pool
        self.num_blocks = pool.num_blocks
        self.shadows = shadows
        self._buffers = buffers
        self.owners: dict[str, Owner] = {}
        self.held = np.zeros((max_owners, pool.num_blocks), dtype=np.int8)
        self.references = np.zeros(pool.num_blocks, dtype=np.int32)
        self.published = np.zeros(pool.num_blocks, dtype=bool)
        self.keys: dict[int, tuple[BlockKey, int | None]] = {}
        self.step = -1
        self.has_failed = False
        self.history = History()
        self._max_tokens = length
        # Odd, so that no bit of a token is lost.
        self._factors = np.random.default_rng(0).integers(-(2**62), 2**62, length) * 2 + 1
        self._free = list(range(max_owners))

    # Requests.

    @property
    def pages(self) -> list[torch.Tensor]:
        """Each buffer as [num_blocks, bytes of a page]."""
        return [buffer.view(self.num_blocks, -1) for buffer in self._buffers]

    def owner(self, name: str) -> Owner:
        """Return the request of this id, new if it holds nothing."""
        if name not in self.owners:
            if not self._free:
                problem = f"request {name} gets blocks, but {len(self.owners)} others hold some"
                self.fail("allocate-held", problem, None)
            names = self.history.names
            self.owners[name] = Owner(name, self._free.pop(), len(names), self._max_tokens)
            names.append(name)
        return self.owners[name]

    def forget(self, owner: Owner) -> None:
        """Forget a request that holds nothing any more."""
        self.held[owner.index] = 0
        self._free.append(owner.index)
        del self.owners[owner.name]

    def learn(self, owner: Owner, tokens: Sequence[int]) -> int:
        """Extend the prefixes of the known tokens; return how many tokens they have now."""
        begin = owner.known
        end = owner.known + len(tokens)
        if end > begin:
            owner.tokens[begin:end] = tokens
            terms = (owner.tokens[begin:end] + 1) * self._factors[begin:end]
            owner.prefix[begin + 1 : end + 1] = owner.prefix[begin] + np.cumsum(terms)
        return end

    # Blocks.

    def take(self, owner: Owner, shadow: Shadow, ids: BlockIds, kind: str) -> None:
        """Hand out blocks, which hold nothing then, whatever they held before."""
        self.log(self.step + 1, kind, shadow, ids, owner.name)
        taken = ids[self.references[ids] > 0]
        if len(taken):
            self.fail(
                "allocate-held", "handed out while a request holds it", owner, shadow, int(taken[0])
            )
        for block in ids[self.published[ids]].tolist():
            if self.pool.lookup(self.keys.pop(block)[0]) == block:
                self.fail(
                    "evict-findable", "evicted, and a lookup still finds it", owner, shadow, block
                )
        self.published[ids] = False
        self.references[ids] = 1
        self.held[owner.index, ids] = shadow.id + 1
        for other in self.shadows:
            other.cells[ids] = 0
            other.state[ids] = 0
        for pages in self.pages:
            pages.index_fill_(0, torch.from_numpy(ids).to(pages.device).long(), -1)

    def checksum(self, shadow: Shadow, block: int) -> int:
        """Return a checksum of a block's bytes in all layers of the group.

        It has 64 bits, or chance would find it among all published.
        """
        return hash(tuple(to_numpy(self.pages[layer][block]).tobytes() for layer in shadow.layers))

    # Checks; `rows` are places in the batch.

    def check_lengths(
        self, shadow: Shadow, parts: Sequence[torch.Tensor], step: TrackedStep
    ) -> None:
        """Check that the rows of the metadata are as long as those of the batch."""
        lengths = np.concatenate([*map(to_numpy, parts)])[: len(step.owners)]
        template = "the row has {} tokens and not {}"
        self.require(
            lengths == step.lengths,
            "row-length",
            shadow,
            step.all_rows,
            None,
            template,
            lengths,
            step.lengths,
        )

    def check_range(self, shadow: Shadow, rows: Array, blocks: Array) -> None:
        """Check that there are such blocks."""
        ok = (blocks >= 0) & (blocks < self.num_blocks)
        self.require(ok, "index-range", shadow, rows, None, "there is no block {}", blocks)

    def check_reads(
        self,
        rule: str,
        shadow: Shadow,
        rows: Array,
        blocks: Array,
        entries: Array,
        expected: Array,
        *template: Any,
    ) -> None:
        """Check that the expected entries are read, and from a block of the reader."""
        self.require(entries[:, HASH] == expected, rule, shadow, rows, blocks, *template)
        held = self.held[self.batch.index[rows], blocks] == shadow.id + 1
        self.require(
            held, "read-unheld", shadow, rows, blocks, "read by a request that does not hold it"
        )

    def check_writes(self, shadow: Shadow, rows: Array, blocks: Array, step: TrackedStep) -> None:
        """Check that the blocks which are written are the writer's alone."""
        exclusive = (self.references[blocks] <= 1) & ~self.published[blocks]
        self.require(
            exclusive, "write-shared", shadow, rows, blocks, "written though others may read it"
        )
        held = self.held[step.index[rows], blocks] == shadow.id + 1
        self.require(
            held, "write-unheld", shadow, rows, blocks, "written by a request that does not hold it"
        )

    def check_once(
        self, shadow: Shadow, rows: Array, blocks: Array, entries: Array, index: Array
    ) -> None:
        """Check that no two tokens write to one entry.

        It spoils the entries, which are overwritten in a moment.
        """
        order = np.arange(len(index))
        entries[index, ORIGIN] = order
        ok = entries[index, ORIGIN] == order
        self.require(
            ok, "write-twice", shadow, rows, blocks, "two tokens of the step write to {}", index
        )

    def check_prefix(self, rule: str, owner: Owner, shadow: Shadow, end: int, block: int) -> None:
        """Check that a block holds those of the request's first `end` tokens that lie in it.

        In a Mamba group it holds the state after them.
        """
        begin = (end - 1) // shadow.block_size * shadow.block_size
        if shadow.is_mamba:
            entries = np.stack([shadow.cells[block, 0], shadow.state[block]])
            expected = owner.prefix[[end, end]]
        else:
            entries = shadow.cells[block, : end - begin]
            expected = owner.prefix[begin + 1 : end + 1]
        same = entries[:, HASH] == expected
        if shadow.layers and not same.all():
            i = int(np.argmin(same))
            place = (
                ("the window", "the state")[i]
                if shadow.is_mamba
                else f"slot {block * shadow.block_size + i}"
            )
            problem = (
                f"for tokens {begin} … {end - 1} of the request, {place} holds "
                f"{self.history.holds(entries[i])}"
            )
            self.fail(rule, problem, owner, shadow, block)

    # Reports.

    def log(self, step: int, kind: str, shadow: Shadow | None, ids: Array, name: str) -> None:
        """Note what one request did to blocks."""
        self.history.log(step, kind, shadow, ids, [name])

    def log_rows(self, kind: str, shadow: Shadow, rows: Array, blocks: Array) -> None:
        """Note what the requests of `rows` did to a block each."""
        self.history.log(
            self.step, kind, shadow, blocks, [owner.name for owner in self.batch.owners], rows
        )

    def require(
        self,
        ok: Array,
        rule: str,
        shadow: Shadow | None,
        rows: Array,
        blocks: Array | None,
        template: str,
        *values: Any,
    ) -> None:
        """Check that all of `ok` holds.

        Args:
            rows, blocks: of each entry, of the batch and of the pool.
            template: of the message, filled with the entry's `values`.
        """
        if not ok.all():
            i = int(np.argmin(ok))
            given = [
                value[i] if np.ndim(value) < 2 else self.history.holds(value[i]) for value in values
            ]
            block = None if blocks is None else int(blocks[i])
            self.fail(rule, template.format(*given), self.batch.owners[rows[i]], shadow, block)

    def fail(
        self,
        rule: str,
        problem: str,
        owner: Owner | None,
        shadow: Shadow | None = None,
        block: int | None = None,
    ) -> NoReturn:
        """Raise SanitizerError with the history of the block."""
        self.has_failed = True
        lines = [
            f"{rule} in step {self.step}: "
            f"{f'block {block}: ' if block is not None else ''}{problem}"
        ]
        if owner is not None:
            row = "" if owner.request is None else f" in row {owner.request.row}"
            lines.append(
                f"request {owner.name}{row}: {owner.known} tokens, {owner.computed or 0} of them "
                "in the cache"
            )
        if shadow is not None:
            spec = shadow.group.spec
            layers = ", ".join(shadow.group.layer_names)
            lines.append(
                f"group {shadow.id}: {type(spec).__name__}, blocks of {shadow.block_size} tokens: "
                f"{layers}"
            )
        if block is not None:
            holders = [
                other.name for other in self.owners.values() if self.held[other.index, block]
            ]
            state = "published" if self.published[block] else "not published"
            lines.append(
                f"block {block}: {state}, held by {', '.join(holders) or 'no request'}; history:"
            )
            lines += [f"  {line}" for line in self.history.of(block)]
        raise SanitizerError(rule, "\n".join(lines))

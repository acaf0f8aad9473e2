"""The rules that a rollback scheme adds to those of Mamba layers.

The rest of the sanitizer knows no scheme.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar, NamedTuple

import numpy as np

from hybrid_kv.attention.mamba import MambaMetadata
from hybrid_kv.attention.rollback import RecomputeSpec, RollbackStep
from hybrid_kv.cache.block_pool import NULL_BLOCK
from hybrid_kv.cache.spec import MambaSpec
from hybrid_kv.kernels.recompute import RecomputeStep
from hybrid_kv.sanitizer.ledger import Ledger
from hybrid_kv.sanitizer.shadow import HASH, TOKENS, Array, Owner, Shadow, TrackedStep, to_numpy


class RollbackRules:
    """The rules of a scheme that adds none, as `slots`.

    Every state is in its block, and `rules_mamba` has the rest.

    Attributes:
        in_blocks: decodes read and leave their states in the blocks that the metadata names; else
            only windows.
    """

    in_blocks: ClassVar[bool] = True

    def __init__(self, ledger: Ledger, shadow: Shadow, num_rows: int) -> None:
        self.ledger = ledger
        self.shadow = shadow

    def restart(self, row: int) -> None:
        """Give a row of the engine to a new owner."""

    def check_step(self, metadata: MambaMetadata, step: TrackedStep) -> None:
        """Check the reads and writes of a step's decodes outside of their blocks."""

    def check_flush(self, owner: Owner, computed: int, step: RollbackStep) -> None:
        """Check the states written for a request that gives up its row after `computed` tokens."""

    def check_publish(self, owner: Owner, end: int, block: int) -> None:
        """Check that a block which is published for `end` tokens has been written."""

    def check_end(self, owner: Owner, computed: int) -> None:
        """Check that all that a request has completed is written when it gives up its blocks."""


class RingCells(NamedTuple):
    """One request's part of a `RecomputeStep`."""

    row: int
    source: int
    target: int
    start: int
    history: int
    flush: int


class RecomputeRules(RollbackRules):
    """The rules of scheme `recompute`: states that decodes start from, rings, and flushes."""

    in_blocks = False

    def __init__(self, ledger: Ledger, shadow: Shadow, num_rows: int) -> None:
        super().__init__(ledger, shadow, num_rows)
        spec = shadow.group.spec
        assert isinstance(spec, MambaSpec) and isinstance(spec.rollback, RecomputeSpec)
        # Entries, [row, place].
        self.ring = np.zeros((num_rows, spec.rollback.ring_len, 3), dtype=np.int64)

    def restart(self, row: int) -> None:
        """Empty the ring of a row."""
        self.ring[row] = 0

    def check_step(self, metadata: MambaMetadata, step: TrackedStep) -> None:
        """Check the history of each decode; a prefill leaves its state at its end."""
        ledger = self.ledger
        shadow = self.shadow
        split = metadata.num_decodes
        num_decodes = min(metadata.num_decodes, len(step.owners))
        history = metadata.rollback.history
        if (history is None) != (split == 0):
            ledger.fail(
                "history-length",
                f"{split} decodes, and nothing tells what they recompute",
                None,
                shadow,
            )
        if history is not None:
            if (to_numpy(history.src)[num_decodes:] != NULL_BLOCK).any():
                ledger.fail("pad-row", "padding recomputes a live block", None, shadow)
            self._check_recompute(step.owners[:num_decodes], step.computed, history, step)
        for owner, end in zip(
            step.owners[num_decodes:], step.ends[num_decodes:].tolist(), strict=True
        ):
            owner.flushed = end

    def check_flush(self, owner: Owner, computed: int, step: RollbackStep) -> None:
        """Check that what is flushed is in the request's ring, and due."""
        if step.history is not None:
            self._check_recompute([owner], np.array([computed]), step.history, None)

    def _check_recompute(
        self,
        owners: Sequence[Owner],
        computed: Array,
        recompute: RecomputeStep,
        step: TrackedStep | None,
    ) -> None:
        """Check each decode's state, history and flush, and store its tokens.

        Args:
            computed: [len(owners)], tokens in the cache.
            step: whose tokens go into the ring; None: it only flushes.
        """
        columns = [to_numpy(values)[: len(owners)] for values in recompute[:6]]
        cells = [RingCells(*row) for row in np.stack(columns, axis=1).tolist()]
        for i, (owner, ring_cells) in enumerate(zip(owners, cells, strict=True)):
            self._check_row(owner, ring_cells, int(computed[i]))
            if step is not None:
                first = step.starts[i]
                self._append(owner, ring_cells, step.entries[first : first + step.lengths[i]])

    def _check_row(self, owner: Owner, cells: RingCells, end: int) -> None:
        """Check one request's state, history and flush, with `end` tokens in the cache."""
        ledger = self.ledger
        shadow = self.shadow
        row, source, target, start, history, flush = cells
        assert owner.request is not None
        if row != owner.request.row:
            ledger.fail("ring-row", f"it recomputes row {row}, which is not its own", owner, shadow)
        if not (0 <= source < ledger.num_blocks and 0 <= target < ledger.num_blocks):
            ledger.fail("index-range", f"there is no block {source} or {target}", owner, shadow)
        base = self._check_base(owner, source, end, history)
        if flush > history or base + flush > end:
            problem = f"{flush} tokens are flushed behind {base}, {end} are accepted"
            ledger.fail("flush-unaccepted", problem, owner, shadow, target)
        if base + history != end:
            problem = f"{history} tokens are recomputed behind {base}, {end} are in the cache"
            ledger.fail("history-length", problem, owner, shadow, source)
        places = (start + np.arange(history)) % self.ring.shape[1]
        wrong = np.flatnonzero(self.ring[row, places, HASH] != owner.prefix[base + 1 : end + 1])
        if len(wrong):
            place = int(places[wrong[0]])
            problem = (
                f"token {base + int(wrong[0])} is recomputed from place {place} of the ring, "
                f"which holds {ledger.history.holds(self.ring[row, place])}"
            )
            ledger.fail("read-history", problem, owner, shadow)
        if flush:
            self._check_write(owner, target, base, flush)
            shadow.state[target] = self.ring[row, places[flush - 1]]
        elif source != target:
            problem = f"nothing is flushed, and block {target} is read"
            ledger.fail("read-state", problem, owner, shadow, source)
        owner.flushed = base + flush

    def _append(self, owner: Owner, cells: RingCells, new: Array) -> None:
        """Append the entries of a step's tokens to the ring, which must have room for them."""
        ring_len = self.ring.shape[1]
        history = cells.history
        if history + len(new) > ring_len:
            problem = f"{len(new)} tokens behind {history} do not fit in a ring of {ring_len}"
            self.ledger.fail("ring-full", problem, owner, self.shadow)
        self.ring[cells.row, (cells.start + history + np.arange(len(new))) % ring_len] = new

    def _check_base(self, owner: Owner, source: int, end: int, history: int) -> int:
        """Check the state that a history follows; return how many tokens it has seen."""
        ledger = self.ledger
        shadow = self.shadow
        entry = shadow.state[source]
        base = int(entry[TOKENS])
        if ledger.held[owner.index, source] != shadow.id + 1:
            ledger.fail(
                "read-unheld", "read by a request that does not hold it", owner, shadow, source
            )
        if not base or base > end or entry[HASH] != owner.prefix[base]:
            problem = (
                f"a state is read after {end - history} tokens; it holds "
                f"{ledger.history.holds(entry)}"
            )
            ledger.fail("read-state", problem, owner, shadow, source)
        return base

    def _check_write(self, owner: Owner, target: int, base: int, flush: int) -> None:
        """Check the block for a state that has seen `flush` tokens after `base`."""
        ledger = self.ledger
        shadow = self.shadow
        ledger.log(ledger.step, "flush", shadow, np.array([target]), owner.name)
        if ledger.held[owner.index, target] != shadow.id + 1:
            ledger.fail(
                "flush-unheld",
                "flushed into by a request that does not hold it",
                owner,
                shadow,
                target,
            )
        if ledger.references[target] > 1 or ledger.published[target]:
            ledger.fail(
                "flush-shared", "flushed into though others may read it", owner, shadow, target
            )
        if shadow.keeps_boundaries and 0 < (base + flush) % shadow.block_size < flush:
            problem = (
                f"{flush} tokens are flushed behind {base}: past the end of a block, whose state "
                "is lost"
            )
            ledger.fail("flush-boundary", problem, owner, shadow, target)

    def check_publish(self, owner: Owner, end: int, block: int) -> None:
        """Check that no block is published before its state is written."""
        if owner.flushed < end:
            problem = f"published for {end} tokens, its states have seen {owner.flushed} of them"
            self.ledger.fail("publish-unflushed", problem, owner, self.shadow, block)

    def check_end(self, owner: Owner, computed: int) -> None:
        """Check that no completed block is lost because its state is not written yet."""
        end = computed // self.shadow.block_size * self.shadow.block_size
        if self.shadow.keeps_boundaries and owner.flushed < end:
            problem = (
                f"ends with the state after {end} tokens in its ring, its blocks have that after "
                f"{owner.flushed}"
            )
            self.ledger.fail("finalize-lost", problem, owner, self.shadow)


RULES: dict[str, type[RollbackRules]] = {"recompute": RecomputeRules}


def rollback_rules(ledger: Ledger, shadow: Shadow, num_rows: int) -> RollbackRules:
    """Return the rules of a group's scheme.

    A scheme that is not in `RULES` must keep its states in blocks.
    """
    spec = shadow.group.spec
    scheme = spec.rollback.scheme if isinstance(spec, MambaSpec) else ""
    return RULES.get(scheme, RollbackRules)(ledger, shadow, num_rows)

"""The rules that a rollback scheme adds to those of Mamba layers. The rest of the sanitizer knows no scheme."""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

import numpy as np

from hybrid_kv.attention.mamba import MambaMetadata
from hybrid_kv.attention.rollback import RecomputeSpec, RollbackStep
from hybrid_kv.cache.block_pool import NULL_BLOCK
from hybrid_kv.cache.spec import MambaSpec
from hybrid_kv.kernels.recompute import RecomputeStep
from hybrid_kv.sanitizer.ledger import Ledger
from hybrid_kv.sanitizer.shadow import HASH, TOKENS, Array, Owner, Shadow, Step, to_numpy


class RollbackRules:
    """Of a scheme that adds none, as `slots`: every state is in its block, and `rules_mamba` says the rest.

    Attributes:
        in_blocks: decodes read and leave their states in the blocks that the metadata names; else only windows.
    """

    in_blocks: ClassVar[bool] = True

    def __init__(self, ledger: Ledger, shadow: Shadow, num_rows: int) -> None:
        self.ledger, self.shadow = ledger, shadow

    def restart(self, row: int) -> None:
        """A row of the engine has a new owner."""

    def check_step(self, metadata: MambaMetadata, step: Step) -> None:
        """What the decodes of a step do beside their blocks."""

    def check_flush(self, owner: Owner, computed: int, step: RollbackStep) -> None:
        """What is written for a request that gives up its row after `computed` tokens."""

    def check_publish(self, owner: Owner, end: int, block: int) -> None:
        """Whether a block that is published for `end` tokens has been written."""

    def check_end(self, owner: Owner, computed: int) -> None:
        """Whether all that a request has completed is written when it gives up its blocks."""


class RecomputeRules(RollbackRules):
    """Of scheme `recompute`: the state that a decode starts from, the ring behind it, and what of it is flushed."""

    in_blocks = False

    def __init__(self, ledger: Ledger, shadow: Shadow, num_rows: int) -> None:
        super().__init__(ledger, shadow, num_rows)
        spec = shadow.group.spec
        assert isinstance(spec, MambaSpec) and isinstance(spec.rollback, RecomputeSpec)
        self.ring = np.zeros((num_rows, spec.rollback.ring_len, 3), dtype=np.int64)  # entries, [row, place]

    def restart(self, row: int) -> None:
        """Its ring holds nothing."""
        self.ring[row] = 0

    def check_step(self, metadata: MambaMetadata, step: Step) -> None:
        """What the decodes of a step recompute; a prefill leaves its state at its end."""
        ledger, shadow = self.ledger, self.shadow
        split, num_decodes = metadata.num_decodes, min(metadata.num_decodes, len(step.owners))
        history = metadata.rollback.history
        if (history is None) != (split == 0):
            ledger.fail("history-length", f"{split} decodes, and nothing tells what they recompute", None, shadow)
        if history is not None:
            if (to_numpy(history.src)[num_decodes:] != NULL_BLOCK).any():
                ledger.fail("pad-row", "padding recomputes a live block", None, shadow)
            self._check_recompute(step.owners[:num_decodes], step.computed, history, step)
        for owner, end in zip(step.owners[num_decodes:], step.ends[num_decodes:].tolist(), strict=True):
            owner.flushed = end

    def check_flush(self, owner: Owner, computed: int, step: RollbackStep) -> None:
        """What is flushed must be what the request's ring holds, and due."""
        if step.history is not None:
            self._check_recompute([owner], np.array([computed]), step.history, None)

    def _check_recompute(
        self, owners: Sequence[Owner], computed: Array, recompute: RecomputeStep, step: Step | None
    ) -> None:
        """The state that each decode starts from, its history, what of it is flushed, and where its tokens go.

        Args:
            computed: [len(owners)], tokens in the cache.
            step: whose tokens go into the ring; None: it only flushes.
        """
        ledger, shadow = self.ledger, self.shadow
        rows = np.stack([to_numpy(part)[: len(owners)] for part in recompute[:6]], axis=1).tolist()
        ring, ring_len = self.ring, self.ring.shape[1]
        for i, (owner, (row, source, target, start, history, flush)) in enumerate(zip(owners, rows, strict=True)):
            assert owner.request is not None
            if row != owner.request.row:
                ledger.fail("ring-row", f"it recomputes row {row}, which is not its own", owner, shadow)
            if not (0 <= source < ledger.num_blocks and 0 <= target < ledger.num_blocks):
                ledger.fail("index-range", f"there is no block {source} or {target}", owner, shadow)
            end = int(computed[i])
            base = self._check_base(owner, source, end, history)
            if flush > history or base + flush > end:
                what = f"{flush} tokens are flushed behind {base}, {end} are accepted"
                ledger.fail("flush-unaccepted", what, owner, shadow, target)
            if base + history != end:
                what = f"{history} tokens are recomputed behind {base}, {end} are in the cache"
                ledger.fail("history-length", what, owner, shadow, source)
            places = (start + np.arange(history)) % ring_len
            wrong = np.flatnonzero(ring[row, places, HASH] != owner.prefix[base + 1 : end + 1])
            if len(wrong):
                place = int(places[wrong[0]])
                what = f"token {base + int(wrong[0])} is recomputed from place {place} of the ring, which holds "
                ledger.fail("read-history", what + ledger.history.holds(ring[row, place]), owner, shadow)
            if flush:
                self._check_write(owner, target, base, flush)
                shadow.state[target] = ring[row, places[flush - 1]]
            elif source != target:
                ledger.fail("read-state", f"nothing is flushed, and block {target} is read", owner, shadow, source)
            owner.flushed = base + flush
            if step is None:
                continue
            new = step.entries[step.starts[i] : step.starts[i] + step.lengths[i]]
            if history + len(new) > ring_len:
                what = f"{len(new)} tokens behind {history} do not fit in a ring of {ring_len}"
                ledger.fail("ring-full", what, owner, shadow)
            ring[row, (start + history + np.arange(len(new))) % ring_len] = new

    def _check_base(self, owner: Owner, source: int, end: int, history: int) -> int:
        """The state that a history follows; returns how many tokens it has seen."""
        ledger, shadow = self.ledger, self.shadow
        entry = shadow.state[source]
        base = int(entry[TOKENS])
        if ledger.held[owner.index, source] != shadow.id + 1:
            ledger.fail("read-unheld", "read by a request that does not hold it", owner, shadow, source)
        if not base or base > end or entry[HASH] != owner.prefix[base]:
            what = f"a state is read after {end - history} tokens; it holds {ledger.history.holds(entry)}"
            ledger.fail("read-state", what, owner, shadow, source)
        return base

    def _check_write(self, owner: Owner, target: int, base: int, flush: int) -> None:
        """Where a state goes that has seen `flush` tokens behind `base`."""
        ledger, shadow = self.ledger, self.shadow
        ledger.log(ledger.step, "flush", shadow, np.array([target]), owner.name)
        if ledger.held[owner.index, target] != shadow.id + 1:
            ledger.fail("flush-unheld", "flushed into by a request that does not hold it", owner, shadow, target)
        if ledger.references[target] > 1 or ledger.published[target]:
            ledger.fail("flush-shared", "flushed into though others may read it", owner, shadow, target)
        if shadow.keeps_boundaries and 0 < (base + flush) % shadow.block_size < flush:
            what = f"{flush} tokens are flushed behind {base}: past the end of a block, whose state is lost"
            ledger.fail("flush-boundary", what, owner, shadow, target)

    def check_publish(self, owner: Owner, end: int, block: int) -> None:
        """No block is published before its state is written."""
        if owner.flushed < end:
            what = f"published for {end} tokens, its states have seen {owner.flushed} of them"
            self.ledger.fail("publish-unflushed", what, owner, self.shadow, block)

    def check_end(self, owner: Owner, computed: int) -> None:
        """No block that a request has completed may be lost because its state is not written yet."""
        end = computed // self.shadow.block_size * self.shadow.block_size
        if self.shadow.keeps_boundaries and owner.flushed < end:
            what = f"ends with the state after {end} tokens in its ring, its blocks have that after {owner.flushed}"
            self.ledger.fail("finalize-lost", what, owner, self.shadow)


RULES: dict[str, type[RollbackRules]] = {"recompute": RecomputeRules}


def rollback_rules(ledger: Ledger, shadow: Shadow, num_rows: int) -> RollbackRules:
    """Those of a group's scheme. One that is not in `RULES` must keep its states in blocks."""
    spec = shadow.group.spec
    scheme = spec.rollback.scheme if isinstance(spec, MambaSpec) else ""
    return RULES.get(scheme, RollbackRules)(ledger, shadow, num_rows)

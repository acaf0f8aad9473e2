"""The rules of Mamba layers: which windows and states a step reads and leaves, and copies of boundary states."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import torch

from hybrid_kv.attention.mamba import BoundaryCopies, MambaMetadata
from hybrid_kv.cache.block_pool import NULL_BLOCK
from hybrid_kv.cache.spec import MambaSpec
from hybrid_kv.sanitizer.ledger import Ledger
from hybrid_kv.sanitizer.rules_rollback import RollbackRules
from hybrid_kv.sanitizer.shadow import HASH, Array, Shadow, Step, to_numpy


def check_mamba(ledger: Ledger, shadow: Shadow, metadata: MambaMetadata, step: Step, rollback: RollbackRules) -> None:
    """A step of a Mamba group; its states are read before they are written."""
    num_rows = len(step.owners)
    windows, sources, states = (
        to_numpy(part) for part in (metadata.window_indices, metadata.source_indices, metadata.state_indices)
    )
    for part in (windows, sources, *states.T):
        if (part[num_rows:] != NULL_BLOCK).any():
            ledger.fail("pad-row", f"padding has the blocks {part[num_rows:].tolist()}", None, shadow)
        ledger.check_range(shadow, step.all_rows, part[:num_rows])
    parts = [part.lengths for part in (metadata.decode_rows, metadata.prefill_rows) if part is not None]
    ledger.check_lengths(shadow, parts, step)
    _check_reads(ledger, shadow, metadata, windows, sources, step, 0 if rollback.in_blocks else metadata.num_decodes)
    rollback.check_step(metadata, step)
    _check_writes(ledger, shadow, metadata, states[:num_rows], step, rollback.in_blocks)


def _check_reads(
    ledger: Ledger,
    shadow: Shadow,
    metadata: MambaMetadata,
    windows: Array,
    sources: Array,
    step: Step,
    first_source: int,
) -> None:
    """All rows read windows, those from `first_source` on states."""
    split, num_rows = metadata.num_decodes, len(step.owners)
    initial = np.ones(num_rows, dtype=bool)
    if metadata.has_initial_state is not None:
        initial[split:] = to_numpy(metadata.has_initial_state)
    text = "at position {}, a row has an initial state: {}"
    ok = initial == (step.computed > 0)
    args = step.all_rows, sources[:num_rows], text, step.computed, initial
    ledger.require(ok, "initial-state", shadow, *args)
    rows = np.flatnonzero(initial)
    # Out of range is an error also where the value will be dropped.
    first = to_numpy(metadata.window_rows)
    if (wrong := first[(first < 0) | (first >= shadow.cells.shape[1])]).size:
        ledger.fail("index-range", f"a window begins at row {wrong[0]}", None, shadow)
    windows, sources, first = windows[rows], sources[rows], first[rows]
    begin, computed = step.begin[rows], step.computed[rows]
    cells, state = shadow.cells[windows, first], shadow.state[sources]
    text = "row {2} of a window is read after {1} tokens; it holds {0}"
    ledger.check_reads("read-window", shadow, rows, windows, cells, begin, text, cells, computed, first)
    later = rows >= first_source
    text = "a state is read after {1} tokens; it holds {0}"
    where = rows[later], sources[later], state[later], begin[later]
    ledger.check_reads("read-state", shadow, *where, text, state[later], computed[later])


def _check_writes(
    ledger: Ledger, shadow: Shadow, metadata: MambaMetadata, states: Array, step: Step, in_blocks: bool
) -> None:
    """A decode leaves a state after each token; a prefill after its last, and at the boundaries that it passes.

    Unless `in_blocks` a decode leaves none, but the windows of its tokens, in the block where they begin.
    """
    split, num_rows, every = metadata.num_decodes, len(step.owners), step.all_rows
    counts = np.where(every < split, step.lengths if in_blocks else 1, 1)
    owned = np.arange(states.shape[1]) < counts[:, None]
    ok = (counts <= states.shape[1]) & (owned | (states == NULL_BLOCK)).all(1)
    text = "the states of {} tokens go to the {}"
    rows = np.fromiter(states.tolist(), dtype=object)  # an entry of its own for each, printed if need be
    ledger.require(ok, "write-padding", shadow, every, states[:, -1], text, counts, rows)
    rows, drafts = np.nonzero(owned)
    tokens = step.starts[rows] + np.where(rows < split, drafts, step.lengths[rows] - 1)
    targets, current_blocks = states[owned], states[rows, 0]
    stateless = (rows < split) & (not in_blocks)
    if metadata.boundaries is not None:
        more, offsets, homes = map(to_numpy, metadata.boundaries)
        more = split + more
        inside = np.clip(more, split, num_rows - 1)
        ok = (more == inside) & (offsets > 0) & (offsets <= step.lengths[inside])
        ledger.require(ok, "index-range", shadow, inside, homes, "a boundary {} tokens into the row", offsets)
        added = more, np.zeros_like(more), step.starts[more] + offsets - 1, homes, homes
        rows, drafts, tokens, targets, current_blocks = map(
            np.concatenate, zip((rows, drafts, tokens, targets, current_blocks), added, strict=True)
        )
        stateless = np.concatenate([stateless, np.zeros(len(more), dtype=bool)])
        ledger.check_range(shadow, rows, targets)
    ledger.check_writes(shadow, rows, targets, step)
    before = shadow.state[targets[stateless]]
    ledger.check_once(shadow, rows, targets, shadow.state, targets)
    shadow.state[targets] = step.entries[tokens]
    shadow.state[targets[stateless]] = before  # only their windows
    shadow.cells[current_blocks] = 0
    shadow.cells[current_blocks, drafts] = step.entries[tokens]
    for row in range(0 if in_blocks else min(split, num_rows)):
        window = step.entries[step.starts[row] : step.starts[row] + step.lengths[row]]
        shadow.cells[states[row, 0], : len(window)] = window
    ledger.log_rows("write", shadow, rows, targets)


def expect_copy(
    ledger: Ledger,
    shadow: Shadow,
    copies: BoundaryCopies,
    block_table: torch.Tensor,
    layers: Sequence[tuple[torch.Tensor, ...]],
    copies_states: bool,
) -> Callable[[Step], None]:
    """What must become of the boundary states of a group that will be copied; see `EngineObserver.on_copy`.

    Returns:
        Its check, to be called with the step once it is known which drafts were accepted.
    """
    table, every = to_numpy(block_table).astype(np.int64), np.stack([to_numpy(part) for part in copies])
    # Those of rejected drafts are copies of a block to itself.
    rows, current_blocks, drafts, logical_blocks = every[:, every[1] + every[2] != every[3]]
    home, window = table[rows, logical_blocks], table[rows, current_blocks]
    state = table[rows, current_blocks + drafts] if copies_states else None
    spec = shadow.group.spec
    assert isinstance(spec, MambaSpec)
    contents = []  # views, and what they must hold at `home`
    for parts in layers:
        for part, kept in zip(spec.parts, parts, strict=True):
            if part.role == "window":
                size = kept.shape[1] - spec.num_speculative_tokens
                taps = torch.from_numpy(drafts[:, None] + np.arange(size))
                contents.append((kept[:, :size], kept[torch.from_numpy(window)[:, None], taps]))
            elif state is not None:
                contents.append((kept, kept[torch.from_numpy(state)]))
    ends = (logical_blocks + 1) * shadow.block_size

    def check(step: Step) -> None:
        owners = [step.owners[row] for row in rows.tolist()]
        accepted = np.array([owner.computed for owner in owners])
        text = "gets the state after {} tokens, {} are accepted"
        ledger.require(ends <= accepted, "copy-rejected", shadow, rows, home, text, ends, accepted)
        ledger.check_writes(shadow, rows, home, step)
        held = {"window": shadow.cells[window, drafts]}
        if state is not None:
            held["state"] = shadow.state[state]
        expected = [owner.prefix[end] for owner, end in zip(owners, ends.tolist(), strict=True)]
        for what, entries in held.items():
            text = f"gets a {what} for the end of token {{1}} that holds {{0}}"
            ledger.require(entries[:, HASH] == expected, "copy-state", shadow, rows, home, text, entries, ends - 1)
        for view, content in contents:
            same = to_numpy((view[torch.from_numpy(home)] == content).flatten(1).all(1))
            ledger.require(same, "copy-bytes", shadow, rows, home, "the copy did not arrive in every layer")
        shadow.cells[home] = 0
        shadow.cells[home, 0] = held["window"]
        shadow.state[home] = held.get("state", shadow.state[home])
        ledger.log_rows("copy", shadow, rows, home)

    return check

"""The rules of Mamba layers: windows and states that a step reads and leaves, and their copies."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import torch

from hybrid_kv.attention.mamba import BoundaryCopies, MambaMetadata
from hybrid_kv.cache.block_pool import NULL_BLOCK
from hybrid_kv.cache.spec import MambaSpec
from hybrid_kv.sanitizer.ledger import Ledger
from hybrid_kv.sanitizer.rules_rollback import RollbackRules
from hybrid_kv.sanitizer.shadow import HASH, Array, Shadow, TrackedStep, to_numpy


def check_mamba(
    ledger: Ledger,
    shadow: Shadow,
    metadata: MambaMetadata,
    step: TrackedStep,
    rollback: RollbackRules,
) -> None:
    """Check a step of a Mamba group; its states are read before they are written."""
    num_rows = len(step.owners)
    windows, sources, states = (
        to_numpy(indices)
        for indices in (metadata.window_indices, metadata.source_indices, metadata.state_indices)
    )
    for blocks in (windows, sources, *states.T):
        padding = blocks[num_rows:]
        if (padding != NULL_BLOCK).any():
            ledger.fail("pad-row", f"padding has the blocks {padding.tolist()}", None, shadow)
        ledger.check_range(shadow, step.all_rows, blocks[:num_rows])
    kinds = (metadata.decode_rows, metadata.prefill_rows)
    ledger.check_lengths(shadow, [rows.lengths for rows in kinds if rows is not None], step)
    _check_reads(
        ledger,
        shadow,
        metadata,
        windows,
        sources,
        step,
        0 if rollback.in_blocks else metadata.num_decodes,
    )
    rollback.check_step(metadata, step)
    _check_writes(ledger, shadow, metadata, states[:num_rows], step, rollback.in_blocks)


def _check_reads(
    ledger: Ledger,
    shadow: Shadow,
    metadata: MambaMetadata,
    windows: Array,
    sources: Array,
    step: TrackedStep,
    first_source: int,
) -> None:
    """Check the windows that all rows read, and the states of those from `first_source` on."""
    split = metadata.num_decodes
    num_rows = len(step.owners)
    initial = np.ones(num_rows, dtype=bool)
    if metadata.has_initial_state is not None:
        initial[split:] = to_numpy(metadata.has_initial_state)
    template = "at position {}, a row has an initial state: {}"
    ok = initial == (step.computed > 0)
    args = step.all_rows, sources[:num_rows], template, step.computed, initial
    ledger.require(ok, "initial-state", shadow, *args)
    rows = np.flatnonzero(initial)
    # Out of range is an error also where the value will be dropped.
    first = to_numpy(metadata.window_rows)
    wrong = first[(first < 0) | (first >= shadow.cells.shape[1])]
    if wrong.size:
        ledger.fail("index-range", f"a window begins at row {wrong[0]}", None, shadow)
    windows = windows[rows]
    sources = sources[rows]
    first = first[rows]
    begin = step.begin[rows]
    computed = step.computed[rows]
    cells = shadow.cells[windows, first]
    state = shadow.state[sources]
    template = "row {2} of a window is read after {1} tokens; it holds {0}"
    ledger.check_reads(
        "read-window", shadow, rows, windows, cells, begin, template, cells, computed, first
    )
    later = rows >= first_source
    template = "a state is read after {1} tokens; it holds {0}"
    where = rows[later], sources[later], state[later], begin[later]
    ledger.check_reads("read-state", shadow, *where, template, state[later], computed[later])


def _check_writes(
    ledger: Ledger,
    shadow: Shadow,
    metadata: MambaMetadata,
    states: Array,
    step: TrackedStep,
    in_blocks: bool,
) -> None:
    """Check the states that a step leaves.

    A decode leaves one after each token; a prefill after its last, and at the boundaries that it
    passes.

    Unless `in_blocks` a decode leaves none, but the windows of its tokens, in the block where they
    begin.
    """
    split = metadata.num_decodes
    num_rows = len(step.owners)
    every = step.all_rows
    counts = np.where(every < split, step.lengths if in_blocks else 1, 1)
    owned = np.arange(states.shape[1]) < counts[:, None]
    ok = (counts <= states.shape[1]) & (owned | (states == NULL_BLOCK)).all(1)
    template = "the states of {} tokens go to the {}"
    # An entry of its own for each, printed if need be.
    rows = np.fromiter(states.tolist(), dtype=object)
    ledger.require(ok, "write-padding", shadow, every, states[:, -1], template, counts, rows)
    rows, drafts = np.nonzero(owned)
    tokens = step.starts[rows] + np.where(rows < split, drafts, step.lengths[rows] - 1)
    targets = states[owned]
    window_blocks = states[rows, 0]
    stateless = (rows < split) & (not in_blocks)
    if metadata.boundaries is not None:
        more, offsets, homes = map(to_numpy, metadata.boundaries)
        more = split + more
        inside = np.clip(more, split, num_rows - 1)
        ok = (more == inside) & (offsets > 0) & (offsets <= step.lengths[inside])
        ledger.require(
            ok, "index-range", shadow, inside, homes, "a boundary {} tokens into the row", offsets
        )
        added = more, np.zeros_like(more), step.starts[more] + offsets - 1, homes, homes
        rows, drafts, tokens, targets, window_blocks = map(
            np.concatenate, zip((rows, drafts, tokens, targets, window_blocks), added, strict=True)
        )
        stateless = np.concatenate([stateless, np.zeros(len(more), dtype=bool)])
        ledger.check_range(shadow, rows, targets)
    ledger.check_writes(shadow, rows, targets, step)
    before = shadow.state[targets[stateless]]
    ledger.check_once(shadow, rows, targets, shadow.state, targets)
    shadow.state[targets] = step.entries[tokens]
    shadow.state[targets[stateless]] = before  # only their windows
    shadow.cells[window_blocks] = 0
    shadow.cells[window_blocks, drafts] = step.entries[tokens]
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
) -> Callable[[TrackedStep], None]:
    """Return the check of the boundary states of a group that will be copied.

    See `EngineObserver.on_copy`.

    Returns:
        Its check, to be called with the step once it is known which drafts were accepted.
    """
    table = to_numpy(block_table).astype(np.int64)
    every = np.stack([*map(to_numpy, copies)])
    # Those of rejected drafts are copies of a block to itself.
    rows, state_block_idx, token_idx, logical_blocks = every[:, every[1] + every[2] != every[3]]
    home = table[rows, logical_blocks]
    window = table[rows, state_block_idx]
    state = table[rows, state_block_idx + token_idx] if copies_states else None
    spec = shadow.group.spec
    assert isinstance(spec, MambaSpec)
    contents = []  # views, and what they must hold at `home`
    for parts in layers:
        for state_part, kept in zip(spec.parts, parts, strict=True):
            if state_part.role == "window":
                size = kept.shape[1] - spec.num_speculative_tokens
                taps = torch.from_numpy(token_idx[:, None] + np.arange(size))
                contents.append((kept[:, :size], kept[torch.from_numpy(window)[:, None], taps]))
            elif state is not None:
                contents.append((kept, kept[torch.from_numpy(state)]))
    ends = (logical_blocks + 1) * shadow.block_size

    def check(step: TrackedStep) -> None:
        owners = [step.owners[row] for row in rows.tolist()]
        accepted = np.array([owner.computed for owner in owners])
        template = "gets the state after {} tokens, {} are accepted"
        ledger.require(
            ends <= accepted, "copy-rejected", shadow, rows, home, template, ends, accepted
        )
        ledger.check_writes(shadow, rows, home, step)
        held = {"window": shadow.cells[window, token_idx]}
        if state is not None:
            held["state"] = shadow.state[state]
        expected = [owner.prefix[end] for owner, end in zip(owners, ends.tolist(), strict=True)]
        for kind, entries in held.items():
            template = f"gets a {kind} for the end of token {{1}} that holds {{0}}"
            ledger.require(
                entries[:, HASH] == expected,
                "copy-state",
                shadow,
                rows,
                home,
                template,
                entries,
                ends - 1,
            )
        for view, content in contents:
            same = to_numpy((view[torch.from_numpy(home)] == content).flatten(1).all(1))
            ledger.require(
                same, "copy-bytes", shadow, rows, home, "the copy did not arrive in every layer"
            )
        shadow.cells[home] = 0
        shadow.cells[home, 0] = held["window"]
        shadow.state[home] = held.get("state", shadow.state[home])
        ledger.log_rows("copy", shadow, rows, home)

    return check

"""The rules of attention layers: the slots that a step and a drafting head write and read."""

from __future__ import annotations

import numpy as np
import torch

from hybrid_kv.attention.paged import AttentionPart, PagedAttentionMetadata
from hybrid_kv.cache.block_pool import NULL_BLOCK
from hybrid_kv.cache.spec import window_of
from hybrid_kv.sanitizer.ledger import Ledger
from hybrid_kv.sanitizer.shadow import HASH, Array, Shadow, TrackedStep, to_numpy


def check_attention(
    ledger: Ledger, shadow: Shadow, metadata: PagedAttentionMetadata, step: TrackedStep
) -> None:
    """Check a step of an attention group; its tokens are written before they are read."""
    size = shadow.block_size
    kernel_size = shadow.group.kernel_block_size
    rows = step.rows
    slots, padding = np.split(to_numpy(metadata.slot_mapping.slots), [len(rows)])
    if (padding >= 0).any():
        ledger.fail("pad-slot", f"padding has the slots {padding.tolist()}", None, shadow)
    blocks = slots // size
    entries = shadow.slots
    ledger.check_range(shadow, rows, blocks)
    ledger.check_writes(shadow, rows, blocks, step)
    ledger.check_once(shadow, rows, blocks, entries, slots)
    entries[slots] = step.entries
    ledger.log_rows("write", shadow, rows, blocks)

    ledger.check_lengths(shadow, [segment.rows.lengths for segment in metadata.parts], step)
    given = np.concatenate(
        [to_numpy(segment.rows.flat(segment.positions)) for segment in metadata.parts]
    )[: len(rows)]
    template = "attention is given position {} and not {}"
    ledger.require(
        given == step.positions, "position", shadow, rows, blocks, template, given, step.positions
    )
    table = np.concatenate([to_numpy(segment.block_table) for segment in metadata.parts]).astype(
        np.int64
    )
    if table.shape[1] * kernel_size < step.ends.max():
        problem = (
            f"{table.shape[1]} logical blocks of {kernel_size} tokens for a row of "
            f"{step.ends.max()}"
        )
        ledger.fail("index-range", problem, None, shadow)
    if ((table[len(step.owners) :] * kernel_size) // size != NULL_BLOCK).any():
        ledger.fail("pad-row", "a padding row of the block table has live blocks", None, shadow)
    rows = step.seen_rows
    positions = step.seen_positions
    expected = step.seen
    window = window_of(shadow.group.spec)
    if window is not None:
        first = _check_window(ledger, shadow, metadata, window, step)
        in_window = positions >= first[rows]
        rows, positions, expected = rows[in_window], positions[in_window], expected[in_window]
    slots = table[rows, positions // kernel_size] * kernel_size + positions % kernel_size
    blocks = slots // size
    ledger.check_range(shadow, rows, blocks)
    template = "position {} is read from slot {}, which holds {}"
    seen = entries[slots]
    ledger.check_reads(
        "read-slot", shadow, rows, blocks, seen, expected, template, positions, slots, seen
    )


def _check_window(
    ledger: Ledger,
    shadow: Shadow,
    metadata: PagedAttentionMetadata,
    window: int,
    step: TrackedStep,
) -> Array:
    """Check where each row begins to read; return that position of each row of the batch."""
    parts = metadata.parts
    starts = [
        np.zeros(len(segment.positions), dtype=np.int64)
        if segment.window is None
        else to_numpy(segment.first)
        for segment in parts
    ]
    first = np.concatenate(starts)[: len(step.owners)]
    due = np.maximum(step.computed - window + 1, 0)
    template = "it is read from position {} on, its window begins at {}"
    ledger.require(first == due, "window-start", shadow, step.all_rows, None, template, first, due)
    return first


def check_drafts(
    ledger: Ledger,
    shadow: Shadow,
    rows: Array,
    at: torch.Tensor,
    slots: torch.Tensor,
    step: TrackedStep,
) -> None:
    """Check the writes of a drafting head for `rows` of the batch; drafts are not verified yet."""
    places = to_numpy(slots)
    real = places >= 0
    rows = rows[real]
    positions = to_numpy(at)[real]
    places = places[real]
    blocks = places // shadow.block_size
    ledger.check_range(shadow, rows, blocks)
    ledger.check_writes(shadow, rows, blocks, step)
    template = "a head writes position {} into slot {}, which holds {}"
    same = places % shadow.block_size == positions % shadow.block_size
    ledger.require(
        same, "draft-slot", shadow, rows, blocks, template, positions, places, shadow.slots[places]
    )
    # Of tokens that the target has computed it is the target's slot.
    known = positions < step.ends[rows]
    rows = rows[known]
    positions = positions[known]
    places = places[known]
    pairs = zip(rows.tolist(), positions.tolist(), strict=True)
    expected = np.array([step.owners[row].prefix[position + 1] for row, position in pairs])
    held = shadow.slots[places]
    same = held[:, HASH] == expected
    ledger.require(
        same,
        "draft-slot",
        shadow,
        rows,
        places // shadow.block_size,
        template,
        positions,
        places,
        held,
    )


def check_block(
    ledger: Ledger, shadow: Shadow, rows: Array, segment: AttentionPart, step: TrackedStep
) -> None:
    """Check what the queries of a block drafter read of tokens before their own.

    Args:
        rows: [num_requests], of the batch.
        segment: the queries, of each request one of its last token and K of masks.
    """
    kernel_size = shadow.group.kernel_block_size
    begins = to_numpy(segment.positions)[:, 0]
    window = window_of(shadow.group.spec)
    due = np.zeros_like(begins) if window is None else np.maximum(begins - window + 1, 0)
    if window is not None:
        first = np.zeros_like(due) if segment.window is None else to_numpy(segment.first)
        template = "a block drafter reads it from position {} on, its window begins at {}"
        ledger.require(first == due, "window-start", shadow, rows, None, template, first, due)
    spans = [np.arange(start, end) for start, end in zip(due, begins, strict=True)]
    positions = np.concatenate(spans)
    places = np.repeat(np.arange(len(rows)), begins - due)
    of_tokens = rows[places]
    table = to_numpy(segment.block_table).astype(np.int64)
    slots = table[places, positions // kernel_size] * kernel_size + positions % kernel_size
    pairs = zip(of_tokens.tolist(), positions.tolist(), strict=True)
    expected = np.array([step.owners[row].prefix[position + 1] for row, position in pairs])
    seen = shadow.slots[slots]
    template = "a block drafter reads position {} from slot {}, which holds {}"
    blocks = slots // shadow.block_size
    ledger.check_reads(
        "read-slot", shadow, of_tokens, blocks, seen, expected, template, positions, slots, seen
    )

"""Runs a multi-token-prediction head after the target: K passes of one small layer in every step.

The first pass runs over all tokens that the step computed, since the head needs its own K and V of
them; it also replaces what earlier passes wrote for drafts, with the target's hidden states in
place of the head's. Only the last token that a request keeps attends and is drafted from. Each
further pass takes the head's output and its draft one position on. A step that proposes nothing
still runs the first pass: later ones read what it writes.

The host does not know what was accepted when it starts the passes: all shapes follow from what was
scheduled, and what is computed after a rejected draft is replaced before it is read.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import numpy as np
import numpy.typing as npt
import torch

from hybrid_kv.attention.paged import AttentionPart, Compute, PagedAttentionMetadata, SlotMapping
from hybrid_kv.cache.backend import AttentionGroup
from hybrid_kv.cache.block_table import BlockTables
from hybrid_kv.cache.spec import window_of
from hybrid_kv.kernels.common.ragged import Ragged
from hybrid_kv.kernels.common.upload import Staged
from hybrid_kv.kernels.slot_mapping import PAD_SLOT
from hybrid_kv.models.interface import DraftHead
from hybrid_kv.models.layers import ForwardContext
from hybrid_kv.observe import EngineObserver
from hybrid_kv.request import ScheduledRequest

Ints = npt.NDArray[np.int64]


class Drafter(Protocol):
    """Runs a head of the checkpoint, after the target in each step."""

    def stage(
        self, batch: Sequence[ScheduledRequest], token_rows: Ints, positions: Ints, num_drafts: int
    ) -> Staged[Any]:
        """Stage the inputs of drafting that the host knows before the step.

        Args:
            token_rows, positions: [num_tokens], of the batch.
            num_drafts: K of this step.
        """

    def propose(
        self,
        step: Any,
        hidden: torch.Tensor,
        context: ForwardContext,
        sampled: torch.Tensor | None,
        rows: torch.Tensor | None,
        accepted: torch.Tensor | None,
    ) -> torch.Tensor | None:
        """Return drafts [num_requests, K] int64 of those that sample, on their device.

        None if there are none, of a prefill or with K = 0: then too K and V are written.

        Args:
            step: what `stage` staged.
            hidden: [num_tokens or more, hidden_size], the target's.
            context: of the target's step.
            sampled, rows: the drawn tokens, and whose of the batch's tokens they follow; None: of
                all of them.
            accepted: how many drafts of each reader; None: it had none.
        """


def draft_slots(
    block_tables: BlockTables,
    group_id: int,
    rows: torch.Tensor,
    positions: torch.Tensor,
    max_model_len: int | None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return position and slot [num_tokens] of each token that a head writes.

    One at the end of its row's room gets no slot and a position inside it: its draft is worthless,
    those of the other rows must not be (vllm#58080).

    Args:
        rows, positions: [num_tokens] int64, of the engine and in them.
        max_model_len: the room of a row; None: no token lies beyond it.
    """
    if max_model_len is None:
        return positions, block_tables.slots_of(group_id, rows, positions)
    place = positions.clamp(max=max_model_len - 1)
    slots = block_tables.slots_of(group_id, rows, place)
    return place, slots.masked_fill(positions >= max_model_len, PAD_SLOT)


class Drafting(NamedTuple):
    """A step's tokens and its *readers*, the requests that are drafted for.

    Their drafts of the step before are not verified yet. Token t of the batch makes the pair at the
    position after it. T tokens, n readers, K passes.

    Attributes:
        queried: [T + (K - 1) * n], whose token in the batch each is, on the host.
        longest: tokens of the longest reader after the first pass, if all of its drafts are
            accepted.
        fits: no token can lie beyond its row's room.
        num_drafts: that the step proposes for each reader; with K = 0 the first pass runs all the
            same.
        next_ids, positions: [T], of the pairs; ids that the step samples are not known yet.
        token_rows: [T + (K - 1) * n], of the engine.
        ends: [n], of the first token that each reader samples; the drafts that are accepted follow.
        readers: [n], in the batch.
        further: [K - 1, 1], how many positions after the last pair.
    """

    queried: Ints
    longest: int
    fits: bool
    num_drafts: int
    next_ids: torch.Tensor
    positions: torch.Tensor
    token_rows: torch.Tensor
    ends: torch.Tensor
    readers: torch.Tensor
    further: torch.Tensor


@dataclass(frozen=True, eq=False)
class MTPDrafter:
    """Proposes drafts for every request that samples.

    Attributes:
        group: the attention group that the head's layer joined.
        token_ids: the runner's rows.
        compute: of the group's attention.
        observers: notified where K and V will go.
    """

    head: DraftHead
    group: AttentionGroup
    views: dict[str, tuple[torch.Tensor, ...]]
    block_tables: BlockTables
    token_ids: Ints
    max_model_len: int
    compute: Compute
    observers: Sequence[EngineObserver]

    def stage(
        self,
        batch: Sequence[ScheduledRequest],
        token_rows: Ints,
        positions: Ints,
        num_drafts: int,
    ) -> Staged[Drafting]:
        """Stage what the host knows before the step; see `Drafter`."""
        lengths = np.array([item.num_tokens for item in batch])
        # If nobody samples, K and V are written with any reader.
        readers = np.array([i for i, item in enumerate(batch) if item.samples] or [0])
        lasts = np.cumsum(lengths)[readers] - 1
        ends = lasts - np.array([item.num_drafts for item in batch])[readers]
        passes = max(0, num_drafts - 1)  # after the first
        queried = np.concatenate(
            [np.repeat(np.arange(len(batch)), lengths), np.tile(readers, passes)]
        )
        all_rows = np.concatenate([token_rows, np.tile(token_rows[lasts], passes)])
        known = (
            queried,
            int(positions[lasts].max()) + 2,
            bool(positions.max() + 1 + passes < self.max_model_len),
            num_drafts,
        )
        pairs = self.token_ids[token_rows, positions + 1], positions + 1
        arrays = *pairs, all_rows, ends, readers, np.arange(1, 1 + passes)[:, None]
        return arrays, lambda *moved: Drafting(*known, *moved)

    def propose(
        self,
        step: Drafting,
        hidden: torch.Tensor,
        context: ForwardContext,
        sampled: torch.Tensor | None,
        rows: torch.Tensor | None,
        accepted: torch.Tensor | None,
    ) -> torch.Tensor | None:
        """Return the drafts; see `Drafter`."""
        next_ids = step.next_ids
        if sampled is not None:
            next_ids = sampled if rows is None else next_ids.index_copy_(0, rows, sampled)
        wanted = step.ends if accepted is None else step.ends + accepted
        # Slots of all passes at once: every pair of the first, then pass by pass the next one of
        # each reader.
        positions = torch.cat([step.positions, (step.positions[wanted] + step.further).flatten()])
        all_places, all_slots = self.write_slots(step.token_rows, positions, step.fits)
        for observer in self.observers:
            observer.on_draft(self.group.group_id, step.queried, positions, all_slots)
        num_readers = len(wanted)
        counts = [len(next_ids)] + [num_readers] * len(step.further)
        places = all_places.split(counts)
        slots = all_slots.split(counts)
        queries = Ragged(torch.ones(num_readers, dtype=torch.int64), hidden.device)
        table = self.block_tables.input_tables[self.group.group_id][step.readers]

        window = window_of(self.group.spec)
        out = self.head.normed(hidden[: len(next_ids)])
        drafts = list[torch.Tensor]()
        for i in range(len(counts)):
            place = places[i] if i else places[0][wanted]
            num_keys = min(step.longest + i, self.max_model_len)
            segment = AttentionPart(
                0,
                num_readers,
                queries,
                place.unsqueeze(1),
                table,
                num_keys if window is None else min(num_keys, window),
                self.compute,
                window,
            )
            metadata = PagedAttentionMetadata(SlotMapping(slots[i]), (segment,), places[i])
            mine = ForwardContext(dict.fromkeys(self.head.layer_specs, metadata), self.views)
            out = self.head(out, drafts[-1], mine) if i else self.head(out, next_ids, mine, wanted)
            if sampled is None or not step.num_drafts:
                return None
            drafts.append(self.head.compute_logits(out).argmax(-1))
        return torch.stack(drafts, dim=1)

    def write_slots(
        self, rows: torch.Tensor, positions: torch.Tensor, fit: bool
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return position and slot of each token (`draft_slots`); `fit`: all are in their rows."""
        room = None if fit else self.max_model_len
        return draft_slots(self.block_tables, self.group.group_id, rows, positions, room)

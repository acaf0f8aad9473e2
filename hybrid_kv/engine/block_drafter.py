"""Runs a block drafter after the target: one pass, K drafts at once (DFlash, DSpark).

The head reads K and V of the target's hidden states, so that its layers are written as any layer
of the target is: those of each token of each step, in the step's own slots. Its groups are windows
like others, they take part in hits, and a hit is as good for the head as for the target. A step
that proposes nothing writes them all the same.

The queries are the last token and K masks, at the positions after the accepted tokens. Their K and
V lie in the slots there, over those of rejected drafts, until the next steps' tokens replace them:
no query reads a position before its request's last token that no step has computed.

The host does not know what was accepted when it starts the pass: all shapes follow from what was
scheduled.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch

from hybrid_kv.attention.paged import AttentionPart, Compute, PagedAttentionMetadata, SlotMapping
from hybrid_kv.cache.backend import AttentionGroup
from hybrid_kv.cache.block_table import BlockTables
from hybrid_kv.cache.spec import layer_specs, window_of
from hybrid_kv.engine.drafter import Ints, draft_slots
from hybrid_kv.kernels.common.ragged import Ragged
from hybrid_kv.kernels.common.upload import Staged
from hybrid_kv.models.interface import BlockDraftHead
from hybrid_kv.models.layers import ForwardContext
from hybrid_kv.observe import EngineObserver
from hybrid_kv.request import ScheduledRequest


class BlockDrafting(NamedTuple):
    """A step's *readers*, the requests that are drafted for: n of them.

    Attributes:
        queried: [n * (1 + K)], whose query in the batch each is, on the host.
        longest: tokens of the longest reader with its last query, if all of its drafts are
            accepted.
        fits: no query can lie beyond its row's room.
        num_drafts: K, that the step proposes for each reader; 0: no pass runs.
        positions: [num_tokens], of the step's tokens.
        query_rows: [n * (1 + K)], of the engine.
        ends, samples: [n], the token of the step that each reader samples after first, and the
            place of what it samples; the drafts that are accepted follow.
        readers: [n], in the batch.
        further: [1 + K], how many positions after its last accepted token a reader's queries are.
    """

    queried: Ints
    longest: int
    fits: bool
    num_drafts: int
    positions: torch.Tensor
    query_rows: torch.Tensor
    ends: torch.Tensor
    samples: torch.Tensor
    readers: torch.Tensor
    further: torch.Tensor


@dataclass(frozen=True, eq=False)
class BlockDrafter:
    """Proposes K drafts for every request that samples, in one pass.

    Attributes:
        groups: the attention groups that the head's layers joined, with how each is computed.
    """

    head: BlockDraftHead
    groups: Sequence[tuple[AttentionGroup, Compute]]
    views: dict[str, tuple[torch.Tensor, ...]]
    block_tables: BlockTables
    max_model_len: int
    observers: Sequence[EngineObserver]

    def stage(
        self,
        batch: Sequence[ScheduledRequest],
        token_rows: Ints,
        positions: Ints,
        num_drafts: int,
    ) -> Staged[BlockDrafting]:
        """Stage what the host knows before the step; see `Drafter`."""
        readers = np.array([i for i, item in enumerate(batch) if item.samples], dtype=np.int64)
        lasts = np.cumsum([item.num_tokens for item in batch])[readers] - 1
        counts = np.array([item.num_drafts for item in batch], dtype=np.int64)[readers]
        rows = token_rows[lasts]
        further = np.arange(1, 2 + num_drafts)
        longest = int(positions[lasts].max(initial=0)) + 2 + num_drafts
        known = (
            np.repeat(readers, len(further)),
            min(longest, self.max_model_len),
            longest <= self.max_model_len,
            num_drafts,
        )
        samples = np.cumsum(1 + counts) - 1 - counts
        query_rows = np.repeat(rows, len(further))
        arrays = positions, query_rows, lasts - counts, samples, readers, further
        return arrays, lambda *moved: BlockDrafting(*known, *moved)

    def propose(
        self,
        step: BlockDrafting,
        hidden: torch.Tensor,
        context: ForwardContext,
        sampled: torch.Tensor | None,
        rows: torch.Tensor | None,
        accepted: torch.Tensor | None,
    ) -> torch.Tensor | None:
        """Return drafts [num_requests, K] int64 of those that sample, on their device.

        None if there are none, of a prefill or with K = 0. The arguments are those of
        `engine.drafter.Drafter`.
        """
        self.head.store(hidden, context)
        for group, _ in self.groups:
            for observer in self.observers:
                observer.on_store(group.group_id)
        if sampled is None or not step.num_drafts:
            return None
        ends, samples = step.ends, step.samples
        if accepted is not None:
            ends, samples = ends + accepted, samples + accepted
        positions = (step.positions[ends, None] + step.further).flatten()
        place = positions if step.fits else positions.clamp(max=self.max_model_len - 1)
        queries = ForwardContext(self.metadata(step, positions, place), self.views)
        out = self.head(sampled[samples], step.num_drafts, queries)
        return self.head.compute_logits(out).argmax(-1)

    def metadata(
        self, step: BlockDrafting, positions: torch.Tensor, place: torch.Tensor
    ) -> dict[str, Any]:
        """Return the metadata of the queries, by layer; `place`: their positions in the row."""
        num_queries = 1 + step.num_drafts
        lengths = torch.full((len(step.readers),), num_queries, dtype=torch.int64)
        queries = Ragged(lengths, place.device)
        metadata: dict[str, Any] = {}
        for group, compute in self.groups:
            _, slots = draft_slots(
                self.block_tables,
                group.group_id,
                step.query_rows,
                positions,
                None if step.fits else self.max_model_len,
            )
            for observer in self.observers:
                observer.on_draft(group.group_id, step.queried, positions, slots)
            window = window_of(layer_specs(group.layer_names, group.spec)[0])
            seen = step.longest if window is None else window + step.num_drafts
            segment = AttentionPart(
                0,
                len(place),
                queries,
                place.view(-1, num_queries),
                self.block_tables.input_tables[group.group_id][step.readers],
                min(step.longest, seen),
                compute,
                window,
            )
            layers = PagedAttentionMetadata(SlotMapping(slots), (segment,), place)
            metadata |= dict.fromkeys(group.layer_names, layers)
            for observer in self.observers:
                observer.on_block(group.group_id, step.queried[::num_queries], segment)
        return metadata

"""Drives a multi-token-prediction head beside the target: K passes of one small layer after every step.

The first pass runs over all tokens that the step computed and the request keeps, since the head needs its own K and V
of them; it also replaces what earlier passes wrote for drafts, with the target's hidden states in place of the head's.
Only the last token of each request attends and is drafted from. Each further pass takes the head's output and its draft
one position on.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from hybrid_kv.attention.paged import AttentionPart, Compute, PagedAttentionMetadata, SlotMapping
from hybrid_kv.cache.backend import AttentionGroup
from hybrid_kv.cache.block_table import BlockTables
from hybrid_kv.kernels.common.ragged import Ragged
from hybrid_kv.kernels.common.upload import upload
from hybrid_kv.kernels.slot_mapping import PAD_SLOT
from hybrid_kv.models.interface import DraftHead
from hybrid_kv.models.layers import ForwardContext
from hybrid_kv.observe import EngineObserver
from hybrid_kv.request import ScheduledRequest

Ints = npt.NDArray[np.int64]


@dataclass(frozen=True, eq=False)
class MTPDrafter:
    """Proposes `num_passes` drafts for every request that sampled.

    Attributes:
        group: the attention group that the head's layer joined.
        token_ids: the runner's rows.
        compute: of the group's attention.
    """

    head: DraftHead
    num_passes: int
    group: AttentionGroup
    views: dict[str, tuple[torch.Tensor, ...]]
    block_tables: BlockTables
    token_ids: Ints
    max_model_len: int
    compute: Compute

    def propose(
        self,
        batch: Sequence[ScheduledRequest],
        hidden: torch.Tensor,
        tokens: Sequence[list[int]],
        observers: Sequence[EngineObserver] = (),
    ) -> dict[str, list[int]]:
        """Drafts by request id.

        Args:
            batch: of the step, in batch order.
            hidden: [num_tokens, hidden_size], the target's.
            tokens: what each request of the batch got; those tokens are in `token_ids` already.
            observers: notified where K and V will go.
        """
        device = hidden.device
        scheduled = np.array([item.num_tokens for item in batch], dtype=np.int64)
        # Of a verify step only what was accepted; of a chunk everything.
        rejected = [item.num_drafts - max(0, len(new) - 1) for item, new in zip(batch, tokens, strict=True)]
        lengths = scheduled - np.array(rejected, dtype=np.int64)
        firsts = np.array([item.num_computed_tokens for item in batch], dtype=np.int64) + 1
        rows = np.array([item.request.row for item in batch], dtype=np.int64)
        inside = np.arange(lengths.sum()) - np.repeat(np.cumsum(lengths) - lengths, lengths)
        positions = np.repeat(firsts, lengths) + inside
        source = np.repeat(np.cumsum(scheduled) - scheduled, lengths) + inside
        chosen = np.array([i for i, new in enumerate(tokens) if new], dtype=np.int64)
        readers = chosen if len(chosen) else np.zeros(1, dtype=np.int64)  # K and V are written with any of them
        ends = np.cumsum(lengths)[readers] - 1  # their last pairs, the queries of the first pass
        # Slots of all passes at once: every pair of the first, then pass by pass the next one of each reader.
        further = (positions[ends] + np.arange(1, self.num_passes)[:, None]).flatten()
        queried = np.concatenate([np.repeat(np.arange(len(batch)), lengths), np.tile(readers, self.num_passes - 1)])
        all_positions = np.concatenate([positions, further])
        ids = self.token_ids[np.repeat(rows, lengths), positions]
        next_ids, sources, wanted, reading, token_rows, at = upload(
            device, ids, source, ends, readers, rows[queried], all_positions
        )
        known = self.head.normed(hidden[sources])
        all_places, all_slots = self._slots(token_rows, at, bool(all_positions.max() < self.max_model_len))
        for observer in observers:
            observer.on_draft(self.group.group_id, queried, all_positions, all_slots)
        counts = [len(positions)] + [len(readers)] * (self.num_passes - 1)
        places, slots = all_places.split(counts), all_slots.split(counts)
        queries = Ragged(torch.ones(len(readers), dtype=torch.int64), device)
        table = self.block_tables.input_tables[self.group.group_id][reading]
        longest = int(positions[ends].max()) + 1

        out, drafts = known, list[torch.Tensor]()
        for i in range(self.num_passes):
            place = places[i] if i else places[0][wanted]
            num_keys = min(longest + i, self.max_model_len)
            part = AttentionPart(0, len(readers), queries, place.unsqueeze(1), table, num_keys, self.compute)
            metadata = PagedAttentionMetadata(SlotMapping(slots[i]), (part,), places[i])
            context = ForwardContext(dict.fromkeys(self.head.layer_specs, metadata), self.views)
            out = self.head(out, drafts[-1], context) if i else self.head(known, next_ids, context, wanted)
            if not len(chosen):
                return {}
            drafts.append(self.head.compute_logits(out).argmax(-1))
        proposals = torch.stack(drafts, dim=1).tolist()
        return {batch[i].request.request_id: draft for i, draft in zip(chosen, proposals, strict=True)}

    def _slots(self, rows: torch.Tensor, positions: torch.Tensor, fit: bool) -> tuple[torch.Tensor, torch.Tensor]:
        """Position and slot of each token.

        One at the end of its row's room gets no slot and a position inside it: its draft is worthless, those of the
        other rows must not be (vllm#58080).

        Args:
            fit: none is there.
        """
        place = positions if fit else positions.clamp(max=self.max_model_len - 1)
        slots = self.block_tables.slots_of(self.group.group_id, rows, place)
        return place, slots if fit else slots.masked_fill(positions >= self.max_model_len, PAD_SLOT)

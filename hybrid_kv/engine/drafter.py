"""Drives a multi-token-prediction head beside the target: K passes of one small layer after every step.

The first pass runs over all tokens that the step computed and the request keeps, since the head needs its own K and V
of them; it also replaces what earlier passes wrote for drafts, with the target's hidden states in place of the head's.
Each further pass takes the head's output and its draft one position on.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import numpy as np
import numpy.typing as npt
import torch

from hybrid_kv.attention.common import CommonAttentionMetadata
from hybrid_kv.attention.paged import Compute, build_paged_attention_metadata
from hybrid_kv.cache.backend import AttentionGroup
from hybrid_kv.cache.block_table import BlockTables
from hybrid_kv.cache.spec import KVCacheSpec
from hybrid_kv.engine.scheduler import ScheduledRequest
from hybrid_kv.models.layers import ForwardContext

Ints = npt.NDArray[np.int64]


class DraftHead(Protocol):
    """A head whose pair (hidden state of token p - 1, token p) has position p; see `models.nemotron_h_mtp`."""

    layer_specs: dict[str, KVCacheSpec]

    def __call__(
        self, hidden: torch.Tensor, next_token_ids: torch.Tensor, positions: torch.Tensor, context: ForwardContext
    ) -> torch.Tensor:
        """[num_tokens, hidden_size], for `compute_logits` and the next pass."""

    def normed(self, hidden: torch.Tensor) -> torch.Tensor:
        """The target's hidden states as the head reads them, same shape."""

    def compute_logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """[num_tokens, vocab_size]."""


class MTPDrafter:
    """Proposes `num_speculative_tokens` drafts for every request that sampled.

    Args:
        group: the attention group that the head's layer joined.
        token_ids: [max_num_seqs, max_model_len + 1], the runner's rows.
        compute: of the group's attention.
    """

    def __init__(
        self,
        head: DraftHead,
        num_speculative_tokens: int,
        group: AttentionGroup,
        views: dict[str, tuple[torch.Tensor, ...]],
        block_tables: BlockTables,
        token_ids: npt.NDArray[np.int64],
        compute: Compute,
    ) -> None:
        self._head = head
        self._compute = compute
        self._num_passes = num_speculative_tokens
        self._group = group
        self._views = views
        self._block_tables = block_tables
        self._token_ids = token_ids

    def propose(
        self, batch: Sequence[ScheduledRequest], hidden: torch.Tensor, tokens: Sequence[list[int]]
    ) -> dict[str, list[int]]:
        """Drafts by request id.

        Args:
            batch: of the step, in batch order.
            hidden: [num_tokens, hidden_size], the target's.
            tokens: what each request of the batch got; those tokens are in `token_ids` already.
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
        num_decodes = sum(item.is_decode for item in batch)

        next_ids = torch.from_numpy(self._token_ids[np.repeat(rows, lengths), positions]).to(device)
        table = self._block_tables.input_tables[self._group.group_id][: len(batch)]
        known = self._head.normed(hidden[torch.from_numpy(source).to(device)])
        out = self._run(known, next_ids, rows, lengths, positions, table, num_decodes)

        chosen = np.array([i for i, new in enumerate(tokens) if new], dtype=np.int64)
        if not len(chosen):
            return {}
        ends = np.cumsum(lengths)[chosen] - 1
        newest = positions[ends]
        out = out[torch.from_numpy(ends).to(device)]
        table = table[torch.from_numpy(chosen).to(device)]
        drafts = [self._head.compute_logits(out).argmax(-1)]
        ones = np.ones(len(chosen), dtype=np.int64)
        for further in range(1, self._num_passes):
            out = self._run(out, drafts[-1], rows[chosen], ones, newest + further, table, len(chosen))
            drafts.append(self._head.compute_logits(out).argmax(-1))
        proposals = torch.stack(drafts, dim=1).tolist()
        return {batch[i].request.request_id: draft for i, draft in zip(chosen, proposals, strict=True)}

    def _run(
        self,
        hidden: torch.Tensor,
        next_ids: torch.Tensor,
        rows: Ints,
        lengths: Ints,
        positions: Ints,
        table: torch.Tensor,
        num_decodes: int,
    ) -> torch.Tensor:
        """One pass over `lengths[i]` pairs of each row.

        A row at the end of its room gets no slot and a position inside it: its drafts are worthless, those of the other
        rows must not be (vllm#58080).
        """
        device = hidden.device
        limit = self._token_ids.shape[1] - 1
        fits = positions < limit
        place = torch.from_numpy(np.minimum(positions, limit - 1)).to(device)
        group = self._group.group_id
        token_rows = torch.from_numpy(np.repeat(rows, lengths)).to(device)
        slots = self._block_tables.compute_slot_mappings(token_rows, place, len(positions), [group])[group]
        if not fits.all():
            slots = slots.masked_fill(~torch.from_numpy(fits).to(device), -1)
        common = CommonAttentionMetadata(
            num_reqs=len(rows),
            num_reqs_padded=len(rows),
            num_tokens=len(positions),
            num_tokens_padded=len(positions),
            num_decodes=num_decodes,
            num_decode_tokens=int(lengths[:num_decodes].sum()),
            query_lens=lengths,
            num_computed_tokens=positions[np.cumsum(lengths) - lengths],
            positions=place,
            max_seq_len=min(limit, int(positions.max()) + 1),
        )
        metadata = build_paged_attention_metadata(common, table, slots, self._group.kernel_block_size, self._compute)
        context = ForwardContext(dict.fromkeys(self._head.layer_specs, metadata), self._views)
        return self._head(hidden, next_ids, place, context)

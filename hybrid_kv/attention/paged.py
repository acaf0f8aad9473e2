"""Metadata of paged attention."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from hybrid_kv.attention.common import CommonAttentionMetadata
from hybrid_kv.cache.spec import cdiv
from hybrid_kv.kernels.ragged import Ragged


@dataclass(frozen=True)
class AttentionPart:
    """The decodes or the prefills of a step."""

    start: int  # first token
    num_tokens: int
    rows: Ragged
    positions: torch.Tensor  # [num_rows, max_len] int64
    block_table: torch.Tensor  # [num_rows, used kernel blocks] int32


@dataclass(frozen=True)
class PagedAttentionMetadata:
    """Slots of all tokens, and what each part reads."""

    slots: torch.Tensor  # [num_tokens_padded] int64
    parts: tuple[AttentionPart, ...]


def build_paged_attention_metadata(
    common: CommonAttentionMetadata, block_table: torch.Tensor, slots: torch.Tensor, kernel_block_size: int
) -> PagedAttentionMetadata:
    """Split the step into decodes and prefills.

    Args:
        block_table: [num_reqs_padded, width] int32, kernel blocks.
        slots: [num_tokens_padded] int64.
    """
    device = slots.device
    used = cdiv(common.max_seq_len, kernel_block_size)
    parts = []
    split = common.num_decodes
    for first, last, start in ((0, split, 0), (split, common.num_reqs_padded, common.num_decode_tokens)):
        if first == last:
            continue
        rows = Ragged(torch.from_numpy(common.query_lens[first:last]), device)
        num_tokens = int(common.query_lens[first:last].sum())
        positions = rows.padded(common.positions[start : start + num_tokens])
        parts.append(AttentionPart(start, num_tokens, rows, positions, block_table[first:last, :used]))
    return PagedAttentionMetadata(slots, tuple(parts))

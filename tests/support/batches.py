"""Batches of decodes, prefills and padding, as attention gets them."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from hybrid_kv.attention.common import CommonAttentionMetadata
from hybrid_kv.kernels.common.upload import now


def common(
    computed: Sequence[int], lens: Sequence[int], num_decodes: int, padding: int = 0
) -> CommonAttentionMetadata:
    """Return a batch of `num_decodes` decodes, then padding rows (only without prefills)."""
    computed, lens = [*computed, *[0] * padding], [*lens, *[1] * padding]
    positions = [torch.arange(start, start + n) for start, n in zip(computed, lens, strict=True)]
    made = CommonAttentionMetadata(
        num_reqs=len(lens) - padding,
        num_reqs_padded=len(lens),
        num_decodes=num_decodes + padding,
        num_decode_tokens=sum(lens[:num_decodes]) + padding,
        query_lens=np.array(lens, dtype=np.int64),
        num_computed_tokens=np.array(computed, dtype=np.int64),
        positions=torch.cat(positions),
    )
    now(made.positions.device, made.stage_rows())
    return made

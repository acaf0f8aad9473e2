"""Metadata of Mamba layers."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from hybrid_kv.attention.common import CommonAttentionMetadata
from hybrid_kv.kernels.ragged import Ragged


@dataclass(frozen=True)
class MambaMetadata:
    """Which state each row reads and writes. Decode rows come first and run one token each."""

    num_decodes: int
    state_indices: torch.Tensor  # [num_reqs_padded] int64, block ids; padding rows use the null block
    prefill_rows: Ragged | None
    has_initial_state: torch.Tensor | None  # [num_prefills] bool


def build_mamba_metadata(
    common: CommonAttentionMetadata, block_table: torch.Tensor, state_indices: torch.Tensor
) -> MambaMetadata:
    """In mode `none` a request's only state is the first column of its row.

    A prefill that starts a request must not read its block: the block still holds its previous owner's state.

    Args:
        block_table: [num_reqs_padded, width] int32; padding rows hold the null block.
        state_indices: [max_num_seqs] int64, persistent: a captured graph reads the metadata from here.
    """
    split = common.num_decodes
    rows = initial = None
    if common.num_prefills:
        rows = Ragged(torch.from_numpy(common.query_lens[split:]), block_table.device)
        initial = torch.from_numpy(common.num_computed_tokens[split:] > 0).to(block_table.device)
    indices = state_indices[: common.num_reqs_padded]
    indices.copy_(block_table[:, 0])
    return MambaMetadata(split, indices, rows, initial)

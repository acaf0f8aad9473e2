"""Multi-head latent attention (DeepSeek-V2, arXiv 2405.04434), absorbed.

All heads attend over one vector per token: the token's latent [rank], from which every head would
expand a K and a V, and after it the part of K that is rotated and shared by the heads [rope]. Head
h has `k = W_UK_h latent` and `v = W_UV_h latent`, so the caller hands over queries `[W_UK_h^T q,
rotated q]` and expands outputs by `W_UV_h`: nothing is expanded per cached token. It is attention
with one head of K and V, and V is the first `rank` elements of K: the places, masks and products of
`paged_attention` serve as they are.
"""

from __future__ import annotations

import torch

from hybrid_kv.kernels.common.strided import put_tokens
from hybrid_kv.kernels.paged_attention import SlotCells, attend_tokens


def store_latent(latent: torch.Tensor, cache: torch.Tensor, to: SlotCells) -> None:
    """Store one vector per token that has a slot.

    Args:
        latent: [num_tokens, rank + rope].
        cache: [num_kernel_blocks, kernel_block_size, rank + rope], a strided view, of 8
            bits or of the same dtype.
        to: `slot_cells` of the tokens, for this kernel block size.
    """
    put_tokens(cache, to.cells, latent if to.kept is None else latent[to.kept])


def attend_latent(
    query: torch.Tensor, latent: torch.Tensor, mask: torch.Tensor | None, scale: float, rank: int
) -> torch.Tensor:
    """Attend from each row's absorbed queries to the row's tokens.

    Args:
        query: [num_rows, len, num_heads, rank + rope].
        latent: [num_rows, num_keys, rank + rope], finite.
        mask: `attention_mask` with all heads on one K; None if every query sees every token.
        scale: of the scores, 1 / sqrt(size of a head's K before it was absorbed).

    Returns:
        [num_rows, len, num_heads, rank], weighted sums of latents.
    """
    keys = latent.unsqueeze(2)
    # Summed over all of K and cut: with a V of another size torch takes a path 1.3 to 2.5 times as
    # slow on a CPU.
    return attend_tokens(query, keys, keys, mask, scale)[..., :rank]

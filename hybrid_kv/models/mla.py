"""Multi-head latent attention (DeepSeek-V2, arXiv 2405.04434), one cached vector per token.

`kernels.mla` says what that vector is, and why nothing is expanded per cached token. It runs in
plain torch, on any device and whatever the attention backend.
"""

from __future__ import annotations

import torch
from torch import nn

from hybrid_kv.attention.paged import PagedAttentionMetadata, computed_dtype
from hybrid_kv.kernels.common.strided import gather_tokens
from hybrid_kv.kernels.mla import attend_latent, store_latent
from hybrid_kv.models.config_file import ConfigFile
from hybrid_kv.models.layers import ForwardContext, Linear, RMSNorm
from hybrid_kv.models.rope import Rope, rotate

_EPS = 1e-6  # of the norms of latents, whatever the file says of the others


class LatentAttention(nn.Module):
    """The layer, with the names that DeepSeek-V2 gave the sizes.

    What is called `rope` there is shared by the heads. Queries have latents where the file says
    their rank; without, their projection has no bias.

    Args:
        name: of the layer's cache, a vector [rank + shared_dim] a token.
    """

    def __init__(self, file: ConfigFile, name: str) -> None:
        super().__init__()
        num_heads = file.size("num_attention_heads")
        file.only("num_key_value_heads", num_heads)
        hidden_size = file.size("hidden_size")
        key_dim = file.size("qk_nope_head_dim")
        shared_dim = file.size("qk_rope_head_dim")
        value_dim = file.size("v_head_dim")
        rank = file.size("kv_lora_rank")
        query_rank = file.maybe_size("q_lora_rank")
        bias = file.flag("attention_bias", default=False)
        self.name = name
        self.num_heads = num_heads
        self.rank = rank
        self.key_splits = (key_dim, shared_dim)
        self.value_splits = (key_dim, value_dim)
        self.scale = (key_dim + shared_dim) ** -0.5
        self.q_a_proj = None if query_rank is None else Linear(hidden_size, query_rank, bias)
        self.q_a_norm = None if query_rank is None else RMSNorm(query_rank, _EPS)
        self.query_proj = Linear(query_rank or hidden_size, num_heads * (key_dim + shared_dim))
        self.kv_a_proj = Linear(hidden_size, rank + shared_dim, bias)
        self.kv_a_norm = RMSNorm(rank, _EPS)
        self.kv_b_proj = Linear(rank, num_heads * (key_dim + value_dim))
        self.o_proj = Linear(num_heads * value_dim, hidden_size, bias)

    def forward(self, x: torch.Tensor, context: ForwardContext) -> torch.Tensor:
        """Attend from tokens [num_tokens, hidden_size]; store the vectors of all of them."""
        metadata: PagedAttentionMetadata = context.metadata[self.name]
        (cache,) = context.views[self.name]
        to_keys, to_values = self.kv_b_proj.weight.unflatten(0, (self.num_heads, -1)).split(
            self.value_splits, dim=1
        )
        latent, shared = self.kv_a_proj(x).split((self.rank, self.key_splits[1]), dim=-1)
        dtype = computed_dtype(cache.dtype, x.dtype)
        latent_query, shared_query = self._queries(x).split(self.key_splits, dim=-1)
        shared, shared_query = self.placed(shared, shared_query, metadata)
        vectors = torch.cat([self.kv_a_norm(latent), shared], dim=-1).to(dtype)
        store_latent(vectors, cache, metadata.slot_mapping.cells(cache.shape[1]))
        query = torch.cat(
            [torch.einsum("thk,hkr->thr", latent_query, to_keys), shared_query], dim=-1
        ).to(dtype)
        outputs = []
        for segment in metadata.parts:
            rows = segment.rows.padded(query[segment.start : segment.start + segment.num_tokens])
            seen = gather_tokens(cache, segment.token_index(cache)).to(dtype)
            seen = seen.unflatten(0, (-1, segment.num_keys))
            mixed = attend_latent(
                rows, seen, segment.mask(self.num_heads, query.dtype), self.scale, self.rank
            )
            outputs.append(segment.rows.flat(mixed))
        mixed = (outputs[0] if len(outputs) == 1 else torch.cat(outputs)).to(x.dtype)
        values = torch.einsum("thr,hvr->thv", mixed, to_values)
        return self.o_proj(self.gated(values, x).flatten(1))

    def placed(
        self, key: torch.Tensor, query: torch.Tensor, metadata: PagedAttentionMetadata
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the shared parts of keys [num_tokens, shared_dim] and of queries with positions.

        Here order comes from the recurrent layers, and both stay as they are.
        """
        return key, query

    def gated(self, values: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        """Return values [num_tokens, num_heads, value_dim] as `o_proj` takes them: as they are."""
        return values

    def _queries(self, x: torch.Tensor) -> torch.Tensor:
        """Return the queries [num_tokens, num_heads, key_dim + shared_dim]."""
        if self.q_a_proj is not None and self.q_a_norm is not None:
            x = self.q_a_norm(self.q_a_proj(x))
        return self.query_proj(x).unflatten(1, (self.num_heads, -1))


class GatedLatentAttention(LatentAttention):
    """`LatentAttention` with RoPE, and each head times the sigmoid of a number (Ling-3).

    Args:
        rope: rotates what is shared, whose neighbouring channels are pairs.
    """

    def __init__(self, file: ConfigFile, name: str, rope: Rope) -> None:
        super().__init__(file, name)
        self.rope = rope
        self.head_gate = Linear(file.size("hidden_size"), self.num_heads)

    def placed(
        self, key: torch.Tensor, query: torch.Tensor, metadata: PagedAttentionMetadata
    ) -> tuple[torch.Tensor, torch.Tensor]:
        rotation = metadata.rotation(self.rope, key.dtype)
        key = rotate(_halves(key.unsqueeze(1)), rotation).squeeze(1)
        return key, rotate(_halves(query), rotation)

    def gated(self, values: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        return values * self.head_gate(x).sigmoid().unsqueeze(-1)


def _halves(x: torch.Tensor) -> torch.Tensor:
    """Put the first channels of all pairs of neighbours before the second ones."""
    return x.unflatten(-1, (-1, 2)).mT.flatten(-2)

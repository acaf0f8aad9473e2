"""Kimi Delta Attention (2025, arXiv 2510.26692): a gated delta rule with a rate per key channel.

The convolutions of queries, keys and values are one, of all their channels, with one window. Decay
and output gate come from projections of low rank; the gate is a sigmoid, after the norm of each
head.
"""

from __future__ import annotations

import torch

from hybrid_kv.cache.spec import KVCacheSpec
from hybrid_kv.models.layers import Linear, upcast
from hybrid_kv.models.mixers.conv import Projected, Tensors
from hybrid_kv.models.mixers.gated_delta import DeltaRuleMixer


class KDAMixer(DeltaRuleMixer):
    """The layer.

    Args:
        name: of the layer's cache.
        spec: of that, whose state is [num_heads, head_dim, head_dim], values by keys; head_dim is
            also the rank of the low projections.
        chunk_size: tokens that a scan takes at a time.
        eps: of the norm of each head.
    """

    def __init__(
        self, name: str, hidden_size: int, spec: KVCacheSpec, chunk_size: int, eps: float
    ) -> None:
        super().__init__(name, spec, chunk_size, eps)
        num_heads = self.value_heads
        head_dim = self.value_dim
        self.heads = (num_heads, head_dim)
        width = num_heads * head_dim
        self.splits = (3 * width, head_dim, num_heads, head_dim)
        self.in_proj = Linear(hidden_size, sum(self.splits))
        self.f_b_proj = Linear(head_dim, width)
        self.g_b_proj = Linear(head_dim, width)
        self.o_proj = Linear(width, hidden_size)

    def project(self, x: torch.Tensor) -> Projected:
        conv_in, decay, beta, gate = self.in_proj(x).split(self.splits, dim=-1)
        return Projected(
            conv_in, (self.f_b_proj(decay).unflatten(1, self.heads), beta), (self.g_b_proj(gate),)
        )

    def finish(self, mixed: torch.Tensor, rest: Tensors) -> torch.Tensor:
        (gate,) = rest
        normed = self.norm(mixed.unflatten(1, self.heads)).flatten(1)
        return self.o_proj((normed * upcast(gate).sigmoid()).to(gate.dtype))

"""Kimi Delta Attention (2025, arXiv 2510.26692): a gated delta rule whose decay has one rate for each key channel.

The convolutions of queries, keys and values are one, of all their channels, with one window. Decay and output gate come
from projections of low rank; the gate is a sigmoid, behind the norm of each head.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F

from hybrid_kv.models.layers import Derived, Linear, RMSNorm, empty, upcast
from hybrid_kv.models.mixers.conv import Projected, Tensors
from hybrid_kv.models.mixers.gated_delta import DeltaRuleMixer, unit


def _rates(A_log: torch.Tensor, dt_bias: torch.Tensor, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """Of each head [heads, 1], and what is added to each channel's step [heads, head_dim]."""
    return -A_log.to(dtype).exp().unsqueeze(-1), dt_bias.to(dtype).view(len(A_log), -1)


class KDAMixer(DeltaRuleMixer):
    """The layer.

    Args:
        name: of the layer's cache, whose state is [num_heads, head_dim, head_dim], values by keys.
        head_dim: of queries, keys and values; also the rank of the low projections.
        chunk_size: tokens that a scan takes at a time.
        eps: of the norm of each head.
    """

    def __init__(
        self, name: str, hidden_size: int, num_heads: int, head_dim: int, conv_kernel: int, chunk_size: int, eps: float
    ) -> None:
        width = num_heads * head_dim
        super().__init__(name, 3 * width, conv_kernel, conv_bias=False)
        self.heads, self.chunk_size = (num_heads, head_dim), chunk_size
        self.splits = (3 * width, head_dim, num_heads, head_dim)
        self.in_proj = Linear(hidden_size, sum(self.splits))
        self.f_b_proj = Linear(head_dim, width)
        self.g_b_proj = Linear(head_dim, width)
        self.dt_bias = empty(width)
        self.A_log = empty(num_heads)
        self._rates = Derived(_rates)
        self.norm = RMSNorm(head_dim, eps)
        self.o_proj = Linear(width, hidden_size)

    def project(self, x: torch.Tensor) -> Projected:
        conv_in, decay, raw_beta, gate = self.in_proj(x).split(self.splits, dim=-1)
        return Projected(conv_in, (self.f_b_proj(decay), raw_beta), (self.g_b_proj(gate),))

    def finish(self, mixed: torch.Tensor, rest: Tensors) -> torch.Tensor:
        (gate,) = rest
        normed = self.norm(mixed.unflatten(1, self.heads)).flatten(1)
        return self.o_proj((normed * upcast(gate).sigmoid()).to(gate.dtype))

    def operands(self, conv_out: torch.Tensor, inputs: Tensors, dtype: torch.dtype) -> Tensors:
        """q, k, v, log decay of each key channel, beta."""
        raw_decay, raw_beta = (part.to(dtype) for part in inputs)
        rates, dt_bias = self._rates(self.A_log, self.dt_bias, dtype=dtype)
        q, k, v = (part.unflatten(-1, self.heads) for part in conv_out.to(dtype).chunk(3, dim=-1))
        decay = rates * F.softplus(raw_decay.unflatten(-1, self.heads) + dt_bias)
        return unit(q) * self.heads[1] ** -0.5, unit(k), v, decay, raw_beta.sigmoid()

"""Kimi Delta Attention (2025, arXiv 2510.26692): a gated delta rule with a rate per key channel.

The convolutions of queries, keys and values are one, of all their channels, with one window. Decay
and output gate come from projections of low rank, or of full rank; the gate is a sigmoid, after the
norm of each head.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from hybrid_kv.cache.spec import KVCacheSpec
from hybrid_kv.models.layers import Derived, Linear, upcast
from hybrid_kv.models.mixers.conv import Projected, Tensors
from hybrid_kv.models.mixers.gated_delta import DeltaRuleMixer

_LEAST = 1e-30  # of a step in float32: its logarithm is finite


class KDAMixer(DeltaRuleMixer):
    """The layer.

    Args:
        name: of the layer's cache.
        spec: of that, whose state is [num_heads, head_dim, head_dim], values by keys; head_dim is
            also the rank of the low projections.
        chunk_size: tokens that a scan takes at a time.
        eps: of the norm of each head.
        has_low_rank: of the projections of decay and gate; else they are of full rank.
    """

    def __init__(
        self,
        name: str,
        hidden_size: int,
        spec: KVCacheSpec,
        chunk_size: int,
        eps: float,
        *,
        has_low_rank: bool = True,
    ) -> None:
        super().__init__(name, spec, chunk_size, eps)
        num_heads = self.value_heads
        head_dim = self.value_dim
        self.heads = (num_heads, head_dim)
        width = num_heads * head_dim
        inner = head_dim if has_low_rank else width
        self.splits = (3 * width, inner, num_heads, inner)
        self.in_proj = Linear(hidden_size, sum(self.splits))
        self.f_b_proj = Linear(head_dim, width) if has_low_rank else nn.Identity()
        self.g_b_proj = Linear(head_dim, width) if has_low_rank else nn.Identity()
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


class BoundedKDAMixer(KDAMixer):
    """The layer where no log decay is below `-bound` (Ling-3).

    It is `-bound * sigmoid(exp(A_log) * (dt + dt_bias))`. `project` gives its inverse under the
    softplus of the recurrence, whose own rate and bias are 1 and 0: so every kernel runs it.
    """

    def __init__(self, *arguments: Any, bound: float, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self.bound = bound
        self._neutral = Derived(_zeros)

    def gate_weights(self) -> tuple[torch.Tensor, torch.Tensor]:
        return self._neutral(self.A_log, self.dt_bias)

    def project(self, x: torch.Tensor) -> Projected:
        conv_in, (dt, beta), rest = super().project(x)
        biased = upcast(dt) + upcast(self.dt_bias).view(self.heads)
        rate = upcast(self.A_log).exp().unsqueeze(-1)
        step = (self.bound * (rate * biased).sigmoid()).clamp_min(_LEAST)
        return Projected(conv_in, (_inverse_softplus(step), beta), rest)


def _inverse_softplus(x: torch.Tensor) -> torch.Tensor:
    # Of log(exp(x) - 1) the exponential would overflow, and near 0 lose all digits.
    return x + torch.log(-torch.expm1(-x))


def _zeros(A_log: torch.Tensor, dt_bias: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.zeros_like(A_log), torch.zeros_like(dt_bias)

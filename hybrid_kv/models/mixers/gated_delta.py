"""A gated delta net (Yang et al., 2024, arXiv 2412.06464): projection, convolution, delta rule, gated norm, projection.

As in transformers, queries and keys get length 1 in the dtype of the recurrence, and the norm of each head comes before
its gate, not behind it as in Mamba-2.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F

from hybrid_kv.kernels.gated_delta import gated_delta_chunk, gated_delta_update
from hybrid_kv.models.layers import Derived, Linear, RMSNorm, empty, upcast
from hybrid_kv.models.mixers.conv import Projected, RecurrentMixer, Tensors

_EPS = 1e-6  # under the root of a squared length, as in flash-linear-attention


def _rates(A_log: torch.Tensor, dt_bias: torch.Tensor, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    return -A_log.to(dtype).exp(), dt_bias.to(dtype)


def unit(x: torch.Tensor) -> torch.Tensor:
    """Of length 1, or a little less: [..., size] to the same."""
    return x * (x.square().sum(-1, keepdim=True) + _EPS).rsqrt()


class DeltaRuleMixer(RecurrentMixer):
    """What layers with a delta rule share."""

    update = staticmethod(gated_delta_update)
    scan = staticmethod(gated_delta_chunk)


class GatedDeltaMixer(DeltaRuleMixer):
    """The layer; `value_heads / key_heads` heads share a query and a key.

    Args:
        name: of the layer's cache, whose state is [value_heads, value_dim, key_dim].
        chunk_size: tokens that a scan takes at a time.
        eps: of the norm of each head.
        beta_scale: 2 lets the state forget the other way: eigenvalues from -1 on (OLMo-Hybrid).
    """

    def __init__(
        self,
        name: str,
        hidden_size: int,
        key_heads: int,
        value_heads: int,
        key_dim: int,
        value_dim: int,
        conv_kernel: int,
        chunk_size: int,
        eps: float,
        beta_scale: float = 1.0,
    ) -> None:
        keys, values = key_heads * key_dim, value_heads * value_dim
        super().__init__(name, 2 * keys + values, conv_kernel, conv_bias=False)
        self.key_heads, self.value_heads, self.key_dim, self.value_dim = key_heads, value_heads, key_dim, value_dim
        self.chunk_size, self.beta_scale = chunk_size, beta_scale
        self.widths = (keys, keys, values)
        self.in_proj = Linear(hidden_size, 2 * (keys + values + value_heads))
        self.dt_bias = empty(value_heads)
        self.A_log = empty(value_heads)
        self._rates = Derived(_rates)
        self.norm = RMSNorm(value_dim, eps)
        self.out_proj = Linear(values, hidden_size)

    def project(self, x: torch.Tensor) -> Projected:
        conv_in, gate, raw_beta, raw_dt = self.in_proj(x).split(
            (sum(self.widths), self.widths[2], self.value_heads, self.value_heads), dim=-1
        )
        return Projected(conv_in, (raw_beta, raw_dt), (gate,))

    def finish(self, mixed: torch.Tensor, rest: Tensors) -> torch.Tensor:
        (gate,) = rest
        normed = self.norm(mixed.unflatten(1, (self.value_heads, self.value_dim))).flatten(1)
        return self.out_proj((normed * F.silu(upcast(gate))).to(gate.dtype))

    def operands(self, conv_out: torch.Tensor, inputs: Tensors, dtype: torch.dtype) -> Tensors:
        """q, k, v, log decay, beta; all of them for each value head."""
        raw_beta, raw_dt = (part.to(dtype) for part in inputs)
        A, dt_bias = self._rates(self.A_log, self.dt_bias, dtype=dtype)
        q, k, v = conv_out.to(dtype).split(self.widths, dim=-1)
        q, k = (unit(part.unflatten(-1, (self.key_heads, self.key_dim))) for part in (q, k))
        if (shared := self.value_heads // self.key_heads) > 1:
            q, k = q.repeat_interleave(shared, -2), k.repeat_interleave(shared, -2)
        v = v.unflatten(-1, (self.value_heads, self.value_dim))
        return q * self.key_dim**-0.5, k, v, A * F.softplus(raw_dt + dt_bias), raw_beta.sigmoid() * self.beta_scale

"""A gated delta net (Yang et al., 2024, arXiv 2412.06464): convolution, delta rule, gated norm.

As in transformers, queries and keys get length 1 in the dtype of the recurrence, and the norm of
each head comes before its gate, not after it as in Mamba-2.
"""

from __future__ import annotations

from math import prod

import torch
import torch.nn.functional as F

from hybrid_kv.cache.spec import KVCacheSpec, MambaSpec
from hybrid_kv.kernels.gated_delta import (
    delta_operands,
    gated_delta_chunk,
    gated_delta_flush,
    gated_delta_prefill,
    gated_delta_recompute,
    gated_delta_recompute_reference,
    gated_delta_update,
    gated_delta_update_slots,
)
from hybrid_kv.kernels.recompute import RecomputeStep, recompute_flush_reference
from hybrid_kv.models.layers import Derived, ForwardContext, Linear, RMSNorm, empty, upcast
from hybrid_kv.models.mixers.conv import Projected, Tensors, Tokens, rates, sizes_of
from hybrid_kv.models.mixers.launched import LaunchedMixer, ScanRows

_Tensor = torch.Tensor
Layer = tuple[_Tensor, _Tensor, _Tensor, _Tensor, _Tensor, _Tensor, _Tensor]


class DeltaRuleMixer(LaunchedMixer):
    """The base of layers with a delta rule.

    `project` gives time steps, [num_tokens, value_heads] or per key channel [num_tokens,
    value_heads, key_dim], and after them betas [num_tokens, value_heads].

    Args:
        name: of the layer's cache.
        spec: of that, which has the sizes: its state is [value_heads, value_dim, key_dim];
            `value_heads / key_heads` heads share a query and a key.
        chunk_size: tokens that a scan takes at a time.
        eps: of the norm of each head.
        beta_scale: 2 lets the state forget the other way: eigenvalues from -1 on (OLMo-Hybrid).
    """

    update = staticmethod(gated_delta_update)
    scan = staticmethod(gated_delta_chunk)

    def __init__(
        self, name: str, spec: KVCacheSpec, chunk_size: int, eps: float, beta_scale: float = 1.0
    ) -> None:
        assert isinstance(spec, MambaSpec)
        super().__init__(name, *sizes_of(spec), conv_bias=False)
        u, k, g = (inputs.shape for inputs in spec.inputs)
        self.value_heads, self.value_dim = u
        self.key_heads, self.key_dim = k
        keys = prod(k)
        values = prod(u)
        self.chunk_size = chunk_size
        self.beta_scale = beta_scale
        self.widths = (keys, keys, values)
        self.dt_bias = empty(prod(g))
        self.A_log = empty(self.value_heads)
        self._rates = Derived(rates)
        self.norm = RMSNorm(self.value_dim, eps)

    def gate_weights(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Return A_log and dt_bias of the log decay, `-exp(A_log) * softplus(dt + dt_bias)`."""
        return self.A_log, self.dt_bias

    def operands(self, conv_out: torch.Tensor, inputs: Tensors, dtype: torch.dtype) -> Tensors:
        """Return q, k, v, log decay, beta; all of them for each value head."""
        dt, beta = (values.to(dtype) for values in inputs)
        decay, dt_bias = self._rates(*self.gate_weights(), dtype=dtype)
        qkv = self._heads(conv_out.to(dtype))
        return delta_operands(*qkv, dt, dt_bias.view(dt.shape[2:]), decay, beta, self.beta_scale)

    def recompute(
        self, decodes: Tokens, history: RecomputeStep, context: ForwardContext
    ) -> torch.Tensor:
        (state,) = self.parts(context, "state")
        ring = context.row_memory[self.name]
        layer = self._layer(decodes.rows.flat(decodes.conv_out), decodes.inputs)
        return gated_delta_recompute_reference(
            state, ring, history, *layer, decodes.rows.starts, self.beta_scale
        )

    def flush(self, history: RecomputeStep, context: ForwardContext) -> None:
        (state,) = self.parts(context, "state")
        ring = context.row_memory[self.name]
        if self.launches(context):
            gated_delta_flush(state, ring, history)
        else:
            recompute_flush_reference(state, ring, history, None)

    def launch_decodes(
        self, conv_out: torch.Tensor, inputs: Tensors, context: ForwardContext
    ) -> torch.Tensor:
        metadata = context.metadata[self.name]
        (state,) = self.parts(context, "state")
        layer = self._layer(conv_out, inputs)
        split = metadata.num_decodes
        history = metadata.rollback.history
        if history is not None:
            ring = context.row_memory[self.name]
            return gated_delta_recompute(
                state, ring, history, *layer, metadata.cu_seqlens, self.beta_scale
            )
        sources = metadata.source_indices[:split]
        targets = metadata.state_indices[:split]
        return gated_delta_update_slots(
            state, *layer, metadata.cu_seqlens, sources, targets, self.beta_scale
        )

    def launch_scan(
        self, state: torch.Tensor, conv_out: torch.Tensor, inputs: Tensors, rows: ScanRows
    ) -> torch.Tensor:
        return gated_delta_prefill(state, *self._layer(conv_out, inputs), *rows, self.beta_scale)

    def _layer(self, conv_out: torch.Tensor, inputs: Tensors) -> Layer:
        """Return q, k, v, dt, dt_bias, A_log and beta for kernels, [num_tokens, …] each."""
        dt, beta = inputs
        A_log, dt_bias = self.gate_weights()
        return *self._heads(conv_out), dt, dt_bias.view(dt.shape[1:]), A_log, beta

    def _heads(self, conv_out: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Return q, k [..., key_heads, key_dim] and v [..., value_heads, value_dim]."""
        q, k, v = conv_out.split(self.widths, dim=-1)
        q, k = (flat.unflatten(-1, (self.key_heads, self.key_dim)) for flat in (q, k))
        return q, k, v.unflatten(-1, (self.value_heads, self.value_dim))


class GatedDeltaMixer(DeltaRuleMixer):
    """The layer."""

    def __init__(
        self,
        name: str,
        hidden_size: int,
        spec: KVCacheSpec,
        chunk_size: int,
        eps: float,
        beta_scale: float = 1.0,
    ) -> None:
        super().__init__(name, spec, chunk_size, eps, beta_scale)
        keys, _, values = self.widths
        self.in_proj = Linear(hidden_size, 2 * (keys + values + self.value_heads))
        self.out_proj = Linear(values, hidden_size)

    def project(self, x: torch.Tensor) -> Projected:
        conv_in, gate, beta, dt = self.in_proj(x).split(
            (sum(self.widths), self.widths[2], self.value_heads, self.value_heads), dim=-1
        )
        return Projected(conv_in, (dt, beta), (gate,))

    def finish(self, mixed: torch.Tensor, rest: Tensors) -> torch.Tensor:
        (gate,) = rest
        normed = self.norm(mixed.unflatten(1, (self.value_heads, self.value_dim))).flatten(1)
        return self.out_proj((normed * F.silu(upcast(gate))).to(gate.dtype))

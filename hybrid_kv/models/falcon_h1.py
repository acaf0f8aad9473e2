"""Falcon-H1: Mamba-2 and attention next to each other in every layer; then a gated MLP.

Both read one normed input.

Multipliers stand at every projection. Source: TII's Falcon-H1 (2025) and its implementation in
transformers, which is the oracle of the tests.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any, Literal, cast

import torch
import torch.nn.functional as F
from torch import nn

from hybrid_kv.cache.spec import FullAttentionSpec
from hybrid_kv.models.attention import PagedAttention
from hybrid_kv.models.bamba import NAMES, Specs, mamba2
from hybrid_kv.models.causal_lm import CausalLM, rms_norm
from hybrid_kv.models.config_file import ConfigFile
from hybrid_kv.models.layers import Derived, ForwardContext, GatedMLP, upcast
from hybrid_kv.models.mixers.conv import Projected
from hybrid_kv.models.mixers.mamba2 import Mamba2Mixer
from hybrid_kv.models.rope import read_rope
from hybrid_kv.models.weights import converted

Order = Literal["gate_first", "norm_first", "none"]


def _repeated(weight: torch.Tensor, values: Sequence[float], sizes: Sequence[int]) -> torch.Tensor:
    return torch.cat(
        [weight.new_full((size,), value) for value, size in zip(values, sizes, strict=True)]
    )


class ScaledMamba2Mixer(Mamba2Mixer):
    """Mamba-2 with multipliers, and a norm before the gate, after it or none.

    Args:
        scale_in: of the input; `scales`: of gate, x, B, C and dt after the projection.
        order: whether the norm stands after the gate or before it, or there is none.
    """

    def __init__(
        self, *args: Any, scale_in: float, scales: list[float], order: Order, **options: Any
    ) -> None:
        super().__init__(*args, **options)
        self.scale_in = scale_in
        self.order = order
        inner = self.splits[0]
        shared = self.groups * self.state_size
        sizes = (inner, inner, shared, shared, self.num_heads)
        self._scales = Derived(partial(_repeated, values=scales, sizes=sizes))
        if order == "none":
            del self.norm

    def project(self, x: torch.Tensor) -> Projected:
        projected = self.in_proj(x * self.scale_in) * self._scales(self.in_proj.weight)
        gate, conv_in, raw_dt = projected.split(self.splits, dim=-1)
        return Projected(conv_in, (raw_dt,), (gate,))

    def gated(self, mixed: torch.Tensor, gate: torch.Tensor, launches: bool) -> torch.Tensor:
        if self.order == "gate_first":
            return super().gated(mixed, gate, launches)
        wide = upcast(mixed)
        if self.order == "norm_first":
            grouped = wide.unflatten(-1, (self.groups, -1))
            normed = F.rms_norm(grouped, grouped.shape[-1:], eps=self.norm.eps).flatten(-2)
            wide = normed * upcast(self.norm.weight)
        return (wide * F.silu(upcast(gate))).to(gate.dtype)


class ScaledMLP(GatedMLP):
    """A gated MLP with multipliers of its gate and of its output."""

    def __init__(
        self, hidden_size: int, intermediate_size: int, bias: bool, scales: list[float]
    ) -> None:
        super().__init__(hidden_size, intermediate_size, bias)
        self.scales = scales

    def forward(self, x: torch.Tensor, context: ForwardContext) -> torch.Tensor:
        gate, up = self.gate_up_proj(x).chunk(2, dim=-1)
        return self.down_proj(F.silu(gate * self.scales[0]).mul_(up)) * self.scales[1]


class FalconH1Block(nn.Module):
    """`x += scale * mamba(norm(x)) + scale * attention(scale * norm(x))`.

    Then `x += mlp(mlp_norm(x))`.
    """

    def __init__(self, file: ConfigFile, name: str, specs: Specs) -> None:
        super().__init__()
        eps = 1e-5
        order: Order = (
            "norm_first" if file.flag("mamba_norm_before_gate", default=True) else "gate_first"
        )
        self.norm = rms_norm(file, default=eps)
        self.mlp_norm = rms_norm(file, default=eps)
        self.mamba = mamba2(
            file,
            f"{name}.mamba",
            specs,
            ScaledMamba2Mixer,
            eps,
            out_bias=file.flag("projectors_bias", default=False),
            scale_in=file.number("ssm_in_multiplier", 1.0),
            scales=file.numbers("ssm_multipliers", 5),
            order=order if file.flag("mamba_rms_norm", default=False) else "none",
        )
        spec = cast(FullAttentionSpec, specs[f"{name}.attention"])
        # A multiple of all keys is a multiple of all scores.
        scale = spec.head_size**-0.5 * file.number("key_multiplier", 1.0)
        rope = read_rope(file, spec.head_size)
        self.attention = PagedAttention(file, f"{name}.attention", spec, rope=rope, scale=scale)
        self.mlp = ScaledMLP(
            file.size("hidden_size"),
            file.size("intermediate_size"),
            file.flag("mlp_bias", default=False),
            file.numbers("mlp_multipliers", 2),
        )
        number = partial(file.number, default=1.0)
        self.scale_in = number("attention_in_multiplier")
        self.scale_out = number("attention_out_multiplier")
        self.scale_mamba = number("ssm_out_multiplier")

    def forward(self, x: torch.Tensor, context: ForwardContext) -> torch.Tensor:
        normed = self.norm(x)
        attended = self.attention(normed * self.scale_in, context) * self.scale_out
        x = x + (self.mamba(normed, context) * self.scale_mamba + attended)
        return x + self.mlp(self.mlp_norm(x), context)


def build(file: ConfigFile, specs: Specs) -> nn.Module:
    """See `Family.build`."""
    layers = [
        FalconH1Block(file, f"layers.{i}", specs) for i in range(file.size("num_hidden_layers"))
    ]
    return CausalLM(
        file,
        specs,
        layers,
        rms_norm(file, default=1e-5),
        mamba_chunk_size=file.size("mamba_chunk_size", default=256),
        embedding_scale=file.number("embedding_multiplier", 1.0),
        logits_scale=file.number("lm_head_multiplier", 1.0),
    )


convert = partial(
    converted, prefixes=("model.",), names=NAMES | {"self_attn.": "attention.", "mamba.": "mamba."}
)

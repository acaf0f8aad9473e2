"""LFM2 and LFM2-MoE: attention with normed heads and, in most layers, a gated short convolution.

Source: Liquid AI's LFM2 (2025) and its implementation in transformers, which is the oracle of the
tests. A convolution keeps the last inputs and no state: rolling back a draft is reading them from
an earlier row.
"""

from __future__ import annotations

from functools import partial

import torch
from torch import nn

from hybrid_kv.cache.spec import FullAttentionSpec, KVCacheSpec
from hybrid_kv.models.attention import PagedAttention
from hybrid_kv.models.causal_lm import CausalLM, DecoderBlock, rms_norm
from hybrid_kv.models.config_file import ConfigFile
from hybrid_kv.models.layers import GatedMLP, Linear, RMSNorm
from hybrid_kv.models.mixers.conv import ConvMixer, Projected
from hybrid_kv.models.moe import MixtureOfExperts, sigmoid_route
from hybrid_kv.models.rope import read_rope
from hybrid_kv.models.weights import converted


class ShortConv(ConvMixer):
    """`out_proj(C * conv(B * x))`; `in_proj` gives B, C and x."""

    def __init__(self, name: str, hidden_size: int, kernel: int, bias: bool) -> None:
        super().__init__(name, hidden_size, kernel, bias, silu=False)
        self.in_proj = Linear(hidden_size, 3 * hidden_size, bias)
        self.out_proj = Linear(hidden_size, hidden_size, bias)

    def project(self, x: torch.Tensor) -> Projected:
        before, behind, x = self.in_proj(x).chunk(3, dim=-1)
        return Projected(before * x, (), (behind,))

    def finish(self, mixed: torch.Tensor, rest: tuple[torch.Tensor, ...]) -> torch.Tensor:
        return self.out_proj(mixed * rest[0])


def _attention(file: ConfigFile, name: str, spec: FullAttentionSpec) -> PagedAttention:
    size = spec.head_size
    eps = file.number("norm_eps", 1e-5)
    norms = RMSNorm(size, eps), RMSNorm(size, eps)
    return PagedAttention(file, name, spec, rope=read_rope(file, size, 1e6), norms=norms)


def _dense_size(file: ConfigFile) -> int:
    """Return the size of an MLP.

    Some checkpoints name it before it was cut to two thirds and rounded up.
    """
    size = file.size("block_ff_dim", "intermediate_size")
    if file.model_type == "lfm2_moe" or not file.flag("block_auto_adjust_ff_dim", default=True):
        return size
    multiple = file.size("block_multiple_of", default=256)
    return (
        -(-int(file.number("block_ffn_dim_multiplier", 1.0) * int(2 * size / 3)) // multiple)
        * multiple
    )


def _experts(file: ConfigFile) -> MixtureOfExperts:
    hidden_size, num_experts, size = map(
        file.size, ("hidden_size", "num_experts", "moe_intermediate_size")
    )
    has_bias = file.flag("use_expert_bias", default=True)
    route = sigmoid_route(file, 1e-6, file.size("num_experts_per_tok", default=4, most=num_experts))
    return MixtureOfExperts(
        hidden_size,
        num_experts,
        size,
        route if has_bias else partial(route, bias=None),
        correction_bias=has_bias,
    )


def build(file: ConfigFile, layer_specs: dict[str, KVCacheSpec]) -> nn.Module:
    """See `Family.build`."""
    hidden_size = file.size("hidden_size")
    norm = partial(rms_norm, file, "norm_eps", 1e-5)
    num_dense = (
        file.count("num_dense_layers", 2) if file.model_type == "lfm2_moe" else len(layer_specs)
    )
    layers = []
    for i, (name, spec) in enumerate(layer_specs.items()):
        mixer: nn.Module
        if isinstance(spec, FullAttentionSpec):
            mixer = _attention(file, name, spec)
        else:
            mixer = ShortConv(
                name,
                hidden_size,
                file.size("conv_L_cache", default=3),
                file.flag("conv_bias", default=False),
            )
        mlp = GatedMLP(hidden_size, _dense_size(file)) if i < num_dense else _experts(file)
        layers.append(DecoderBlock(norm(), mixer, norm(), mlp))
    tied = file.flag("tie_embedding", default=True)
    return CausalLM(file, layer_specs, layers, norm(), tied=tied)


NAMES = {
    "embedding_norm.": "norm.",
    ".operator_norm.": ".norm.",
    ".ffn_norm.": ".mlp_norm.",
    ".conv.conv.": ".mixer.conv1d.",
    ".conv.": ".mixer.",
    ".self_attn.out_proj.": ".mixer.o_proj.",
    ".self_attn.": ".mixer.",
    "_layernorm.": "_norm.",
    ".feed_forward.expert_bias": ".mlp.correction_bias",
    ".feed_forward.": ".mlp.",
    ".w1.": ".gate_proj.",
    ".w2.": ".down_proj.",
    ".w3.": ".up_proj.",
}


# The hub has a tensor for each expert, transformers one for all.
convert = partial(converted, prefixes=("model.",), names=NAMES)

"""OLMo-Hybrid: gated delta nets with eigenvalues from -1 on, every fourth layer attention.

Attention layers have their norms after the mixer.

Source: Ai2's OLMo-Hybrid (2026) and its implementation in transformers, which is the oracle of the
tests. Layers with a delta net have their norms in front. Queries and keys are normed over all heads
at once. Published models have no RoPE.
"""

from __future__ import annotations

import torch
from torch import nn

from hybrid_kv.cache.spec import FullAttentionSpec, KVCacheSpec
from hybrid_kv.models.attention import PagedAttention
from hybrid_kv.models.causal_lm import CausalLM, DecoderBlock, rms_norm
from hybrid_kv.models.config_file import ConfigFile
from hybrid_kv.models.layers import ForwardContext, GatedMLP, RMSNorm
from hybrid_kv.models.qwen3_5 import delta_net
from hybrid_kv.models.rope import Rope, read_rope
from hybrid_kv.models.weights import Tensors, converted, joined, renamed


class PostNormBlock(nn.Module):
    """`x += norm(mixer(x))`, then `x += mlp_norm(mlp(x))`."""

    def __init__(
        self, mixer: nn.Module, norm: nn.Module, mlp: nn.Module, mlp_norm: nn.Module
    ) -> None:
        super().__init__()
        self.mixer = mixer
        self.norm = norm
        self.mlp = mlp
        self.mlp_norm = mlp_norm

    def forward(self, x: torch.Tensor, context: ForwardContext) -> torch.Tensor:
        x = x + self.norm(self.mixer(x, context))
        return x + self.mlp_norm(self.mlp(x, context))


def _rope(file: ConfigFile, head_size: int) -> Rope | None:
    parameters = file.get("rope_parameters") or {}
    has_base = file.get("rope_theta") is not None or (
        isinstance(parameters, dict) and parameters.get("rope_theta")
    )
    return read_rope(file, head_size) if has_base else None


def _attention(file: ConfigFile, name: str, spec: FullAttentionSpec) -> nn.Module:
    size = spec.head_size
    eps = file.number("rms_norm_eps", 1e-6)
    norms = (
        RMSNorm(file.size("num_attention_heads") * size, eps),
        RMSNorm(spec.num_kv_heads * size, eps),
    )
    return PagedAttention(file, name, spec, rope=_rope(file, size), norms=norms)


def build(file: ConfigFile, layer_specs: dict[str, KVCacheSpec]) -> nn.Module:
    """See `Family.build`."""
    file.only("hidden_act", "silu")
    # The norm's epsilon is fixed, whatever `rms_norm_eps` says.
    beta_scale = 2.0 if file.flag("linear_allow_neg_eigval", default=True) else 1.0
    layers: list[nn.Module] = []
    for name, spec in layer_specs.items():
        norms = rms_norm(file), rms_norm(file)
        mlp = GatedMLP(file.size("hidden_size"), file.size("intermediate_size"))
        if isinstance(spec, FullAttentionSpec):
            layers.append(PostNormBlock(_attention(file, name, spec), norms[0], mlp, norms[1]))
        else:
            layers.append(
                DecoderBlock(
                    norms[0],
                    delta_net(file, name, spec, eps=1e-5, beta_scale=beta_scale),
                    norms[1],
                    mlp,
                )
            )
    return CausalLM(file, layer_specs, layers, rms_norm(file))


# In the order of `GatedDeltaMixer.in_proj`.
_PROJECTIONS = tuple(f"delta_{letter}" for letter in "qkvgba")
_NAMES = {
    **{f".linear_attn.{letter}_proj.": f".mixer.delta_{letter}." for letter in "qkvgba"},
    ".linear_attn.o_proj.": ".mixer.out_proj.",
    ".linear_attn.o_norm.": ".mixer.norm.",
    ".linear_attn.": ".mixer.",
    ".self_attn.": ".mixer.",
    ".input_layernorm.": ".norm.",
    ".post_attention_layernorm.": ".mlp_norm.",
    ".post_feedforward_layernorm.": ".mlp_norm.",
}
# Of Ai2's checkpoints; transformers writes the second one for attention layers, too.
_OLDER = {
    ".attention_layer_norm.": ".input_layernorm.",
    ".feedforward_layer_norm.": ".post_attention_layernorm.",
}


def convert(tensors: Tensors) -> Tensors:
    """See `Family.convert_weights`."""
    tensors = joined(
        renamed(tensors, ("model.",), _OLDER), ("q_conv1d", "k_conv1d", "v_conv1d"), "conv1d"
    )
    attend = {name.partition(".self_attn.")[0] for name in tensors if ".self_attn." in name}
    post_norms = {
        f"{layer}.post_attention_layernorm.": f"{layer}.norm." for layer in sorted(attend)
    }
    return joined(converted(tensors, (), post_norms | _NAMES), _PROJECTIONS, "in_proj")

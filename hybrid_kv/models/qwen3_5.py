"""Qwen3.5 and Qwen3.6: gated delta nets, every fourth layer gated attention, MLP or experts.

Source: Qwen3.5 (2026) and its implementation in transformers, which is the oracle of the tests; it
has no draft head, whose form is that of vLLM 0.32 (`qwen3_5_mtp.py`). The functions that are public
here are those that Qwen3-Next shares.

A multimodal checkpoint (`qwen3_5`, `qwen3_5_moe`) runs as its language model: without images a
token's three positions are one.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from torch import nn

from hybrid_kv.cache.spec import FullAttentionSpec, KVCacheSpec
from hybrid_kv.kernels.moe import route_softmax
from hybrid_kv.models.attention import PagedAttention
from hybrid_kv.models.causal_lm import CausalLM, DecoderBlock, rms_norm
from hybrid_kv.models.config_file import ConfigFile
from hybrid_kv.models.layers import GatedMLP, RMSNorm
from hybrid_kv.models.mixers.gated_delta import GatedDeltaMixer
from hybrid_kv.models.moe import MixtureOfExperts
from hybrid_kv.models.rope import read_rope
from hybrid_kv.models.specs import chunk_size
from hybrid_kv.models.weights import Tensors, converted, joined

MLP = Callable[[ConfigFile, int], nn.Module]  # of a layer by its number
SCAN_CHUNK = 64  # tokens; flash-linear-attention's

norm = partial(rms_norm, centred=True)


def attention(
    file: ConfigFile,
    name: str,
    spec: FullAttentionSpec,
    kind: type[PagedAttention] = PagedAttention,
) -> nn.Module:
    """Build gated attention: norms of queries and keys, RoPE of a quarter of the channels."""
    file.only("attn_output_gate", supported=True)
    size = spec.head_size
    eps = file.number("rms_norm_eps", 1e-6)
    norms = RMSNorm(size, eps, centred=True), RMSNorm(size, eps, centred=True)
    return kind(file, name, spec, rope=read_rope(file, size, share=0.25), norms=norms, gated=True)


def delta_net(
    file: ConfigFile,
    name: str,
    spec: KVCacheSpec,
    kind: type[GatedDeltaMixer] = GatedDeltaMixer,
    eps: float | None = None,
    beta_scale: float = 1.0,
) -> nn.Module:
    """Build the gated delta net; `eps` is `rms_norm_eps` unless given."""
    return kind(
        name,
        file.size("hidden_size"),
        spec,
        chunk_size=min(SCAN_CHUNK, chunk_size(file)),
        eps=file.number("rms_norm_eps", 1e-6) if eps is None else eps,
        beta_scale=beta_scale,
    )


def dense_mlp(file: ConfigFile) -> nn.Module:
    """Build `down(silu(gate(x)) * up(x))`."""
    return GatedMLP(file.size("hidden_size"), file.size("intermediate_size"))


def experts(
    file: ConfigFile, renormalise: bool = True, shared_gate: bool = True, wide_gate: bool = False
) -> nn.Module:
    """Build a mixture of experts and one that sees every token.

    See `MixtureOfExperts` for the gates.
    """
    size = file.size("hidden_size")
    count = file.size("num_experts")
    chosen = file.size("num_experts_per_tok", most=count)
    return MixtureOfExperts(
        size,
        count,
        file.size("moe_intermediate_size"),
        partial(route_softmax, top_k=chosen, renormalise=renormalise),
        shared=GatedMLP(size, file.size("shared_expert_intermediate_size")),
        shared_gate=shared_gate,
        wide_gate=wide_gate,
    )


def mlp(file: ConfigFile, layer: int) -> nn.Module:
    """Build the experts of each layer of a mixture, or the MLP."""
    return experts(file) if file.model_type.startswith("qwen3_5_moe") else dense_mlp(file)


def build(
    file: ConfigFile,
    layer_specs: dict[str, KVCacheSpec],
    mlp: MLP = mlp,
    kind: type[GatedDeltaMixer] = GatedDeltaMixer,
) -> CausalLM:
    """Build the decoder; `mlp` gets the number of its layer, `kind` is that of the delta nets."""
    file.only("hidden_act", "silu")
    layers = []
    for i, (name, spec) in enumerate(layer_specs.items()):
        if isinstance(spec, FullAttentionSpec):
            mixer = attention(file, name, spec)
        else:
            mixer = delta_net(file, name, spec, kind)
        layers.append(DecoderBlock(norm(file), mixer, norm(file), mlp(file, i)))
    return CausalLM(file, layer_specs, layers, norm(file))


_NAMES = {
    ".linear_attn.": ".mixer.",
    ".self_attn.": ".mixer.",
    ".input_layernorm.": ".norm.",
    ".post_attention_layernorm.": ".mlp_norm.",
}


def convert(
    tensors: Tensors,
    projections: tuple[str, ...] = ("in_proj_qkv", "in_proj_z", "in_proj_b", "in_proj_a"),
) -> Tensors:
    """Convert a checkpoint.

    Args:
        projections: of a delta net, in the order of `GatedDeltaMixer.in_proj`.
    """
    return joined(
        converted(tensors, ("model.language_model.", "model."), _NAMES), projections, "in_proj"
    )

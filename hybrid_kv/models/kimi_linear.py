"""Kimi-Linear: Kimi Delta Attention, every fourth layer latent attention, then an MLP or experts.

Source: Moonshot AI's Kimi Linear (2025, arXiv 2510.26692) and transformers' implementation, which
is the oracle of the tests. Order comes from the recurrent layers alone.
"""

from __future__ import annotations

from functools import partial

from torch import nn

from hybrid_kv.cache.spec import KVCacheSpec, MambaSpec
from hybrid_kv.models.causal_lm import CausalLM, DecoderBlock, rms_norm
from hybrid_kv.models.config_file import ConfigFile
from hybrid_kv.models.layers import GatedMLP
from hybrid_kv.models.mixers.kda import KDAMixer
from hybrid_kv.models.mla import LatentAttention
from hybrid_kv.models.moe import MixtureOfExperts, sigmoid_route
from hybrid_kv.models.specs import chunk_size
from hybrid_kv.models.weights import Tensors, converted, joined, renamed

_FIXED = {
    "hidden_act": "silu",
    "mla_use_nope": True,
    "moe_router_activation_func": "sigmoid",
    "moe_layer_freq": 1,
}


def _mixer(file: ConfigFile, name: str, spec: KVCacheSpec) -> nn.Module:
    if not isinstance(spec, MambaSpec):
        return LatentAttention(file, name)
    return KDAMixer(
        name, file.size("hidden_size"), spec, chunk_size(file), file.number("rms_norm_eps", 1e-5)
    )


def experts(file: ConfigFile) -> MixtureOfExperts:
    """Build the experts of one layer, with one shared MLP."""
    size = file.size("moe_intermediate_size")
    hidden_size = file.size("hidden_size")
    num_experts = file.size("num_local_experts", "num_experts")
    num_groups = file.size("n_group", "num_expert_group", default=1)
    if num_experts % num_groups:
        raise file.fail(
            f"{num_experts} experts cannot be in {num_groups} groups; correct num_experts or "
            "n_group"
        )
    top_k = file.size("num_experts_per_tok", "num_experts_per_token", most=num_experts)
    top_k_groups = file.size("topk_group", default=1, most=num_groups)
    renormalise = file.flag("moe_renormalize", default=True)
    route = sigmoid_route(file, 1e-20, top_k, num_groups, top_k_groups, renormalise)
    shared = GatedMLP(
        hidden_size, size * file.size("n_shared_experts", "num_shared_experts", default=1)
    )
    return MixtureOfExperts(
        hidden_size, num_experts, size, route, shared=shared, correction_bias=True, wide_gate=True
    )


def dense_layers(file: ConfigFile, num_layers: int, default: int = 1) -> list[bool]:
    """Return, per layer, whether an MLP follows, not experts: by default, of the first ones."""
    kinds = file.get("mlp_layer_types")
    if kinds is None:
        return [i < file.count("first_k_dense_replace", default) for i in range(num_layers)]
    if (
        not isinstance(kinds, list)
        or len(kinds) != num_layers
        or any(k not in ("dense", "sparse") for k in kinds)
    ):
        raise file.fail(
            f"mlp_layer_types={kinds!r} must name {num_layers} layers, each dense or sparse"
        )
    return [kind == "dense" for kind in kinds]


def build(file: ConfigFile, specs: dict[str, KVCacheSpec]) -> nn.Module:
    """See `Family.build`."""
    for fixed in _FIXED.items():
        file.only(*fixed)
    hidden_size = file.size("hidden_size")
    norm = partial(rms_norm, file, default=1e-5)
    layers = []
    for (name, spec), dense in zip(specs.items(), dense_layers(file, len(specs)), strict=True):
        mlp = GatedMLP(hidden_size, file.size("intermediate_size")) if dense else experts(file)
        layers.append(DecoderBlock(norm(), _mixer(file, name, spec), norm(), mlp))
    return CausalLM(file, specs, layers, norm())


_NAMES = {
    "post_attention_layernorm.": "mlp_norm.",
    "input_layernorm.": "norm.",
    "self_attn.forget_gate.": "mixer.",
    "self_attn.o_norm.": "mixer.norm.",
    "self_attn.": "mixer.",
    "_a_layernorm.": "_a_norm.",
    "kv_a_proj_with_mqa.": "kv_a_proj.",
    "q_b_proj.": "query_proj.",
    "block_sparse_moe.": "mlp.",
    "gate.e_score_correction_bias": "correction_bias",
    "shared_experts.": "shared_expert.",
    ".w1.": ".gate_proj.",
    ".w2.": ".down_proj.",
    ".w3.": ".up_proj.",
}
_IN = ("q_proj", "k_proj", "v_proj", "f_a_proj", "b_proj", "g_a_proj")


def convert(tensors: Tensors) -> Tensors:
    """Convert a checkpoint.

    The hub has a tensor for each convolution and each expert, transformers one for all.
    """
    named = renamed(
        joined(tensors, ("q_conv1d", "k_conv1d", "v_conv1d"), "conv1d"), ("model.",), _NAMES
    )
    latent = tuple(
        name.removesuffix("kv_a_proj.weight")
        for name in named
        if name.endswith(".kv_a_proj.weight")
    )
    flat: Tensors = {}
    for name, tensor in named.items():
        flat[name.replace(".q_proj.", ".query_proj.") if name.startswith(latent) else name] = tensor
        if name.endswith(".A_log"):
            flat[name] = tensor.flatten()  # [1, 1, heads, 1]
    return converted(joined(flat, _IN, "in_proj"), (), {})

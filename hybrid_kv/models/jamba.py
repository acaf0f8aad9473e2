"""Jamba: Mamba-1, here and there attention without positions, and after either an MLP or experts.

Source: AI21's Jamba (2024, arXiv 2403.19887) and transformers' implementation, which is the oracle
of the tests, but not in chunks on a cache: there its Mamba layers forget the state.
"""

from __future__ import annotations

from functools import partial
from typing import cast

from torch import nn

from hybrid_kv.cache.spec import FullAttentionSpec, KVCacheSpec, MambaSpec
from hybrid_kv.kernels.moe import route_softmax
from hybrid_kv.models.attention import PagedAttention
from hybrid_kv.models.causal_lm import CausalLM, DecoderBlock, rms_norm
from hybrid_kv.models.config_file import ConfigFile
from hybrid_kv.models.families import is_every
from hybrid_kv.models.layers import GatedMLP, RMSNorm
from hybrid_kv.models.mixers.mamba1 import Mamba1Mixer, dt_rank
from hybrid_kv.models.moe import MixtureOfExperts
from hybrid_kv.models.weights import converted


def _mixer(file: ConfigFile, name: str, spec: KVCacheSpec) -> nn.Module:
    if isinstance(spec, FullAttentionSpec):
        return PagedAttention(file, name, spec)
    return Mamba1Mixer(
        name,
        file.size("hidden_size"),
        cast(MambaSpec, spec),
        dt_rank(file, "mamba_dt_rank"),
        partial(RMSNorm, eps=file.number("rms_norm_eps", 1e-6)),
        conv_bias=file.flag("mamba_conv_bias", default=True),
        bias=file.flag("mamba_proj_bias", default=False),
    )


def build(file: ConfigFile, specs: dict[str, KVCacheSpec]) -> nn.Module:
    """See `Family.build`."""
    for key, supported in (
        ("hidden_act", "silu"),
        ("mamba_inner_layernorms", True),
        ("sliding_window", None),
    ):
        file.only(key, supported)
    hidden_size = file.size("hidden_size")
    size = file.size("intermediate_size")
    num_experts = file.size("num_experts", default=16)
    has_experts = is_every(file, "expert_layer", 2, 1)

    def layer(i: int, name: str) -> nn.Module:
        mlp: nn.Module
        if num_experts > 1 and has_experts[i]:
            top_k = file.size("num_experts_per_tok", default=2, most=num_experts)
            route = partial(route_softmax, top_k=top_k, renormalise=False)
            mlp = MixtureOfExperts(hidden_size, num_experts, size, route)
        else:
            mlp = GatedMLP(hidden_size, size)
        return DecoderBlock(rms_norm(file), _mixer(file, name, specs[name]), rms_norm(file), mlp)

    layers = [layer(i, name) for i, name in enumerate(specs)]
    return CausalLM(file, specs, layers, rms_norm(file))


_NAMES = {
    "final_layernorm.": "norm.",
    "pre_ff_layernorm.": "mlp_norm.",
    "input_layernorm.": "norm.",
    "mamba.dt_layernorm.": "mixer.dt_norm.",
    "mamba.b_layernorm.": "mixer.B_norm.",
    "mamba.c_layernorm.": "mixer.C_norm.",
    "mamba.": "mixer.",
    "self_attn.": "mixer.",
    "feed_forward.router.": "mlp.gate.",
    "feed_forward.": "mlp.",
}


# The hub has a tensor for each expert, transformers one for all.
convert = partial(converted, prefixes=("model.",), names=_NAMES)

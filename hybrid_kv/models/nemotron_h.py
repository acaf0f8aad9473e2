"""NemotronH: pre-normed layers of one mixer each: Mamba-2, attention, squared-ReLU MLP or experts.

Source: NVIDIA Nemotron-H (2025) and its implementation in transformers, which is the oracle of the
tests. One deliberate difference: transformers clamps the time step from below by `time_step_min`
when it runs a chunk, but not when it runs a single token; here, as in vLLM, it is never clamped, so
that a token means the same in both.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from torch import nn

from hybrid_kv.cache.spec import KVCacheSpec
from hybrid_kv.models.attention import PagedAttention
from hybrid_kv.models.causal_lm import CausalLM, MixerBlock, mamba_norm
from hybrid_kv.models.config_file import ConfigFile
from hybrid_kv.models.layers import SquaredReluMLP
from hybrid_kv.models.mamba2 import mixer
from hybrid_kv.models.moe import MixtureOfExperts, relu2, sigmoid_route
from hybrid_kv.models.specs import ATTENTION, MLP, MOE, layer_kinds
from hybrid_kv.models.weights import converted


def _mlp(file: ConfigFile) -> nn.Module:
    return SquaredReluMLP(
        file.size("hidden_size"),
        file.size("intermediate_size"),
        file.flag("mlp_bias", default=False),
    )


def _moe(file: ConfigFile) -> nn.Module:
    size = file.size("hidden_size")
    bias = file.flag("mlp_bias", default=False)
    num_experts = file.size("n_routed_experts")
    file.only("n_shared_experts", 1)
    top_k = file.size("num_experts_per_tok")
    groups = file.size("n_group", default=1)
    top_k_groups = file.size("topk_group", default=1)
    if (
        num_experts % groups
        or top_k_groups > groups
        or top_k > num_experts // groups * top_k_groups
    ):
        raise file.fail(
            f"num_experts_per_tok={top_k} of topk_group={top_k_groups} out of n_group={groups} "
            "groups can't be chosen "
            f"from n_routed_experts={num_experts}; correct the file"
        )
    return MixtureOfExperts(
        size,
        num_experts,
        file.size("moe_intermediate_size"),
        sigmoid_route(file, 1e-20, top_k, groups, top_k_groups),
        relu2,
        SquaredReluMLP(size, file.size("moe_shared_expert_intermediate_size"), bias),
        correction_bias=True,
        wide_gate=True,
        latent_size=file.maybe_size("moe_latent_size"),
        latent_bias=bias,
    )


# Kind of a layer that keeps no cache to its mixer, which is called with (x, context).
MLPS: dict[str, Callable[[ConfigFile], nn.Module]] = {MLP: _mlp, MOE: _moe}


def build(file: ConfigFile, layer_specs: dict[str, KVCacheSpec]) -> nn.Module:
    """See `Family.build`."""
    file.only("mlp_hidden_act", "relu2")
    file.only("mamba_hidden_act", "silu")
    chunk_size = file.size("chunk_size", default=128)

    def own_mixer(name: str, kind: str) -> nn.Module:
        if kind in MLPS:
            return MLPS[kind](file)
        if kind == ATTENTION:
            return PagedAttention(file, name, layer_specs[name])
        return mixer(file, name, layer_specs[name], chunk_size)

    kinds = enumerate(layer_kinds(file))
    layers = [MixerBlock(mamba_norm(file), own_mixer(f"layers.{i}", kind)) for i, kind in kinds]
    return CausalLM(file, layer_specs, layers, mamba_norm(file), mamba_chunk_size=chunk_size)


_NAMES = {
    "embeddings.": "embed_tokens.",
    "norm_f.": "norm.",
    "gate.e_score_correction_bias": "correction_bias",
    "shared_experts.": "shared_expert.",
    "fc1_latent_proj.": "latent_in.",
    "fc2_latent_proj.": "latent_out.",
}


convert = partial(converted, prefixes=("backbone.", "model."), names=_NAMES)

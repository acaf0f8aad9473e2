"""Ling-3: Kimi Delta Attention with a bounded decay, every sixth layer latent attention.

Source: inclusionAI's Ling-3 (2026) and its implementation in transformers, which is the oracle of
the tests. Latent attention has RoPE and a gate for each head; after it an MLP or experts.
"""

from __future__ import annotations

from functools import partial
from math import inf

from torch import nn

from hybrid_kv.cache.spec import KVCacheSpec, MambaSpec
from hybrid_kv.models import kimi_linear
from hybrid_kv.models.causal_lm import CausalLM, DecoderBlock, rms_norm
from hybrid_kv.models.config_file import ConfigFile, shown
from hybrid_kv.models.kimi_linear import dense_layers, experts
from hybrid_kv.models.layers import GatedMLP
from hybrid_kv.models.mixers.kda import BoundedKDAMixer, KDAMixer
from hybrid_kv.models.mla import GatedLatentAttention
from hybrid_kv.models.rope import Rope, read_rope
from hybrid_kv.models.specs import chunk_size
from hybrid_kv.models.weights import Tensors, renamed

_DEFAULTS = {"num_expert_group": 8, "topk_group": 4, "routed_scaling_factor": 2.5}


def _mixer(file: ConfigFile, name: str, spec: KVCacheSpec) -> nn.Module:
    if not isinstance(spec, MambaSpec):
        return GatedLatentAttention(file, name, _rope(file))
    is_bounded = file.flag("kda_safe_gate", default=True)
    kind = partial(BoundedKDAMixer, bound=_bound(file)) if is_bounded else KDAMixer
    eps = file.number("rms_norm_eps", 1e-6)
    return kind(name, file.size("hidden_size"), spec, chunk_size(file), eps, has_low_rank=False)


def _rope(file: ConfigFile) -> Rope:
    rope = read_rope(file, file.size("qk_rope_head_dim"), theta=6e6)
    ConfigFile(file.get("rope_parameters", "rope_scaling") or {}, file.source).only(
        "mscale_all_dim", 0
    )  # it would scale the scores
    return rope


def _bound(file: ConfigFile) -> float:
    given = file.get("kda_lower_bound")
    bound = -5.0 if given is None else given
    if not isinstance(bound, int | float) or isinstance(bound, bool) or not -inf < bound < 0:
        raise file.fail(f"kda_lower_bound={shown(given)} must be a number below 0")
    return float(-bound)


def build(file: ConfigFile, layer_specs: dict[str, KVCacheSpec]) -> nn.Module:
    """See `Family.build`."""
    file.only("hidden_act", "silu")
    file = ConfigFile({**_DEFAULTS, **file.values}, file.source)
    hidden_size = file.size("hidden_size")
    dense = dense_layers(file, len(layer_specs), default=2)
    layers = []
    for (name, spec), is_dense in zip(layer_specs.items(), dense, strict=True):
        size = file.size("intermediate_size")
        mlp = GatedMLP(hidden_size, size) if is_dense else experts(file)
        layers.append(DecoderBlock(rms_norm(file), _mixer(file, name, spec), rms_norm(file), mlp))
    return CausalLM(file, layer_specs, layers, rms_norm(file))


_NAMES = {
    "model.word_embeddings.": "model.embed_tokens.",
    ".attention.": ".self_attn.",
    ".self_attn.dense.": ".self_attn.o_proj.",
    ".gate.expert_bias": ".gate.e_score_correction_bias",
    ".forget_gate.": ".",
}


def convert(tensors: Tensors) -> Tensors:
    """Convert a checkpoint, under the names of the hub or those of transformers.

    The hub's has a draft head after the layers of the model, which is left out.
    """
    named = renamed(tensors, (), _NAMES)
    of_heads = _stems(named, "eh_proj.weight")
    latent = _stems(named, "kv_a_proj_with_mqa.weight")
    # Kimi-Linear's names of projections of low rank: these here have no second one.
    return kimi_linear.convert(
        {
            name.replace(".g_proj.", ".head_gate.")
            if name.startswith(latent)
            else name.replace(".g_proj.", ".g_a_proj.").replace(".f_proj.", ".f_a_proj."): tensor
            for name, tensor in named.items()
            if not name.startswith(of_heads)
        }
    )


def _stems(tensors: Tensors, end: str) -> tuple[str, ...]:
    return tuple(name.removesuffix(end) for name in tensors if name.endswith(end))

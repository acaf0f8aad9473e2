"""Granite-SWA: attention with sinks, in most layers over a window, then an MLP or experts.

Each layer rotates queries and keys by a base of its own, or not at all. No layer keeps a state.
Four numbers scale embeddings, branches, scores and logits, as in Granite-4-H. Source: IBM's
Granite-SWA (2026) and its implementation in transformers, which is the oracle of the tests.
"""

from __future__ import annotations

from functools import partial
from typing import cast

from torch import nn

from hybrid_kv.cache.spec import FullAttentionSpec
from hybrid_kv.kernels.moe import route_topk_softmax
from hybrid_kv.models.attention import SinkAttention
from hybrid_kv.models.bamba import Specs
from hybrid_kv.models.causal_lm import CausalLM, DecoderBlock, rms_norm
from hybrid_kv.models.config_file import ConfigFile, shown
from hybrid_kv.models.granitemoehybrid import convert
from hybrid_kv.models.layers import GatedMLP
from hybrid_kv.models.moe import MixtureOfExperts
from hybrid_kv.models.rope import Rope, read_rope

__all__ = ["build", "convert"]


def _ropes(file: ConfigFile, head_size: int) -> list[Rope | None]:
    """Return each layer's rotation, of the base that `layer_rope_theta` gives it; None for 0.

    Without that list all layers have the file's own.
    """
    num_layers = file.size("num_hidden_layers")
    bases = file.get("layer_rope_theta")
    common = read_rope(file, head_size)
    if bases is None:
        return [common] * num_layers
    if not isinstance(bases, list) or len(bases) != num_layers:
        raise file.fail(
            f"layer_rope_theta={shown(bases)} must be a list of {num_layers} numbers, one a layer; "
            "correct the file"
        )
    return [None if base == 0 else _rope(file, head_size, base) for base in bases]


def _rope(file: ConfigFile, head_size: int, base: object) -> Rope:
    ConfigFile({"layer_rope_theta": base}, file.source).number("layer_rope_theta", 0.0)
    given = file.get("rope_parameters", "rope_scaling") or {}
    return read_rope(
        ConfigFile({**file.values, "rope_parameters": {**given, "rope_theta": base}}, file.source),
        head_size,
    )


def _mlp(file: ConfigFile) -> nn.Module:
    hidden_size, size = file.size("hidden_size"), file.size("intermediate_size")
    if file.model_type == "granite_swa":
        return GatedMLP(hidden_size, size, file.flag("mlp_bias", default=False))
    num_experts = file.size("num_local_experts", default=8)
    top_k = file.size("num_experts_per_tok", default=2, most=num_experts)
    shared_size = file.count("shared_intermediate_size", default=0)
    return MixtureOfExperts(
        hidden_size,
        num_experts,
        size,
        partial(route_topk_softmax, top_k=top_k),
        shared=GatedMLP(hidden_size, shared_size) if shared_size else None,
    )


def build(file: ConfigFile, specs: Specs) -> nn.Module:
    """See `Family.build`."""
    file.only("hidden_act", "silu")
    is_dense = file.model_type == "granite_swa"
    norm = partial(rms_norm, file, default=1e-5 if is_dense else 1e-6)
    scale = file.number("attention_multiplier", 1.0)
    residual_scale = file.number("residual_multiplier", 1.0)
    head_size = cast(FullAttentionSpec, next(iter(specs.values()))).head_size
    layers = [
        DecoderBlock(
            norm(),
            SinkAttention(file, name, spec, rope=rope, scale=scale),
            norm(),
            _mlp(file),
            residual_scale,
        )
        for (name, spec), rope in zip(specs.items(), _ropes(file, head_size), strict=True)
    ]
    return CausalLM(
        file,
        specs,
        layers,
        norm(),
        embedding_scale=file.number("embedding_multiplier", 1.0),
        logits_scale=1 / file.number("logits_scaling", 1.0),
        tied=is_dense,
    )

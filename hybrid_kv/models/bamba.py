"""Bamba: Mamba-2 or attention over half of each head's channels rotated, and a gated MLP behind either.

Source: IBM's Bamba (2024) and its implementation in transformers, which is the oracle of the tests. Granite-4-H and
Falcon-H1 name their layers' sizes as it does.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any, cast

from torch import nn

from hybrid_kv.cache.spec import FullAttentionSpec, KVCacheSpec
from hybrid_kv.models.attention import PagedAttention
from hybrid_kv.models.causal_lm import CausalLM, DecoderBlock, rms_norm
from hybrid_kv.models.config_file import ConfigFile
from hybrid_kv.models.families import bamba_kinds
from hybrid_kv.models.layers import GatedMLP
from hybrid_kv.models.mixers.mamba2 import Mamba2Mixer, check_time_steps
from hybrid_kv.models.rope import Rope, read_rope
from hybrid_kv.models.specs import MAMBA
from hybrid_kv.models.weights import Tensors, converted

Specs = dict[str, KVCacheSpec]


def mamba2(file: ConfigFile, name: str, specs: Specs, kind: type[Mamba2Mixer], eps: float, **options: Any) -> nn.Module:
    """A Mamba-2 layer, of the sizes of its cache.

    Args:
        kind: `Mamba2Mixer`, or a family's own.
        eps: of its norm, where the file names none.
        options: of the mixer.
    """
    file.only("hidden_act", "silu")
    check_time_steps(file)
    return kind(
        name,
        file.size("hidden_size"),
        specs[name],
        chunk_size=file.size("mamba_chunk_size", default=256),
        eps=file.number("rms_norm_eps", eps),
        conv_bias=file.flag("mamba_conv_bias", True),
        bias=file.flag("mamba_proj_bias", False),
        **options,
    )


def attention(
    file: ConfigFile, name: str, specs: Specs, rope: Rope | None, scale: float | None = None
) -> PagedAttention:
    """An attention layer, of the sizes of its cache."""
    spec = cast(FullAttentionSpec, specs[name])
    heads = file.size("num_attention_heads"), spec.num_kv_heads, spec.head_size
    bias = file.flag("attention_bias", False)
    return PagedAttention(name, file.size("hidden_size"), *heads, bias=bias, rope=rope, scale=scale)


def _rope(file: ConfigFile, head_size: int) -> Rope:
    # Whatever the older key of this name says, transformers takes a half; `rope_parameters` may say another.
    rope = read_rope(replace(file, values={**file.values, "partial_rotary_factor": 0.5}), head_size)
    if (channels := file.maybe_size("attn_rotary_emb")) not in (None, 2 * len(rope.frequencies)):
        raise file.fail(f"attn_rotary_emb={channels}, but {2 * len(rope.frequencies)} channels are rotated; remove it")
    return rope


def build(file: ConfigFile, specs: Specs) -> nn.Module:
    """See `Family.build`."""
    size, inner, bias = file.size("hidden_size"), file.size("intermediate_size"), file.flag("mlp_bias", False)

    def layer(name: str, kind: str) -> nn.Module:
        mixer: nn.Module
        if kind == MAMBA:
            mixer = mamba2(file, name, specs, Mamba2Mixer, 1e-5)
        else:
            mixer = attention(file, name, specs, _rope(file, cast(FullAttentionSpec, specs[name]).head_size))
        norms = (rms_norm(file, default=1e-5) for _ in range(2))
        return DecoderBlock(next(norms), mixer, next(norms), GatedMLP(size, inner, bias))

    layers = [layer(f"layers.{i}", kind) for i, kind in enumerate(bamba_kinds(file))]
    chunk_size = file.size("mamba_chunk_size", default=256)
    return CausalLM(file, specs, layers, rms_norm(file, default=1e-5), mamba_chunk_size=chunk_size)


NAMES = {
    "final_layernorm.": "norm.",
    "feed_forward.": "mlp.",
    "pre_ff_layernorm.": "mlp_norm.",
    "input_layernorm.": "norm.",
    "self_attn.": "mixer.",
    "mamba.": "mixer.",
}


def convert(tensors: Tensors) -> Tensors:
    """See `Family.convert_weights`."""
    return converted(tensors, ("model.",), NAMES)

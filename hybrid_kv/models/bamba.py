"""Bamba: Mamba-2 or attention over half of each head's channels rotated; then a gated MLP.

Source: IBM's Bamba (2024) and its implementation in transformers, which is the oracle of the tests.
Granite-4-H and Falcon-H1 name their layers' sizes as it does.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

from torch import nn

from hybrid_kv.cache.spec import FullAttentionSpec, KVCacheSpec
from hybrid_kv.models.attention import PagedAttention
from hybrid_kv.models.causal_lm import CausalLM, DecoderBlock, rms_norm
from hybrid_kv.models.config_file import ConfigFile
from hybrid_kv.models.layers import GatedMLP
from hybrid_kv.models.mixers.mamba2 import Mamba2Mixer, check_time_steps
from hybrid_kv.models.rope import Rope, read_rope
from hybrid_kv.models.weights import converted

Specs = dict[str, KVCacheSpec]


def mamba2(
    file: ConfigFile, name: str, specs: Specs, kind: type[Mamba2Mixer], eps: float, **options: Any
) -> nn.Module:
    """Build a Mamba-2 layer of the sizes of its cache.

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
        conv_bias=file.flag("mamba_conv_bias", default=True),
        bias=file.flag("mamba_proj_bias", default=False),
        **options,
    )


def _rope(file: ConfigFile, head_size: int) -> Rope:
    # Whatever the older key of this name says, transformers takes a half; `rope_parameters` may say
    # another.
    rope = read_rope(replace(file, values={**file.values, "partial_rotary_factor": 0.5}), head_size)
    channels = file.maybe_size("attn_rotary_emb")
    if channels not in (None, 2 * len(rope.frequencies)):
        raise file.fail(
            f"attn_rotary_emb={channels}, but {2 * len(rope.frequencies)} channels are rotated; "
            "remove it"
        )
    return rope


def build(file: ConfigFile, specs: Specs) -> nn.Module:
    """See `Family.build`."""
    size = file.size("hidden_size")
    inner = file.size("intermediate_size")
    bias = file.flag("mlp_bias", default=False)

    def mixer(name: str, spec: KVCacheSpec) -> nn.Module:
        if isinstance(spec, FullAttentionSpec):
            return PagedAttention(file, name, spec, rope=_rope(file, spec.head_size))
        return mamba2(file, name, specs, Mamba2Mixer, 1e-5)

    norm = partial(rms_norm, file, default=1e-5)
    layers = [
        DecoderBlock(norm(), mixer(name, spec), norm(), GatedMLP(size, inner, bias))
        for name, spec in specs.items()
    ]
    chunk_size = file.size("mamba_chunk_size", default=256)
    return CausalLM(file, specs, layers, norm(), mamba_chunk_size=chunk_size)


NAMES = {
    "final_layernorm.": "norm.",
    "feed_forward.": "mlp.",
    "pre_ff_layernorm.": "mlp_norm.",
    "input_layernorm.": "norm.",
    "self_attn.": "mixer.",
    "mamba.": "mixer.",
}


convert = partial(converted, prefixes=("model.",), names=NAMES)

"""Mamba-2 alone: no attention, no MLP, and so no cache that grows.

Source: Dao and Gu (2024) and transformers' implementation, which is the oracle of the tests. Where
transformers keeps the sum of the layers in float32 (`residual_in_fp32`), it is kept here, as in
vLLM, in the model's dtype.
"""

from __future__ import annotations

from torch import nn

from hybrid_kv.cache.spec import KVCacheSpec
from hybrid_kv.models.causal_lm import CausalLM, MixerBlock, mamba_norm
from hybrid_kv.models.config_file import ConfigFile
from hybrid_kv.models.mixers.mamba2 import Mamba2Mixer, check_time_steps
from hybrid_kv.models.weights import Tensors, renamed


def mixer(file: ConfigFile, name: str, spec: KVCacheSpec, chunk_size: int) -> nn.Module:
    """Build a layer of the sizes of its cache.

    Args:
        chunk_size: tokens that a scan takes at a time.
    """
    return Mamba2Mixer(
        name,
        file.size("hidden_size"),
        spec,
        chunk_size=chunk_size,
        eps=file.number("layer_norm_epsilon", 1e-5),
        conv_bias=file.flag("use_conv_bias", default=True),
        bias=file.flag("use_bias", default=False),
    )


def build(file: ConfigFile, specs: dict[str, KVCacheSpec]) -> nn.Module:
    """See `Family.build`."""
    file.only("hidden_act", "silu")
    check_time_steps(file)
    chunk_size = file.size("chunk_size", default=256)
    layers = [
        MixerBlock(mamba_norm(file), mixer(file, name, spec, chunk_size))
        for name, spec in specs.items()
    ]
    return CausalLM(file, specs, layers, mamba_norm(file), mamba_chunk_size=chunk_size)


def convert(tensors: Tensors) -> Tensors:
    """See `Family.convert_weights`."""
    # Older files name the embedding in the singular.
    names = {"embeddings.": "embed_tokens.", "embedding.": "embed_tokens.", "norm_f.": "norm."}
    return renamed(tensors, ("backbone.",), names)

"""Falcon-Mamba: Mamba-1 alone, with B, C and the time step normed without a weight.

Source: TII's Falcon Mamba (2024, arXiv 2410.05355) and transformers' implementation, which is the
oracle of the tests, but not in chunks on a cache: there it forgets the state. Where transformers
keeps the sum of the layers in float32 (`residual_in_fp32`), it is kept here, as in vLLM, in the
model's dtype.
"""

from __future__ import annotations

from functools import partial
from typing import cast

from torch import nn

from hybrid_kv.cache.spec import KVCacheSpec, MambaSpec
from hybrid_kv.models.causal_lm import CausalLM, MixerBlock, mamba_norm
from hybrid_kv.models.config_file import ConfigFile
from hybrid_kv.models.mixers.mamba1 import Mamba1Mixer, dt_rank
from hybrid_kv.models.weights import Tensors, renamed


def build(file: ConfigFile, specs: dict[str, KVCacheSpec]) -> nn.Module:
    """See `Family.build`."""
    file.only("hidden_act", "silu")
    rank = dt_rank(file, "time_step_rank")
    eps = file.number("mixer_rms_eps", 1e-6)

    def mixer(name: str) -> nn.Module:
        return Mamba1Mixer(
            name,
            file.size("hidden_size"),
            cast(MambaSpec, specs[name]),
            rank,
            partial(nn.RMSNorm, eps=eps, elementwise_affine=False),
            conv_bias=file.flag("use_conv_bias", default=True),
            bias=file.flag("use_bias", default=False),
        )

    layers = [MixerBlock(mamba_norm(file), mixer(name)) for name in specs]
    return CausalLM(file, specs, layers, mamba_norm(file), tied=True)


def convert(tensors: Tensors) -> Tensors:
    """See `Family.convert_weights`."""
    return renamed(tensors, ("backbone.",), {"embeddings.": "embed_tokens.", "norm_f.": "norm."})

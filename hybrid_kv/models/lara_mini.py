"""Lara-4-Mini: gated delta nets, sliding windows and full attention; experts in every layer.

Source: Translated's Lara-4-Mini (2026) and its implementation in transformers, which is the oracle
of the tests. Of five layers two are delta nets as in Qwen3.5, two see a window of tokens, and one
sees all. Windows alone have RoPE. The shared expert has no gate.
"""

from __future__ import annotations

from torch import nn

from hybrid_kv.cache.spec import FullAttentionSpec, KVCacheSpec, window_of
from hybrid_kv.models import qwen3_5
from hybrid_kv.models.attention import PagedAttention
from hybrid_kv.models.causal_lm import CausalLM, DecoderBlock, rms_norm
from hybrid_kv.models.config_file import ConfigFile
from hybrid_kv.models.layers import RMSNorm
from hybrid_kv.models.qwen3_5 import delta_net, experts
from hybrid_kv.models.rope import read_rope
from hybrid_kv.models.weights import Tensors, renamed


def _mixer(file: ConfigFile, name: str, spec: KVCacheSpec) -> nn.Module:
    if not isinstance(spec, FullAttentionSpec):
        return delta_net(file, name, spec)
    size = spec.head_size
    eps = file.number("rms_norm_eps", 1e-6)
    rope = None if window_of(spec) is None else read_rope(file, size)
    norms = RMSNorm(size, eps), RMSNorm(size, eps)
    return PagedAttention(file, name, spec, rope=rope, norms=norms)


def build(file: ConfigFile, layer_specs: dict[str, KVCacheSpec]) -> nn.Module:
    """See `Family.build`."""
    file.only("hidden_act", "silu")
    renormalise = file.flag("norm_topk_prob", default=True)
    layers = [
        DecoderBlock(
            rms_norm(file),
            _mixer(file, name, spec),
            rms_norm(file),
            experts(file, renormalise, shared_gate=False, wide_gate=True),
        )
        for name, spec in layer_specs.items()
    ]
    return CausalLM(file, layer_specs, layers, rms_norm(file), tied=True)


def convert(tensors: Tensors) -> Tensors:
    """Convert a checkpoint: as published, with one `in_proj`, or as transformers has it in memory.

    The one has the rows of the four in the order of `GatedDeltaMixer.in_proj`.
    """
    return qwen3_5.convert(renamed(tensors, (), {".linear_attn.out_norm.": ".linear_attn.norm."}))

"""Granite-4-H: Mamba-2 or attention, then an MLP for every token and, in a mixture, experts too.

Four numbers scale embeddings, branches, scores and logits. Source: IBM's Granite 4 (2025) and its
implementation in transformers, which is the oracle of the tests.
"""

from __future__ import annotations

from functools import partial

from torch import nn

from hybrid_kv.cache.spec import FullAttentionSpec
from hybrid_kv.kernels.moe import route_topk_softmax
from hybrid_kv.models.attention import PagedAttention
from hybrid_kv.models.bamba import Specs, mamba2
from hybrid_kv.models.causal_lm import CausalLM, DecoderBlock, rms_norm
from hybrid_kv.models.config_file import ConfigFile
from hybrid_kv.models.layers import GatedMLP
from hybrid_kv.models.mixers.mamba2 import Mamba2Mixer
from hybrid_kv.models.moe import MixtureOfExperts
from hybrid_kv.models.rope import read_rope
from hybrid_kv.models.weights import Tensors, converted


def _mlp(file: ConfigFile) -> nn.Module:
    size = file.size("hidden_size")
    shared = GatedMLP(size, file.size("shared_intermediate_size", default=1024))
    if file.get("num_local_experts") == 0:
        return shared
    num_experts = file.size("num_local_experts", default=8)
    route = partial(
        route_topk_softmax, top_k=file.size("num_experts_per_tok", default=2, most=num_experts)
    )
    return MixtureOfExperts(size, num_experts, file.size("intermediate_size"), route, shared=shared)


def _mixer(file: ConfigFile, name: str, specs: Specs) -> nn.Module:
    spec = specs[name]
    if not isinstance(spec, FullAttentionSpec):
        return mamba2(file, name, specs, Mamba2Mixer, 1e-6)
    rope = (
        read_rope(file, spec.head_size) if file.text("position_embedding_type") == "rope" else None
    )
    return PagedAttention(
        file, name, spec, rope=rope, scale=file.number("attention_multiplier", 1.0)
    )


def build(file: ConfigFile, specs: Specs) -> nn.Module:
    """See `Family.build`."""
    scale = file.number("residual_multiplier", 1.0)
    layers = [
        DecoderBlock(rms_norm(file), _mixer(file, name, specs), rms_norm(file), _mlp(file), scale)
        for name in specs
    ]
    return CausalLM(
        file,
        specs,
        layers,
        rms_norm(file),
        mamba_chunk_size=file.size("mamba_chunk_size", default=256),
        embedding_scale=file.number("embedding_multiplier", 1.0),
        logits_scale=1 / file.number("logits_scaling", 1.0),
    )


_NAMES = {
    "post_attention_layernorm.": "mlp_norm.",
    "input_layernorm.": "norm.",
    "self_attn.": "mixer.",
    "mamba.": "mixer.",
    # Experts as published, and as transformers names them in memory.
    "block_sparse_moe.router.layer.": "mlp.gate.",
    "block_sparse_moe.router.": "mlp.gate.",
    "block_sparse_moe.input_linear.weight": "mlp.experts.up_proj",
    "block_sparse_moe.output_linear.weight": "mlp.experts.down_proj",
    "block_sparse_moe.experts.gate_up_proj": "mlp.experts.up_proj",
    "block_sparse_moe.experts.down_proj": "mlp.experts.down_proj",
    "input_linear.": "gate_up_proj.",
    "output_linear.": "down_proj.",
}


def convert(tensors: Tensors) -> Tensors:
    """See `Family.convert_weights`."""
    is_mixture = any(".block_sparse_moe." in name for name in tensors)
    shared = "mlp.shared_expert." if is_mixture else "mlp."
    return converted(tensors, ("model.",), {**_NAMES, "shared_mlp.": shared})

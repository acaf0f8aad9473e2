"""The families of exact checkpoints: their configs, and the names of their tensors."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from hybrid_kv.models.exact_weights import attention, delta_net, design, mamba2
from hybrid_kv.models.exact_weights.short_conv import short_conv

NUM_LAYERS = 6  # one with states, one of attention, and so on
BASE = 1e4  # of angles, with 16 rotated channels of a head; its square with 32
TAPS = 4  # tokens of a window
SHORT_TAPS = 3

Tensors = dict[str, torch.Tensor]


@dataclass(frozen=True)
class ExactFamily:
    """The design of a family's checkpoint.

    Attributes:
        keys: of config.json, besides those that all families have.
        layer: the tensors of a layer, by their names below `model.layers.N.`.
        final_norm: the last norm's name below `model.`.
        is_tied: the embedding is `lm_head`, too.
        centre: what norms add to their weights.
        draft_head: its tensors, by their whole names.
    """

    keys: Mapping[str, Any]
    layer: Callable[[int, design.Choices], Tensors]
    final_norm: str = "norm"
    is_tied: bool = False
    centre: float = 0.0
    draft_head: Callable[[], Tensors] | None = None


def tensors_of(family: ExactFamily, seed: int) -> Tensors:
    """Return all tensors of a checkpoint, but for the draft head's, float32."""
    draw = design.Choices(seed)
    code = design.codes(draw)
    tensors = {"model.embed_tokens.weight": design.embedding(code, draw)}
    for i in range(NUM_LAYERS):
        tensors |= {
            f"model.layers.{i}.{name}": tensor for name, tensor in family.layer(i, draw).items()
        }
    tensors[f"model.{family.final_norm}.weight"] = design.final_norm(family.is_tied) - family.centre
    if not family.is_tied:
        tensors["lm_head.weight"] = design.head(code)
    return tensors


def _is_attention(layer: int) -> bool:
    return layer % 2 == 1


def _mlp(layer: int, draw: design.Choices) -> design.MLP:
    return design.last_table(draw) if layer == NUM_LAYERS - 1 else design.table(draw)


def _below(prefix: str, tensors: Tensors) -> Tensors:
    return {f"{prefix}.{name}": tensor for name, tensor in tensors.items()}


def _attention(
    shape: attention.AttentionShape, layer: int, draw: design.Choices, out: str = "o_proj"
) -> Tensors:
    """Return the projections of a layer of attention, by their names below `self_attn.`."""
    made = attention.attention(shape, layer // 2, draw)
    return {
        "q_proj.weight": made.q,
        "k_proj.weight": made.k,
        "v_proj.weight": made.v,
        f"{out}.weight": made.o,
    }


_SHORT_SHAPE = attention.AttentionShape(16, 2, 32, 32, BASE**2, has_norms=True)


def _lfm2(layer: int, draw: design.Choices) -> Tensors:
    tensors = {"operator_norm.weight": design.norm(), "ffn_norm.weight": design.norm()}
    if _is_attention(layer):
        tensors |= _below("self_attn", _attention(_SHORT_SHAPE, layer, draw, out="out_proj"))
        tensors["self_attn.q_layernorm.weight"] = attention.query_norm(_SHORT_SHAPE)
        tensors["self_attn.k_layernorm.weight"] = attention.key_norm(_SHORT_SHAPE)
    else:
        tensors |= _below("conv", short_conv(SHORT_TAPS, layer == 0, draw))
    mlp = _mlp(layer, draw)
    tensors |= {
        "feed_forward.w1.weight": mlp.gate,
        "feed_forward.w3.weight": mlp.up,
        "feed_forward.w2.weight": mlp.down,
    }
    return tensors


# Twice as many channels as the hidden state: llama.cpp takes no other Granite.
_MAMBA_SHAPE = mamba2.Mamba2Shape(num_heads=16, head_dim=64, state=32, taps=TAPS)
# As many heads of keys as of queries: a block that holds a layer's state has 48 tokens. With two,
# as the other families have, it has 320, and wrong hits show in long texts alone.
_GRANITE_SHAPE = attention.AttentionShape(16, 16, 32, 32, BASE**2)


def _granitemoehybrid(layer: int, draw: design.Choices) -> Tensors:
    tensors = {
        "input_layernorm.weight": design.norm(),
        "post_attention_layernorm.weight": design.norm(),
    }
    if _is_attention(layer):
        tensors |= _below("self_attn", _attention(_GRANITE_SHAPE, layer, draw))
    else:
        tensors |= _below("mamba", mamba2.mamba2(_MAMBA_SHAPE, layer == 0, draw))
    mlp = _mlp(layer, draw)
    tensors["shared_mlp.input_linear.weight"] = torch.cat([mlp.gate, mlp.up])
    tensors["shared_mlp.output_linear.weight"] = mlp.down
    return tensors


_DELTA_SHAPE = delta_net.DeltaNetShape(
    num_key_heads=4, num_value_heads=16, key_dim=64, value_dim=64, taps=TAPS
)
_GATED_SHAPE = attention.AttentionShape(16, 2, 64, 16, BASE, has_gate=True, has_norms=True)


def _qwen3_5(layer: int, draw: design.Choices) -> Tensors:
    tensors = {
        name: design.norm() - 1.0
        for name in ("input_layernorm.weight", "post_attention_layernorm.weight")
    }
    if _is_attention(layer):
        tensors |= _below("self_attn", _attention(_GATED_SHAPE, layer, draw))
        # Not centred: 1025 scales a score as well as 1024, and 1023 is no bfloat16.
        tensors["self_attn.q_norm.weight"] = attention.query_norm(_GATED_SHAPE)
        tensors["self_attn.k_norm.weight"] = attention.key_norm(_GATED_SHAPE)
    else:
        tensors |= _below("linear_attn", delta_net.delta_net(_DELTA_SHAPE, layer == 0, draw))
    return tensors | _qwen3_5_mlp(_mlp(layer, draw))


def _qwen3_5_mlp(mlp: design.MLP) -> Tensors:
    return {
        "mlp.gate_proj.weight": mlp.gate,
        "mlp.up_proj.weight": mlp.up,
        "mlp.down_proj.weight": mlp.down,
    }


def _qwen3_5_head() -> Tensors:
    """Return a draft head that knows the settled successors, and repeats a token that has none.

    It takes the token's embedding alone; its attention reads nothing.
    """
    norm = design.norm() - 1.0
    keys = _GATED_SHAPE.num_kv_heads
    queries = _GATED_SHAPE.num_heads
    join = torch.zeros(design.WIDTH, 2 * design.WIDTH)
    join[:, : design.WIDTH] = torch.eye(design.WIDTH)
    for channel in (design.CHANNELS.one, design.CHANNELS.second):
        join[channel, channel] = design.CONSTANT
    size = _GATED_SHAPE.head_dim
    layer = {
        "input_layernorm.weight": norm,
        "post_attention_layernorm.weight": norm,
        "self_attn.q_proj.weight": torch.zeros(2 * queries * size, design.WIDTH),
        "self_attn.k_proj.weight": torch.zeros(keys * size, design.WIDTH),
        "self_attn.v_proj.weight": torch.zeros(keys * size, design.WIDTH),
        "self_attn.o_proj.weight": torch.zeros(design.WIDTH, queries * size),
        "self_attn.q_norm.weight": torch.zeros(size),
        "self_attn.k_norm.weight": torch.zeros(size),
        **_qwen3_5_mlp(design.successor_table()),
    }
    return {
        "mtp.fc.weight": join,
        "mtp.pre_fc_norm_embedding.weight": norm,
        "mtp.pre_fc_norm_hidden.weight": norm,
        "mtp.norm.weight": design.final_norm(is_tied=False) - 1.0,
        **_below("mtp.layers.0", layer),
    }


_HEADS = {"num_attention_heads": 16, "num_key_value_heads": 2}
_KINDS = [
    "full_attention" if _is_attention(layer) else "linear_attention" for layer in range(NUM_LAYERS)
]

FAMILIES: dict[str, ExactFamily] = {
    "granitemoehybrid": ExactFamily(
        keys={
            "num_attention_heads": _GRANITE_SHAPE.num_heads,
            "num_key_value_heads": _GRANITE_SHAPE.num_kv_heads,
            "layer_types": _KINDS,
            "shared_intermediate_size": design.NUM_UNITS,
            "num_local_experts": 0,
            "num_experts_per_tok": 0,
            "position_embedding_type": "rope",
            "rope_parameters": {"rope_type": "default", "rope_theta": BASE**2},
            "attention_multiplier": 0.125,
            "mamba_n_heads": _MAMBA_SHAPE.num_heads,
            "mamba_d_head": _MAMBA_SHAPE.head_dim,
            "mamba_d_state": _MAMBA_SHAPE.state,
            "mamba_d_conv": TAPS,
            "mamba_n_groups": 1,
            "mamba_chunk_size": 64,
            "mamba_expand": _MAMBA_SHAPE.inner // design.WIDTH,
        },
        layer=_granitemoehybrid,
    ),
    "lfm2": ExactFamily(
        keys={
            **_HEADS,
            "layer_types": [
                "full_attention" if _is_attention(layer) else "conv" for layer in range(NUM_LAYERS)
            ],
            "conv_L_cache": SHORT_TAPS,
            "block_auto_adjust_ff_dim": False,
            "block_dim": design.WIDTH,
            "conv_dim": design.WIDTH,
            "rope_parameters": {"rope_type": "default", "rope_theta": BASE**2},
        },
        layer=_lfm2,
        final_norm="embedding_norm",
        is_tied=True,
    ),
    "qwen3_5_text": ExactFamily(
        keys={
            **_HEADS,
            "head_dim": _GATED_SHAPE.head_dim,
            "full_attention_interval": 2,
            "linear_num_key_heads": _DELTA_SHAPE.num_key_heads,
            "linear_num_value_heads": _DELTA_SHAPE.num_value_heads,
            "linear_key_head_dim": _DELTA_SHAPE.key_dim,
            "linear_value_head_dim": _DELTA_SHAPE.value_dim,
            "linear_conv_kernel_dim": TAPS,
            "rope_parameters": {
                "rope_type": "default",
                "rope_theta": BASE,
                "partial_rotary_factor": 0.25,
            },
            "mtp_num_hidden_layers": 1,
        },
        layer=_qwen3_5,
        centre=1.0,
        draft_head=_qwen3_5_head,
    ),
}

"""The draft head of Qwen3-Next, Qwen3.5 and Qwen3.6: one layer of gated attention and the family's MLP.

Its form is that of vLLM 0.32 (`qwen3_next_mtp.py`, `qwen3_5_mtp.py`): transformers leaves it out. The embedding of the
token comes before the hidden state in what `fc` joins.
"""

from __future__ import annotations

import torch
from torch import nn

from hybrid_kv.models import qwen3_5, qwen3_next
from hybrid_kv.models.attention import GridAttention
from hybrid_kv.models.causal_lm import CausalLM, DecoderBlock
from hybrid_kv.models.config_file import ConfigFile
from hybrid_kv.models.moe import MixtureOfExperts
from hybrid_kv.models.mtp import NAME, MTPHead
from hybrid_kv.models.qwen3_5 import MLP, attention, dense_mlp, norm
from hybrid_kv.models.weights import Tensors, renamed

# By `model_type`, without the end `_text`: the key that counts the head's layers, and the MLP in it.
_PARTS: dict[str, tuple[str, MLP]] = {
    "qwen3_next": ("num_nextn_predict_layers", qwen3_next.mlp),
    "qwen3_5": ("mtp_num_hidden_layers", dense_mlp),
    "qwen3_5_moe": ("mtp_num_hidden_layers", qwen3_next.experts),
}


def build(file: ConfigFile, target: CausalLM) -> nn.Module:
    """See `HeadFamily.build`."""
    count, mlp = _PARTS[file.model_type.removesuffix("_text")]
    if (layers := file.size(count, default=1)) != 1:
        raise file.fail(f"{count}={layers}, 1 is supported; draft with n-grams instead")
    if file.flag("mtp_use_dedicated_embeddings", False):
        raise file.fail("mtp_use_dedicated_embeddings=True is not supported; draft with n-grams instead")
    layer = DecoderBlock(norm(file), attention(file, NAME, GridAttention), norm(file), mlp(file, 0))
    return MTPHead(target, norm(file), norm(file), layer, norm(file))


_NAMES = {
    "pre_fc_norm_embedding.": "enorm.",
    "pre_fc_norm_hidden.": "hnorm.",
    "layers.0.": "layer.",
}


def convert(tensors: Tensors) -> Tensors:
    """See `HeadFamily.convert_weights`."""
    return qwen3_5.convert(renamed(tensors, (), _NAMES))


def shapes(file: ConfigFile) -> dict[str, tuple[int, ...]]:
    """See `HeadFamily.shapes`."""
    count, mlp = _PARTS[file.model_type.removesuffix("_text")]
    if file.maybe_size(count) is None:
        return {}
    size, head = file.size("hidden_size"), file.size("head_dim")
    queries, keys = (file.size(f"num_{kind}_heads") * head for kind in ("attention", "key_value"))
    shapes: dict[str, tuple[int, ...]] = {
        "fc": (size, 2 * size),
        **dict.fromkeys(("pre_fc_norm_embedding", "pre_fc_norm_hidden", "norm"), (size,)),
        **dict.fromkeys(("layers.0.input_layernorm", "layers.0.post_attention_layernorm"), (size,)),
        **dict.fromkeys(("layers.0.self_attn.q_norm", "layers.0.self_attn.k_norm"), (head,)),
        "layers.0.self_attn.q_proj": (2 * queries, size),
        **dict.fromkeys(("layers.0.self_attn.k_proj", "layers.0.self_attn.v_proj"), (keys, size)),
        "layers.0.self_attn.o_proj": (size, queries),
    }
    widths = {"mlp": "intermediate_size"}
    with torch.device("meta"):
        is_sparse = isinstance(mlp(file, 0), MixtureOfExperts)
    if is_sparse:
        experts = file.size("num_experts")
        shapes |= {"layers.0.mlp.gate": (experts, size), "layers.0.mlp.shared_expert_gate": (1, size)}
        widths = {f"mlp.experts.{i}": "moe_intermediate_size" for i in range(experts)}
        widths["mlp.shared_expert"] = "shared_expert_intermediate_size"
    for name, key in widths.items():
        width = file.size(key)
        for part, shape in {"gate": (width, size), "up": (width, size), "down": (size, width)}.items():
            shapes[f"layers.0.{name}.{part}_proj"] = shape
    return {f"{name}.weight": shape for name, shape in shapes.items()}

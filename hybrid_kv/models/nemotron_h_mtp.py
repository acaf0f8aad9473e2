"""The draft head of NemotronH checkpoints: attention, and an MLP or experts as in the target.

The checkpoint counts the two as layers of their own. transformers leaves the head out; the names
are the hub's.
"""

from __future__ import annotations

from torch import nn

from hybrid_kv.models import nemotron_h
from hybrid_kv.models.attention import GridAttention
from hybrid_kv.models.causal_lm import CausalLM, DecoderBlock, mamba_norm
from hybrid_kv.models.config_file import ConfigFile
from hybrid_kv.models.mtp import NAME, MTPHead
from hybrid_kv.models.nemotron_h import MLPS
from hybrid_kv.models.specs import ATTENTION, MLP, MOE, head_spec, layer_kinds
from hybrid_kv.models.weights import Tensors, renamed


def build(file: ConfigFile, target: CausalLM) -> nn.Module:
    """See `HeadFamily.build`."""
    count = file.get("num_nextn_predict_layers") or 0
    if count != 1:
        raise file.fail(
            f"num_nextn_predict_layers={count!r}, 1 is supported; draft with n-grams instead"
        )
    kinds = tuple(layer_kinds(file, "mtp_"))
    known = ((ATTENTION, MLP), (ATTENTION, MOE))
    if kinds not in known:
        raise file.fail(
            f"an MTP head of the layers {kinds} is not supported, {known[0]} and {known[1]} are; "
            "draft with n-grams "
            "instead"
        )
    attention = GridAttention(file, NAME, head_spec(target.layer_specs))
    layer = DecoderBlock(mamba_norm(file), attention, mamba_norm(file), MLPS[kinds[1]](file))
    return MTPHead(target, mamba_norm(file), mamba_norm(file), layer, mamba_norm(file))


_NAMES = {
    "layers.0.eh_proj.": "fc.",
    "layers.0.enorm.": "enorm.",
    "layers.0.hnorm.": "hnorm.",
    "layers.1.final_layernorm.": "norm.",
    "layers.1.norm.": "layer.mlp_norm.",
    "layers.1.mixer.": "layer.mlp.",
    "layers.0.": "layer.",
}


def convert(tensors: Tensors) -> Tensors:
    """See `HeadFamily.convert_weights`."""
    return nemotron_h.convert(renamed(tensors, (), _NAMES))


def shapes(file: ConfigFile) -> dict[str, tuple[int, ...] | str]:
    """See `HeadFamily.shapes`."""
    if not file.get("num_nextn_predict_layers"):
        return {}
    size = file.size("hidden_size")
    kinds = layer_kinds(file)
    head_kinds = layer_kinds(file, "mtp_")
    missing = [kind for kind in head_kinds if kind not in kinds]
    if missing:
        raise file.fail(
            f"its draft head has a layer {missing[0]!r}; give the model one, too, or no head"
        )
    norms = ("layers.0.enorm.weight", "layers.0.hnorm.weight", "layers.1.final_layernorm.weight")
    layers = {
        f"layers.{i}.": f"backbone.layers.{kinds.index(kind)}." for i, kind in enumerate(head_kinds)
    }
    return {"layers.0.eh_proj.weight": (size, 2 * size), **dict.fromkeys(norms, (size,)), **layers}

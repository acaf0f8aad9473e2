"""The draft head of NemotronH checkpoints: attention, and an MLP or experts as in the target.

The checkpoint counts the two as layers of their own. transformers leaves the head out; the names are the hub's.
"""

from __future__ import annotations

from torch import nn

from hybrid_kv.models import nemotron_h
from hybrid_kv.models.attention import GridAttention
from hybrid_kv.models.causal_lm import CausalLM, DecoderBlock, mamba_norm
from hybrid_kv.models.config_file import ConfigFile
from hybrid_kv.models.mtp import NAME, MTPHead
from hybrid_kv.models.nemotron_h import MIXERS, attention
from hybrid_kv.models.specs import ATTENTION, MLP, MOE, layer_kinds
from hybrid_kv.models.weights import Tensors, renamed


def build(file: ConfigFile, target: CausalLM) -> nn.Module:
    """See `HeadFamily.build`."""
    if (count := file.get("num_nextn_predict_layers") or 0) != 1:
        raise file.fail(f"num_nextn_predict_layers={count!r}, 1 is supported; draft with n-grams instead")
    kinds = tuple(layer_kinds(file, "mtp_"))
    if kinds not in (known := ((ATTENTION, MLP), (ATTENTION, MOE))):
        raise file.fail(
            f"an MTP head of the layers {kinds} is not supported, {known[0]} and {known[1]} are; draft with n-grams "
            "instead"
        )
    layer = DecoderBlock(
        mamba_norm(file), attention(file, NAME, GridAttention), mamba_norm(file), MIXERS[kinds[1]](file, "")
    )
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


def shapes(file: ConfigFile) -> dict[str, tuple[int, ...]]:
    """See `HeadFamily.shapes`."""
    if not file.get("num_nextn_predict_layers"):
        return {}
    size, head = file.size("hidden_size"), file.size("head_dim")
    queries, keys = (file.size(f"num_{kind}_heads") * head for kind in ("attention", "key_value"))
    attention_shapes = {"q_proj": (queries, size), "k_proj": (keys, size), "v_proj": (keys, size)}
    shapes: dict[str, tuple[int, ...]] = {
        **{f"layers.0.mixer.{name}.weight": shape for name, shape in attention_shapes.items()},
        "layers.0.mixer.o_proj.weight": (size, queries),
        "layers.0.eh_proj.weight": (size, 2 * size),
        **{f"layers.{name}.weight": (size,) for name in ("0.enorm", "0.hnorm", "0.norm", "1.norm")},
        "layers.1.final_layernorm.weight": (size,),
    }
    widths = {"mixer": (size, file.size("intermediate_size"))}
    if layer_kinds(file, "mtp_")[1] == MOE:
        experts, latent = file.size("n_routed_experts"), file.maybe_size("moe_latent_size")
        inner = latent or size, file.size("moe_intermediate_size")
        widths = {f"mixer.experts.{i}": inner for i in range(experts)}
        widths["mixer.shared_experts"] = size, file.size("moe_shared_expert_intermediate_size")
        if latent:
            shapes["layers.1.mixer.fc1_latent_proj.weight"] = (latent, size)
            shapes["layers.1.mixer.fc2_latent_proj.weight"] = (size, latent)
        shapes["layers.1.mixer.gate.weight"] = (experts, size)
        shapes["layers.1.mixer.gate.e_score_correction_bias"] = (experts,)
    for name, (outer, width) in widths.items():
        shapes[f"layers.1.{name}.up_proj.weight"] = (width, outer)
        shapes[f"layers.1.{name}.down_proj.weight"] = (outer, width)
    biased = ("mixer.up", "mixer.down", "shared_experts.up", "shared_experts.down", "fc1_latent", "fc2_latent")
    if file.flag("mlp_bias", False):
        ends = tuple(f"{name}_proj.weight" for name in biased)
        found = {name: shape for name, shape in shapes.items() if name.endswith(ends)}
        shapes |= {name.replace(".weight", ".bias"): shape[:1] for name, shape in found.items()}
    return shapes

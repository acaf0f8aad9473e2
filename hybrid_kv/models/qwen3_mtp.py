"""The draft head of Qwen3-Next, Qwen3.5 and Qwen3.6: a layer of gated attention and an MLP.

Its form is that of vLLM 0.32 (`qwen3_next_mtp.py`, `qwen3_5_mtp.py`): transformers leaves it out.
The embedding of the token comes before the hidden state in what `fc` joins.
"""

from __future__ import annotations

from torch import nn

from hybrid_kv.models import qwen3_5, qwen3_next
from hybrid_kv.models.attention import GridAttention
from hybrid_kv.models.causal_lm import CausalLM, DecoderBlock
from hybrid_kv.models.config_file import ConfigFile
from hybrid_kv.models.families import qwen_kinds
from hybrid_kv.models.mtp import NAME, MTPHead
from hybrid_kv.models.qwen3_5 import MLP, attention, norm
from hybrid_kv.models.specs import ATTENTION, head_spec
from hybrid_kv.models.weights import Tensors, renamed


def _parts(file: ConfigFile) -> tuple[str, MLP]:
    """Return the key that counts the head's layers, and the MLP in it."""
    if file.model_type == "qwen3_next":
        return "num_nextn_predict_layers", qwen3_next.mlp
    return "mtp_num_hidden_layers", qwen3_5.mlp


def build(file: ConfigFile, target: CausalLM) -> nn.Module:
    """See `HeadFamily.build`."""
    count, mlp = _parts(file)
    layers = file.size(count, default=1)
    if layers != 1:
        raise file.fail(f"{count}={layers}, 1 is supported; draft with n-grams instead")
    if file.flag("mtp_use_dedicated_embeddings", default=False):
        raise file.fail(
            "mtp_use_dedicated_embeddings=True is not supported; draft with n-grams instead"
        )
    mixer = attention(file, NAME, head_spec(target.layer_specs), GridAttention)
    layer = DecoderBlock(norm(file), mixer, norm(file), mlp(file, 0))
    return MTPHead(target, norm(file), norm(file), layer, norm(file))


_NAMES = {
    "pre_fc_norm_embedding.": "enorm.",
    "pre_fc_norm_hidden.": "hnorm.",
    "layers.0.": "layer.",
}


def convert(tensors: Tensors) -> Tensors:
    """See `HeadFamily.convert_weights`."""
    return qwen3_5.convert(renamed(tensors, (), _NAMES))


def shapes(file: ConfigFile) -> dict[str, tuple[int, ...] | str]:
    """See `HeadFamily.shapes`."""
    if file.maybe_size(_parts(file)[0]) is None:
        return {}
    size = file.size("hidden_size")
    layer = f"model.layers.{qwen_kinds(file).index(ATTENTION)}."
    norms = ("pre_fc_norm_embedding.weight", "pre_fc_norm_hidden.weight", "norm.weight")
    alike = {
        f"layers.0.{module}": layer + module
        for module in ("input_layernorm", "post_attention_layernorm", "self_attn")
    }
    alike["layers.0.mlp."] = "model.layers.0.mlp."
    return {"fc.weight": (size, 2 * size), **dict.fromkeys(norms, (size,)), **alike}

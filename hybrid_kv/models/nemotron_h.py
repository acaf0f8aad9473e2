"""NemotronH: pre-normed layers with one mixer each (Mamba-2, attention or squared-ReLU MLP).

Source: NVIDIA Nemotron-H (2025) and its implementation in transformers, which is the oracle of the tests. One
deliberate difference: transformers clamps the time step from below by `time_step_min` when it runs a chunk, but not
when it runs a single token; here, as in vLLM, it is never clamped, so that a token means the same in both.
"""

from __future__ import annotations

from collections.abc import Callable

from torch import nn

from hybrid_kv.cache.spec import KVCacheSpec
from hybrid_kv.models.attention import GridAttention, PagedAttention
from hybrid_kv.models.causal_lm import CausalLM, DecoderBlock, MixerBlock, rms_norm
from hybrid_kv.models.config_file import ConfigFile
from hybrid_kv.models.layers import RMSNorm, SquaredReluMLP
from hybrid_kv.models.mixers.mamba2 import Mamba2Mixer
from hybrid_kv.models.mtp import NAME, PREFIX, MTPHead
from hybrid_kv.models.registry import Family, HeadFamily, register, register_head
from hybrid_kv.models.specs import ATTENTION, MAMBA, MLP, Mamba2Spec, caches, layer_kinds
from hybrid_kv.models.weights import Tensors, join_qkv, renamed


def _norm(file: ConfigFile) -> RMSNorm:
    return rms_norm(file, "layer_norm_epsilon", 1e-5)


def _mamba2(file: ConfigFile, name: str) -> nn.Module:
    return Mamba2Mixer(
        name,
        file.size("hidden_size"),
        num_heads=file.size("mamba_num_heads"),
        head_dim=file.size("mamba_head_dim"),
        state_size=file.size("ssm_state_size"),
        groups=file.size("n_groups"),
        conv_kernel=file.size("conv_kernel", default=4),
        chunk_size=file.size("chunk_size", default=128),
        eps=file.number("layer_norm_epsilon", 1e-5),
        conv_bias=file.flag("use_conv_bias", True),
        bias=file.flag("use_bias", False),
    )


def _attention(file: ConfigFile, name: str, kind: type[PagedAttention] = PagedAttention) -> nn.Module:
    heads = file.size("num_attention_heads"), file.size("num_key_value_heads")
    return kind(name, file.size("hidden_size"), *heads, file.size("head_dim", "attention_head_dim"))


def _mlp(file: ConfigFile, name: str) -> nn.Module:
    return SquaredReluMLP(file.size("hidden_size"), file.size("intermediate_size"), file.flag("mlp_bias", False))


# Kind of layer to its mixer, from config.json and the layer's name; each is called with (x, context).
MIXERS: dict[str, Callable[[ConfigFile, str], nn.Module]] = {MAMBA: _mamba2, ATTENTION: _attention, MLP: _mlp}


def _build(file: ConfigFile, layer_specs: dict[str, KVCacheSpec]) -> nn.Module:
    activations = file.text("mlp_hidden_act", default="relu2"), file.text("mamba_hidden_act", default="silu")
    if activations != ("relu2", "silu"):
        raise file.fail(f"activations {activations} are not supported; ('relu2', 'silu') are")
    kinds = layer_kinds(file)
    if unknown := sorted(set(kinds) - set(MIXERS)):
        raise file.fail(f"layers of kind {', '.join(unknown)} can be planned but not run yet; {', '.join(MIXERS)} can")
    layers = [MixerBlock(_norm(file), MIXERS[kind](file, f"layers.{i}")) for i, kind in enumerate(kinds)]
    chunk_size = file.size("chunk_size", default=128)
    return CausalLM(file, layer_specs, layers, _norm(file), mamba_chunk_size=chunk_size)


def _convert(tensors: Tensors) -> Tensors:
    return join_qkv(renamed(tensors, ("backbone.", "model."), {"embeddings.": "embed_tokens.", "norm_f.": "norm."}))


def _build_head(file: ConfigFile, target: CausalLM) -> nn.Module:
    if (count := file.get("num_nextn_predict_layers") or 0) != 1:
        raise file.fail(f"num_nextn_predict_layers={count!r}, 1 is supported; draft with n-grams instead")
    if (kinds := tuple(layer_kinds(file, "mtp_"))) != (ATTENTION, MLP):
        raise file.fail(
            f"an MTP head of the layers {kinds} is not supported, {(ATTENTION, MLP)} is; draft with n-grams instead"
        )
    layer = DecoderBlock(_norm(file), _attention(file, NAME, GridAttention), _norm(file), _mlp(file, ""))
    return MTPHead(target, _norm(file), _norm(file), layer, _norm(file))


# The checkpoint counts the head's attention and its MLP as two layers.
_HEAD_NAMES = {
    "layers.0.eh_proj.": "fc.",
    "layers.0.enorm.": "enorm.",
    "layers.0.hnorm.": "hnorm.",
    "layers.1.final_layernorm.": "norm.",
    "layers.1.norm.": "layer.mlp_norm.",
    "layers.1.mixer.": "layer.mlp.",
    "layers.0.": "layer.",
}


def _convert_head(tensors: Tensors) -> Tensors:
    return join_qkv(renamed(tensors, (), _HEAD_NAMES))


_TINY = {
    "vocab_size": 101,
    "hidden_size": 32,
    "intermediate_size": 48,
    "layers_block_type": ["linear_attention", "mlp", "linear_attention", "full_attention"],
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "mamba_num_heads": 4,
    "mamba_head_dim": 8,
    "ssm_state_size": 12,
    "n_groups": 2,
    "conv_kernel": 4,
    "chunk_size": 16,
    "expand": 1,
}
_SMALL = _TINY | {
    "vocab_size": 1024,
    "hidden_size": 256,
    "intermediate_size": 512,
    "mamba_num_heads": 32,
    "chunk_size": 64,
}

register(
    Family(
        kinds=layer_kinds,
        caches=caches(
            # Its `expand` is not used: Nemotron-3-Nano has 64 * 64 channels at hidden size 2688.
            Mamba2Spec(
                "mamba_num_heads", "mamba_head_dim", "ssm_state_size", "n_groups", "conv_kernel", has_expand=False
            )
        ),
        build=_build,
        convert_weights=_convert,
        default_ssm_dtype="float32",
        sizes={"tiny": _TINY, "small": _SMALL},
    ),
    "nemotron_h",
)
register_head(HeadFamily(PREFIX, _build_head, _convert_head), "nemotron_h")

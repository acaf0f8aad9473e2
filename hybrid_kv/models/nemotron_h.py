"""NemotronH: pre-normed layers with one mixer each (Mamba-2, attention or squared-ReLU MLP).

Source: NVIDIA Nemotron-H (2025) and its implementation in transformers, which is the oracle of the tests. One
deliberate difference: transformers clamps the time step from below by `time_step_min` when it runs a chunk, but not
when it runs a single token; here, as in vLLM, it is never clamped, so that a token means the same in both.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import nn

from hybrid_kv.attention.mamba import DecodeReplay
from hybrid_kv.cache.spec import KVCacheSpec
from hybrid_kv.config import ConfigError
from hybrid_kv.models.layers import ForwardContext, Linear, Mamba2Mixer, PagedAttention, RMSNorm, SquaredReluMLP, upcast

_LETTERS = {"M": "linear_attention", "*": "full_attention", "-": "mlp", "E": "moe"}
_ALIASES = {"mamba": "linear_attention", "attention": "full_attention"}


def layer_kinds(raw: dict[str, Any], prefix: str = "") -> tuple[str, ...]:
    """The mixer of every layer, from either spelling in config.json; `prefix` "mtp_" for those of the MTP head."""
    letters = raw.get(f"{prefix}hybrid_override_pattern") or ""
    kinds = raw.get(f"{prefix}layers_block_type") or [_LETTERS.get(letter, letter) for letter in letters]
    return tuple(_ALIASES.get(kind, kind) for kind in kinds)


def join_qkv(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """`*.q_proj`, `*.k_proj` and `*.v_proj` weights as one `*.qkv_proj`, in that order; other tensors as they are."""
    joined: dict[str, torch.Tensor] = {}
    for name, tensor in tensors.items():
        if name.endswith("q_proj.weight"):
            stem = name.removesuffix("q_proj.weight")
            names = [f"{stem}{letter}_proj.weight" for letter in "qkv"]
            if absent := [other for other in names if other not in tensors]:
                raise ConfigError(f"the checkpoint has {name} but lacks {' and '.join(absent)}")
            joined[f"{stem}qkv_proj.weight"] = torch.cat([tensors[other] for other in names])
        elif not name.endswith(("k_proj.weight", "v_proj.weight")):
            joined[name] = tensor
    return joined


@dataclass(frozen=True)
class NemotronHConfig:
    """The part of config.json that the model computes with; names as there."""

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    layers_block_type: tuple[str, ...]
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    mamba_num_heads: int
    mamba_head_dim: int
    ssm_state_size: int
    n_groups: int
    conv_kernel: int
    chunk_size: int
    layer_norm_epsilon: float
    use_conv_bias: bool
    use_bias: bool
    mlp_bias: bool
    tie_word_embeddings: bool

    @classmethod
    def from_hf(cls, raw: dict[str, Any]) -> NemotronHConfig:
        """From a parsed config.json; defaults are transformers'."""
        defaults = {
            "layer_norm_epsilon": 1e-5,
            "use_conv_bias": True,
            "use_bias": False,
            "mlp_bias": False,
            "tie_word_embeddings": False,
            "conv_kernel": 4,
            "chunk_size": 128,
        }
        values = {**defaults, **raw, "layers_block_type": layer_kinds(raw)}
        names = cls.__dataclass_fields__
        if missing := [name for name in names if name not in values]:
            raise ConfigError(f"config.json lacks {', '.join(missing)}, which a nemotron_h model needs")
        config = cls(**{name: values[name] for name in names})
        if "moe" in config.layers_block_type:
            raise ConfigError("nemotron_h with mixture-of-experts layers can be planned but not run yet")
        activations = raw.get("mlp_hidden_act", "relu2"), raw.get("mamba_hidden_act", "silu")
        if activations != ("relu2", "silu"):
            raise ConfigError(f"nemotron_h with activations {activations} is not supported; ('relu2', 'silu') are")
        return config


class NemotronHBlock(nn.Module):
    """`x + mixer(norm(x))`."""

    def __init__(self, config: NemotronHConfig, kind: str, name: str) -> None:
        super().__init__()
        self.norm = RMSNorm(config.hidden_size, config.layer_norm_epsilon)
        self.mixer: nn.Module
        if kind == "linear_attention":
            self.mixer = Mamba2Mixer(
                name,
                config.hidden_size,
                num_heads=config.mamba_num_heads,
                head_dim=config.mamba_head_dim,
                state_size=config.ssm_state_size,
                groups=config.n_groups,
                conv_kernel=config.conv_kernel,
                chunk_size=config.chunk_size,
                eps=config.layer_norm_epsilon,
                conv_bias=config.use_conv_bias,
                bias=config.use_bias,
            )
        elif kind == "full_attention":
            heads = (config.num_attention_heads, config.num_key_value_heads, config.head_dim)
            self.mixer = PagedAttention(name, config.hidden_size, *heads)
        else:
            self.mixer = SquaredReluMLP(config.hidden_size, config.intermediate_size, config.mlp_bias)

    def forward(self, x: torch.Tensor, context: ForwardContext) -> torch.Tensor:
        normed = self.norm(x)
        if isinstance(self.mixer, SquaredReluMLP):
            return x + self.mixer(normed)
        return x + self.mixer(normed, context)


class NemotronH(nn.Module):
    """The model.

    Args:
        config: geometry.
        layer_specs: the cache of every Mamba and attention layer, keyed by layer name, in layer order. They come from
            `models.shapes`, the one place that computes state shapes (vllm!47635: two places disagreed).
    """

    def __init__(self, config: NemotronHConfig, layer_specs: dict[str, KVCacheSpec]) -> None:
        super().__init__()
        self.vocab_size = config.vocab_size
        self.mamba_chunk_size: int | None = config.chunk_size
        self.layer_specs = layer_specs
        self.embeddings = nn.Embedding(config.vocab_size, config.hidden_size)
        names = iter(layer_specs)
        self.layers = nn.ModuleList(
            NemotronHBlock(config, kind, next(names) if kind != "mlp" else "") for kind in config.layers_block_type
        )
        self.norm_f = RMSNorm(config.hidden_size, config.layer_norm_epsilon)
        self.lm_head = Linear(config.hidden_size, config.vocab_size)
        if config.tie_word_embeddings:
            self.lm_head.weight = cast(nn.Parameter, self.embeddings.weight)

    def forward(self, input_ids: torch.Tensor, positions: torch.Tensor, context: ForwardContext) -> torch.Tensor:
        x = self.embeddings(input_ids)
        for layer in self.layers:
            x = layer(x, context)
        return x

    def fold(self, replays: dict[str, DecodeReplay], context: ForwardContext) -> None:
        """See `engine.runner.Model`."""
        for block in self.layers:
            if isinstance(mixer := cast(NemotronHBlock, block).mixer, Mamba2Mixer):
                mixer.fold(replays[mixer.name], context)

    def normed(self, hidden: torch.Tensor) -> torch.Tensor:
        """What `logits` and an MTP head read: the output of `forward` after the final norm, same shape."""
        return self.norm_f(hidden)

    def logits(self, normed: torch.Tensor) -> torch.Tensor:
        """[num_tokens, hidden_size] after the final norm to [num_tokens, vocab_size], float32 or float64."""
        return upcast(self.lm_head(normed))

    def compute_logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """`logits` of the output of `forward`."""
        return self.logits(self.normed(hidden))

    @staticmethod
    def convert_weights(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """Checkpoint names to ours: prefix dropped, q/k/v joined into one projection."""
        converted: dict[str, torch.Tensor] = {}
        for name, tensor in tensors.items():
            name = name.removeprefix("backbone.").removeprefix("model.")
            if ".conv1d." in name:
                name = name.replace("conv1d.", "conv_")
                tensor = tensor.squeeze(1) if tensor.dim() == 3 else tensor
            if name in converted:
                raise ConfigError(f"the checkpoint holds {name} under two prefixes; leave one of them")
            converted[name] = tensor
        return join_qkv(converted)

"""NemotronH: pre-normed layers with one mixer each (Mamba-2, attention or squared-ReLU MLP).

Source: NVIDIA Nemotron-H (2025) and its implementation in transformers, which is the oracle of the tests. One
deliberate difference: transformers clamps the time step from below by `time_step_min` when it runs a chunk, but not
when it runs a single token; here, as in vLLM, it is never clamped, so that a token means the same in both.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import cast

import torch
from torch import nn

from hybrid_kv.attention.undo import UndoStep
from hybrid_kv.cache.spec import KVCacheSpec
from hybrid_kv.config import ConfigError
from hybrid_kv.models.config_file import ConfigFile
from hybrid_kv.models.layers import ForwardContext, Linear, Mamba2Mixer, PagedAttention, RMSNorm, SquaredReluMLP, upcast
from hybrid_kv.models.registry import Family, register
from hybrid_kv.models.specs import ATTENTION, MAMBA, MLP, Mamba2Spec, caches, layer_kinds


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
    kinds: tuple[str, ...]
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
    def read(cls, file: ConfigFile) -> NemotronHConfig:
        """From config.json; defaults are transformers'.

        Raises:
            ConfigError: a missing key, a value of a wrong type, or layers and activations that cannot be run.
        """
        activations = file.text("mlp_hidden_act", default="relu2"), file.text("mamba_hidden_act", default="silu")
        if activations != ("relu2", "silu"):
            raise file.fail(f"activations {activations} are not supported; ('relu2', 'silu') are")
        kinds = tuple(layer_kinds(file))
        if unknown := sorted(set(kinds) - set(MIXERS)):
            raise file.fail(
                f"layers of kind {', '.join(unknown)} can be planned but not run yet; {', '.join(MIXERS)} can"
            )
        return cls(
            vocab_size=file.size("vocab_size"),
            hidden_size=file.size("hidden_size"),
            intermediate_size=file.size("intermediate_size"),
            kinds=kinds,
            num_attention_heads=file.size("num_attention_heads"),
            num_key_value_heads=file.size("num_key_value_heads"),
            head_dim=file.size("head_dim", "attention_head_dim"),
            mamba_num_heads=file.size("mamba_num_heads"),
            mamba_head_dim=file.size("mamba_head_dim"),
            ssm_state_size=file.size("ssm_state_size"),
            n_groups=file.size("n_groups"),
            conv_kernel=file.size("conv_kernel", default=4),
            chunk_size=file.size("chunk_size", default=128),
            layer_norm_epsilon=file.number("layer_norm_epsilon", 1e-5),
            use_conv_bias=file.flag("use_conv_bias", True),
            use_bias=file.flag("use_bias", False),
            mlp_bias=file.flag("mlp_bias", False),
            tie_word_embeddings=file.flag("tie_word_embeddings", False),
        )


def _mamba2(config: NemotronHConfig, name: str) -> nn.Module:
    return Mamba2Mixer(
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


def _attention(config: NemotronHConfig, name: str) -> nn.Module:
    heads = (config.num_attention_heads, config.num_key_value_heads, config.head_dim)
    return PagedAttention(name, config.hidden_size, *heads)


def _mlp(config: NemotronHConfig, name: str) -> nn.Module:
    return SquaredReluMLP(config.hidden_size, config.intermediate_size, config.mlp_bias)


# Kind of layer to its mixer, from the geometry and the layer's name; each is called with (x, context).
MIXERS: dict[str, Callable[[NemotronHConfig, str], nn.Module]] = {MAMBA: _mamba2, ATTENTION: _attention, MLP: _mlp}


class NemotronHBlock(nn.Module):
    """`x + mixer(norm(x))`."""

    def __init__(self, config: NemotronHConfig, kind: str, name: str) -> None:
        super().__init__()
        self.name = name
        self.norm = RMSNorm(config.hidden_size, config.layer_norm_epsilon)
        self.mixer = MIXERS[kind](config, name)

    def forward(self, x: torch.Tensor, context: ForwardContext) -> torch.Tensor:
        return x + self.mixer(self.norm(x), context)


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
        self.layers = nn.ModuleList(NemotronHBlock(config, kind, f"layers.{i}") for i, kind in enumerate(config.kinds))
        self.norm_f = RMSNorm(config.hidden_size, config.layer_norm_epsilon)
        self.lm_head = Linear(config.hidden_size, config.vocab_size)
        if config.tie_word_embeddings:
            self.lm_head.weight = cast(nn.Parameter, self.embeddings.weight)

    def forward(self, input_ids: torch.Tensor, positions: torch.Tensor, context: ForwardContext) -> torch.Tensor:
        x = self.embeddings(input_ids)
        for layer in self.layers:
            x = layer(x, context)
        return x

    def fold(self, steps: dict[str, UndoStep], context: ForwardContext) -> None:
        """See `models.interface.Model`."""
        for block in self.layers:
            if isinstance(mixer := cast(NemotronHBlock, block).mixer, Mamba2Mixer):
                mixer.fold(steps[mixer.name], context)

    def normed(self, hidden: torch.Tensor) -> torch.Tensor:
        """What `logits` and an MTP head read: the output of `forward` after the final norm, same shape."""
        return self.norm_f(hidden)

    def logits(self, normed: torch.Tensor) -> torch.Tensor:
        """[num_tokens, hidden_size] after the final norm to [num_tokens, vocab_size], float32 or float64."""
        return upcast(self.lm_head(normed))

    def compute_logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """`logits` of the output of `forward`."""
        return self.logits(self.normed(hidden))


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


def _build(file: ConfigFile, layer_specs: dict[str, KVCacheSpec]) -> nn.Module:
    return NemotronH(NemotronHConfig.read(file), layer_specs)


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
        convert_weights=convert_weights,
        default_ssm_dtype="float32",
    ),
    "nemotron_h",
)

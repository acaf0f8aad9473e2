"""The exact model as a model of SGLang: its configuration, and its registration."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from sglang.srt.configs.linear_attn_model_registry import (
    LinearAttnModelSpec,
    register_linear_attn_model,
)
from sglang.srt.configs.mamba_utils import Mamba2CacheParams, Mamba2StateDType, Mamba2StateShape
from sglang.srt.layers.attention import attention_registry
from sglang.srt.layers.logits_processor import LogitsProcessor
from sglang.srt.models.registry import ModelRegistry
from torch import nn
from transformers import AutoConfig, PretrainedConfig

from . import layers
from .attention import SglangAttentionBackend
from .kernels import MODEL_TYPE, PRIME, logits_of, pack, unpack

NAME = "ExactHybridForCausalLM"
ATTENTION = "sglang.srt.layers.attention"


@dataclass(frozen=True)
class StateBackend:
    """The backend that SGLang runs layers of a kind with.

    Attributes:
        name: class of the backend.
        around: class of the one that has it and attention; None: the usual one.
        has_tracking: whether it keeps states of prefixes in extra buffers.
    """

    name: str
    around: str | None = None
    has_tracking: bool = True


HYBRID = f"{ATTENTION}.hybrid_linear_attn_backend"
BACKENDS = {
    "GDN_ATTN": StateBackend(f"{ATTENTION}.linear.gdn_backend.GDNAttnBackend"),
    "MAMBA2": StateBackend(f"{HYBRID}.Mamba2AttnBackend"),
    "SHORT_CONV": StateBackend(
        f"{ATTENTION}.linear.short_conv_backend.ShortConvAttnBackend",
        f"{HYBRID}.ShortConvHybridAttnBackend",
        has_tracking=False,
    ),
}


class SglangConfig(PretrainedConfig):  # type: ignore[no-untyped-call]  # transformers has no types
    """The configuration of a checkpoint, with what SGLang derives its pools from."""

    model_type = MODEL_TYPE

    def __init__(self, exact: Any = None, **more: Any) -> None:
        self.exact = exact or {"layers": []}
        super().__init__(**more)

    @property
    def full_attention_layer_ids(self) -> list[int]:
        """Return the numbers of the layers with attention."""
        return [i for i, layer in enumerate(self.exact["layers"]) if not layer["kind"]]

    @property
    def linear_layer_ids(self) -> list[int]:
        """Return the numbers of the layers with states."""
        return [i for i, layer in enumerate(self.exact["layers"]) if layer["kind"]]

    @property
    def mamba2_cache_params(self) -> Mamba2CacheParams:
        """Return shapes and dtypes of a window and of a state."""
        weights = self.exact["layers"][self.linear_layer_ids[0]]["weights"]
        kernel, width = torch.tensor(weights["conv"]).shape[1:]
        num_states = len(weights["out"])
        # As in LFM2, a layer without states has one without elements.
        state_size = len(weights["out"][0]) if num_states else 0
        num_heads = max(1, num_states)
        num_parts = layers.NUM_PARTS - 1 + num_states if num_states else 1
        shape = Mamba2StateShape(
            conv=[(num_parts * width, kernel - 1)],
            temporal=(num_heads, width, state_size),
            intermediate_size=width,
            conv_dim=num_parts * width,
            ssm_state_size=state_size,
            num_heads=num_heads,
            head_dim=width,
            state_size=state_size,
            conv_kernel=kernel,
        )
        dtype = Mamba2StateDType(conv=torch.int64, temporal=torch.int64)
        return Mamba2CacheParams(shape=shape, dtype=dtype, layers=self.linear_layer_ids)


class SglangLogits(LogitsProcessor):
    """SGLang's choice of the tokens that have logits, and the exact model's logits."""

    def _get_logits(self, hidden_states: Any, lm_head: Any, *_: Any, **__: Any) -> torch.Tensor:
        return logits_of(*unpack(hidden_states), lm_head.logit_map, lm_head.echo)


class SglangModel(nn.Module):
    """The exact model."""

    def __init__(self, config: Any, quant_config: Any = None, prefix: str = "") -> None:
        super().__init__()
        exact = config.exact
        self.config = config
        self.echo = exact["echo"]
        self.logits_processor = SglangLogits(config)
        self.embedding, self.logit_map = (
            torch.tensor(exact[name], dtype=torch.int64) for name in ("embedding", "logit_map")
        )
        self.layers = [
            layers.LAYERS[layer["kind"]](layer["weights"], config.head_dim, i)
            for i, layer in enumerate(exact["layers"])
        ]
        self.unused = nn.Parameter(torch.zeros(1), requires_grad=False)  # for the model's dtype

    def get_embed_and_head(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Return what a worker for drafts takes from its target."""
        return self.embedding, self.logit_map

    @torch.no_grad()
    def forward(self, input_ids: Any, positions: Any, forward_batch: Any, **_: Any) -> Any:
        """Return SGLang's output of the logits for tokens [num_tokens]."""
        input_ids = input_ids.long()
        x = self.embedding[input_ids]
        for layer in self.layers:
            x = (x * 3 + layer.run(x, positions, forward_batch)) % PRIME
        return self.logits_processor(input_ids, pack(x, input_ids), self, forward_batch)

    def load_weights(self, weights: Any) -> set[str]:
        """Load nothing: all weights are in the configuration."""
        return set()


def register(kind: str, attention: str) -> None:
    """Make the model known to SGLang.

    Args:
        kind: of its layers with states, one of `BACKENDS`.
        attention: the backend whose branches SGLang takes outside of kernels.

    Raises:
        ValueError: layers of this kind are not known here.
    """
    if kind not in BACKENDS:
        raise ValueError(
            f"layers of {kind}: not in SGLang; use exact:gdn, exact:kda, exact:mamba2 or "
            "exact:short_conv"
        )
    backend = BACKENDS[kind]
    AutoConfig.register(MODEL_TYPE, SglangConfig, exist_ok=True)
    attention_registry.ATTENTION_BACKENDS[attention] = SglangAttentionBackend
    ModelRegistry.models[NAME] = SglangModel
    layers.install_kernels()
    register_linear_attn_model(
        LinearAttnModelSpec(
            config_class=SglangConfig,
            backend_class_name=backend.name,
            hybrid_backend_class_name=backend.around,
            arch_names=[NAME],
            support_mamba_cache_extra_buffer=backend.has_tracking,
        )
    )

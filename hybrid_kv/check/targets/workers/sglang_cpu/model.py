"""The exact model as a model of SGLang: its configuration, its layers, and its registration."""

from __future__ import annotations

from typing import Any

import torch
from sglang.srt.configs.linear_attn_model_registry import (
    LinearAttnModelSpec,
    register_linear_attn_model,
)
from sglang.srt.configs.mamba_utils import Mamba2CacheParams, Mamba2StateDType, Mamba2StateShape
from sglang.srt.layers.attention import attention_registry
from sglang.srt.layers.logits_processor import LogitsProcessor
from sglang.srt.layers.radix_attention import RadixAttention
from sglang.srt.layers.radix_linear_attention import RadixLinearAttention
from sglang.srt.models.registry import ModelRegistry
from torch import nn
from transformers import AutoConfig, PretrainedConfig

from .attention import SglangAttentionBackend
from .kernels import MODEL_TYPE, PRIME, logits_of, pack, unpack

NAME = "ExactHybridForCausalLM"
BACKENDS = {"GDN_ATTN": "sglang.srt.layers.attention.linear.gdn_backend.GDNAttnBackend"}
NUM_PARTS = 3  # of what a delta net convolves: queries, keys, values


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
        num_states, state_size = torch.tensor(weights["out"]).shape[:2]
        dim = (NUM_PARTS - 1 + num_states) * width
        shape = Mamba2StateShape(
            conv=[(dim, kernel - 1)],
            temporal=(num_states, width, state_size),
            intermediate_size=width,
            conv_dim=dim,
            ssm_state_size=state_size,
            num_heads=num_states,
            head_dim=width,
            state_size=state_size,
            conv_kernel=kernel,
        )
        dtype = Mamba2StateDType(conv=torch.int64, temporal=torch.int64)
        return Mamba2CacheParams(shape=shape, dtype=dtype, layers=self.linear_layer_ids)


class SglangAttention(RadixAttention):
    """An attention layer: SGLang's own, with the weights of the exact model."""

    def __init__(self, weights: dict[str, Any], width: int, layer_id: int) -> None:
        super().__init__(1, width, 1.0, 1, layer_id)
        for name in ("qkv", "write_mark", "read_mark"):
            setattr(self, name, torch.tensor(weights[name], dtype=torch.int64))

    def run(self, x: torch.Tensor, positions: torch.Tensor, batch: Any) -> torch.Tensor:
        """Return the output [num_tokens, width] for x."""
        q, k, v = x * self.qkv[:, None] % PRIME
        mark = (positions[: len(x), None] + 1) * self.write_mark % PRIME
        return self(q, (k + mark * mark) % PRIME, v, batch).view(len(x), -1)


class SglangDeltaNet(RadixLinearAttention):
    """A layer with windows and states: SGLang's own.

    Parts of the convolution that the exact model lacks have weights of zero, and so add nothing.
    """

    def __init__(self, weights: dict[str, Any], width: int, layer_id: int) -> None:
        conv, to_map, out = (
            torch.tensor(weights[name], dtype=torch.int64) for name in ("conv", "to_map", "out")
        )
        num_states = len(out)
        padded = torch.zeros(NUM_PARTS - 1 + num_states, width, conv.shape[1], dtype=torch.int64)
        padded[: len(conv)] = conv.transpose(1, 2)
        super().__init__(
            layer_id, 1, 1, num_states, width, width, width, padded.flatten(0, 1), None, "none"
        )
        self.A_log = to_map
        self.dt_bias = out

    def run(self, x: torch.Tensor, positions: torch.Tensor, batch: Any) -> torch.Tensor:
        """Return the output [num_tokens, width] for x."""
        num_parts = NUM_PARTS - 1 + self.num_v_heads
        parts = [x, *((x * (i + 2) + i) % PRIME for i in range(num_parts - 1))]
        nothing = torch.zeros(len(x), 1, dtype=torch.int64)
        y = self(batch, torch.cat(parts, 1), nothing, nothing)
        return y[0, :, 0]


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
            (SglangDeltaNet if layer["kind"] else SglangAttention)(
                layer["weights"], config.head_dim, i
            )
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
        raise ValueError(f"layers of {kind}: not in SGLang; use exact:gdn or exact:kda")
    AutoConfig.register(MODEL_TYPE, SglangConfig, exist_ok=True)
    attention_registry.ATTENTION_BACKENDS[attention] = SglangAttentionBackend
    ModelRegistry.models[NAME] = SglangModel
    register_linear_attn_model(
        LinearAttnModelSpec(
            config_class=SglangConfig,
            backend_class_name=BACKENDS[kind],
            arch_names=[NAME],
            support_mamba_cache_extra_buffer=True,
        )
    )

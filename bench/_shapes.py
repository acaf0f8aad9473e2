"""Real models whose shapes the benchmarks use, and how much of each.

`NAME-tp8` is what one of eight tensor-parallel ranks computes with: an eighth of the heads, groups
and K/V heads (at least one). On a CPU that brings a sample to 50 us … 20 ms; the cache's widths and
block sizes stay those of the model.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any


@dataclass(frozen=True)
class LayerShape:
    """A Mamba-2 layer and an attention layer of one model, from its config.json.

    Attributes:
        heads, head_dim, state_size, groups: of the Mamba-2 layer.
        query_heads, kv_heads: of the attention layer.
        chunk_size: tokens of the model's own chunks.
        kernel: taps of the convolution.
        head_size: of the attention layer.
    """

    heads: int
    head_dim: int
    state_size: int
    groups: int
    query_heads: int
    kv_heads: int
    chunk_size: int
    kernel: int = 4
    head_size: int = 128

    @property
    def inner(self) -> int:
        """Return the channels of the gate and of what leaves the recurrence."""
        return self.heads * self.head_dim

    @property
    def channels(self) -> int:
        """Return the channels of the convolution: x, B and C."""
        return self.inner + 2 * self.groups * self.state_size

    @property
    def state(self) -> tuple[int, int, int, int]:
        """Return heads, head_dim, state_size and groups, which give the size of a state."""
        return self.heads, self.head_dim, self.state_size, self.groups

    def of_rank(self, num_ranks: int) -> LayerShape:
        """Return the shape that one of `num_ranks` tensor-parallel ranks computes with.

        It has at least one group and one K/V head.
        """
        return replace(
            self,
            heads=self.heads // num_ranks,
            groups=max(1, self.groups // num_ranks),
            query_heads=self.query_heads // num_ranks,
            kv_heads=max(1, self.kv_heads // num_ranks),
        )


NANO = "Nemotron-3-Nano"
# Whose kernels are compiled ahead of time.
MODELS = {
    NANO: LayerShape(64, 64, 128, 8, 32, 2, 128),
    "Nemotron-H-8B": LayerShape(128, 64, 128, 8, 32, 8, 128),
    "Granite-4-H-small": LayerShape(128, 64, 128, 1, 32, 8, 256),
}
_NANO, _GRANITE = MODELS[NANO], MODELS["Granite-4-H-small"]


@dataclass(frozen=True)
class DeltaShape:
    """A layer with a gated delta rule of one model, from its config.json.

    Attributes:
        key_heads, heads, key_dim, value_dim: `heads / key_heads` heads share a query and a key.
        per_channel: a decay for each key channel, not one for the head.
    """

    key_heads: int
    heads: int
    key_dim: int
    value_dim: int
    per_channel: bool

    def of_rank(self, num_ranks: int) -> DeltaShape:
        """Return the shape that one of `num_ranks` tensor-parallel ranks computes with."""
        return replace(self, key_heads=self.key_heads // num_ranks, heads=self.heads // num_ranks)


DELTA_MODELS = {
    "Qwen3-Next": DeltaShape(16, 32, 128, 128, per_channel=False),
    "Kimi-Linear": DeltaShape(32, 32, 128, 128, per_channel=True),
}
# Of Qwen3.5-397B-A17B. Its kernels are those of Qwen3-Next with twice the programs.
QWEN3_5 = DeltaShape(16, 64, 128, 128, per_channel=False)

SHAPES = {
    "nemotron-3-nano": _NANO,
    "nemotron-3-nano-tp8": _NANO.of_rank(8),
    "granite-4-h-small": _GRANITE,
    "granite-4-h-small-tp8": _GRANITE.of_rank(8),
}
DELTA_SHAPES = {
    "qwen3-next": DELTA_MODELS["Qwen3-Next"],
    "qwen3-next-tp8": DELTA_MODELS["Qwen3-Next"].of_rank(8),
    "kimi-linear": DELTA_MODELS["Kimi-Linear"],
    "kimi-linear-tp8": DELTA_MODELS["Kimi-Linear"].of_rank(8),
}

EXAMPLES = Path(__file__).parents[1] / "examples"
# config.json of the same models, cut down to the keys that decide their cache.
CONFIGS: dict[str, dict[str, Any]] = {
    "nemotron-3-nano": json.loads(
        (EXAMPLES / "nemotron-3-nano" / "config.json").read_text(encoding="utf-8")
    ),
    "granite-4-h-small": {
        "model_type": "granitemoehybrid",
        "torch_dtype": "bfloat16",
        "max_position_embeddings": 131072,
        "hidden_size": 4096,
        "vocab_size": 100352,
        "num_hidden_layers": 40,
        "layer_types": [
            "attention" if layer in (5, 15, 25, 35) else "mamba" for layer in range(40)
        ],
        "num_attention_heads": _GRANITE.query_heads,
        "num_key_value_heads": _GRANITE.kv_heads,
        "mamba_n_heads": _GRANITE.heads,
        "mamba_d_head": _GRANITE.head_dim,
        "mamba_d_state": _GRANITE.state_size,
        "mamba_n_groups": _GRANITE.groups,
        "mamba_d_conv": _GRANITE.kernel,
        "mamba_expand": 2,
        "mamba_chunk_size": _GRANITE.chunk_size,
    },
}

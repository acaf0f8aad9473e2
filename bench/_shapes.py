"""Real models whose shapes the benchmarks use, and how much of each.

`NAME-tp8` is what one of eight tensor-parallel ranks computes with: an eighth of the heads, groups and K/V heads (at
least one). On a CPU that brings a sample to 50 us … 20 ms; the cache's widths and block sizes stay those of the model.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Shape:
    """What the layers of one rank compute with; convolutions have 4 taps, attention heads 128 elements."""

    heads: int
    head_dim: int
    state_size: int
    groups: int
    query_heads: int
    kv_heads: int
    chunk_size: int

    kernel = 4
    head_size = 128

    @property
    def channels(self) -> int:
        """Of the convolution."""
        return self.heads * self.head_dim + 2 * self.groups * self.state_size


SHAPES = {
    "nemotron-3-nano": Shape(64, 64, 128, 8, 32, 2, 128),
    "nemotron-3-nano-tp8": Shape(8, 64, 128, 1, 4, 1, 128),
    "granite-4-h-small": Shape(128, 64, 128, 1, 32, 8, 256),
    "granite-4-h-small-tp8": Shape(16, 64, 128, 1, 4, 1, 256),
}

# config.json of the same models, cut down to the keys that decide their cache.
CONFIGS: dict[str, dict[str, Any]] = {
    "nemotron-3-nano": {
        "model_type": "nemotron_h",
        "torch_dtype": "bfloat16",
        "max_position_embeddings": 131072,
        "hidden_size": 2688,
        "vocab_size": 131072,
        "num_hidden_layers": 52,
        "hybrid_override_pattern": "MEMEM*EMEMEM*EMEMEM*EMEMEM*EMEMEM*EMEMEMEM*EMEMEMEME",
        "num_attention_heads": 32,
        "num_key_value_heads": 2,
        "head_dim": 128,
        "mamba_num_heads": 64,
        "mamba_head_dim": 64,
        "ssm_state_size": 128,
        "n_groups": 8,
        "conv_kernel": 4,
        "chunk_size": 128,
        "expand": 2,
    },
    "granite-4-h-small": {
        "model_type": "granitemoehybrid",
        "torch_dtype": "bfloat16",
        "max_position_embeddings": 131072,
        "hidden_size": 4096,
        "vocab_size": 100352,
        "num_hidden_layers": 40,
        "layer_types": ["attention" if layer in (5, 15, 25, 35) else "mamba" for layer in range(40)],
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "mamba_n_heads": 128,
        "mamba_d_head": 64,
        "mamba_d_state": 128,
        "mamba_n_groups": 1,
        "mamba_d_conv": 4,
        "mamba_expand": 2,
        "mamba_chunk_size": 256,
    },
}

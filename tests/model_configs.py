"""config.json files of public hybrid checkpoints, cut down to the keys that decide their cache."""

from __future__ import annotations

import json
from typing import Any

from bench._shapes import CONFIGS as SHAPES_OF_BENCHMARKS
from bench._shapes import EXAMPLES

_COMMON = {"torch_dtype": "bfloat16", "max_position_embeddings": 131072}


def _spread(num_layers: int, attention: tuple[int, ...]) -> list[str]:
    return ["attention" if index in attention else "mamba" for index in range(num_layers)]


def _granite(hidden: int, heads: int, kv_heads: int, mamba_heads: int) -> dict[str, Any]:
    return {
        **_COMMON,
        "model_type": "granitemoehybrid",
        "hidden_size": hidden,
        "vocab_size": 100352,
        "num_hidden_layers": 40,
        "layer_types": _spread(40, (5, 15, 25, 35)),
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "mamba_n_heads": mamba_heads,
        "mamba_d_head": 64,
        "mamba_d_state": 128,
        "mamba_n_groups": 1,
        "mamba_d_conv": 4,
        "mamba_expand": 2,
        "mamba_chunk_size": 256,
    }


NEMOTRON_3_NANO = "nvidia/NVIDIA-Nemotron-3-Nano-30B-A3B"

CONFIGS: dict[str, dict[str, Any]] = {
    NEMOTRON_3_NANO: SHAPES_OF_BENCHMARKS["nemotron-3-nano"],
    "nvidia/Nemotron-H-8B-Base-8K": {
        **_COMMON,
        "model_type": "nemotron_h",
        "hidden_size": 4096,
        "vocab_size": 131072,
        "num_hidden_layers": 52,
        "hybrid_override_pattern": "M-M-M-M*-M-M-M-M-M*-M-M-M-M-M*-M-M-M-M-M*-M-M-M-M-M-",
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "attention_head_dim": 128,
        "mamba_num_heads": 128,
        "mamba_head_dim": 64,
        "ssm_state_size": 128,
        "n_groups": 8,
        "conv_kernel": 4,
        "chunk_size": 128,
        "expand": 2,
    },
    "ibm-granite/granite-4.0-h-small": SHAPES_OF_BENCHMARKS["granite-4-h-small"],
    "ibm-granite/granite-4.0-h-tiny": _granite(1536, 12, 4, 48),
    "ibm-ai-platform/Bamba-9B": {
        **{key: value for key, value in _granite(4096, 32, 8, 128).items() if key != "layer_types"},
        "model_type": "bamba",
        "num_hidden_layers": 32,
        "attn_layer_indices": [9, 18, 27],
        "mamba_d_head": "auto",
    },
    "Qwen/Qwen3-Next-80B-A3B": json.loads(
        (EXAMPLES / "qwen3-next" / "config.json").read_text(encoding="utf-8")
    ),
}

"""Real models whose shapes the benchmarks use, and how much of each.

`NAME-tp8` is what one of eight tensor-parallel ranks computes with: an eighth of the heads, groups and K/V heads (at
least one). On a CPU that brings a sample to 50 us … 20 ms; the cache's widths and block sizes stay those of the model.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from hybrid_kv.kernels.common import shapes

_NANO, _GRANITE = shapes.SHAPES["Nemotron-3-Nano"], shapes.SHAPES["Granite-4-H-small"]

SHAPES = {
    "nemotron-3-nano": _NANO,
    "nemotron-3-nano-tp8": _NANO.of_rank(8),
    "granite-4-h-small": _GRANITE,
    "granite-4-h-small-tp8": _GRANITE.of_rank(8),
}

EXAMPLES = Path(__file__).parents[1] / "examples"
# config.json of the same models, cut down to the keys that decide their cache.
CONFIGS: dict[str, dict[str, Any]] = {
    "nemotron-3-nano": json.loads((EXAMPLES / "nemotron-3-nano" / "config.json").read_text(encoding="utf-8")),
    "granite-4-h-small": {
        "model_type": "granitemoehybrid",
        "torch_dtype": "bfloat16",
        "max_position_embeddings": 131072,
        "hidden_size": 4096,
        "vocab_size": 100352,
        "num_hidden_layers": 40,
        "layer_types": ["attention" if layer in (5, 15, 25, 35) else "mamba" for layer in range(40)],
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

"""A tiny NemotronH of a few dense layers, and a tokenizer for it."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from hybrid_kv.models.random_checkpoint import write_checkpoint

VOCAB = 101
KINDS = {"M": "linear_attention", "*": "full_attention", "-": "mlp"}


def write_tiny(folder: Path, pattern: str, **keys: Any) -> tuple[torch.nn.Module, Path]:
    """transformers' model and its folder."""
    kinds = [KINDS[letter] for letter in pattern]
    keys |= {
        "layers_block_type": kinds,
        "num_hidden_layers": len(kinds),
        "num_nextn_predict_layers": 0,
    }
    return write_checkpoint("nemotron_h", folder, seed=1, keys=keys), folder


class Characters:
    """One character per token: enough of a tokenizer for engine tests."""

    eos_token_id = None

    def encode(self, text: str) -> list[int]:
        return [ord(letter) - 33 for letter in text]

    def decode(self, token_ids: Sequence[int]) -> str:
        return "".join(chr(token + 33) for token in token_ids)

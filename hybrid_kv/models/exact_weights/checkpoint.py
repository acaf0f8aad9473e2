"""Writes exact checkpoints: a config, weights and a tokenizer.

All weights, those of the draft head too, are bfloat16 numbers.
"""

from __future__ import annotations

import json
from pathlib import Path

from hybrid_kv.config import ConfigError
from hybrid_kv.models.exact_weights import design
from hybrid_kv.models.exact_weights.families import FAMILIES, NUM_LAYERS, Tensors, tensors_of
from hybrid_kv.models.random_checkpoint import quiet, write_tokenizer

KEY = "exact_weights"  # of config.json: the seed; engines ignore it
LONGEST = 4096
_KEYS = {
    "vocab_size": design.VOCABULARY,
    "hidden_size": design.WIDTH,
    "intermediate_size": design.NUM_UNITS,
    "num_hidden_layers": NUM_LAYERS,
    "max_position_embeddings": LONGEST,
    "bos_token_id": 1,
    "eos_token_id": 0,
    "pad_token_id": None,
}


def write_exact_weights(model_type: str, folder: str | Path, seed: int = 0) -> int:
    """Write an exact checkpoint of a family.

    Returns:
        The number of weights.

    Raises:
        ConfigError: none can be made of this family.
    """
    from transformers import AutoConfig, AutoModelForCausalLM

    if model_type not in FAMILIES:
        raise ConfigError(f"no exact checkpoint of {model_type}; there are {', '.join(FAMILIES)}")
    family = FAMILIES[model_type]
    folder = Path(folder)
    tensors = tensors_of(family, seed)
    keys = {
        **_KEYS,
        **family.keys,
        "tie_word_embeddings": family.is_tied,
        "dtype": "float32",
        KEY: {"seed": seed},
    }
    with quiet():
        config = AutoConfig.for_model(model_type, **keys)
        model = AutoModelForCausalLM.from_config(config)  # type: ignore[no-untyped-call]
        model.load_state_dict(tensors, strict=not family.is_tied)
        model.tie_weights()
        model.save_pretrained(folder, max_shard_size="1TB")
    if family.draft_head is not None:
        _add(family.draft_head(), folder / "model.safetensors")
    write_tokenizer(design.VOCABULARY, folder)
    return sum(tensor.numel() for tensor in tensors.values())


def _add(tensors: Tensors, path: Path) -> None:
    """Add tensors to the file of the model's weights: transformers leaves a draft head out."""
    from safetensors.torch import load_file, save_file

    # The file may not hold one tensor twice
    apart = {name: tensor.clone() for name, tensor in tensors.items()}
    save_file({**load_file(path), **apart}, path, metadata={"format": "pt"})


def has_exact_weights(folder: str | Path) -> bool:
    """Return whether a checkpoint is an exact one."""
    file = Path(folder) / "config.json"
    return file.is_file() and KEY in json.loads(file.read_text())

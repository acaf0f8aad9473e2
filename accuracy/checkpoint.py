"""A guard model's checkpoint folder, written and read."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from accuracy.nemotron_h import NemotronH, NemotronHConfig
from accuracy.parts import GuardModel
from accuracy.qwen3_5_moe import Qwen35Moe, Qwen35MoeConfig

# Sizes and module, by the ``model_type`` of config.json.
MODELS: dict[str, tuple[Any, type[GuardModel]]] = {
    "nemotron_h": (NemotronHConfig, NemotronH),
    "qwen3_5_moe_text": (Qwen35MoeConfig, Qwen35Moe),
}


def new_model(model_type: str, vocab_size: int) -> GuardModel:
    """One of ``MODELS`` with the random weights that training starts from."""
    config, module = MODELS[model_type]
    return module(config(vocab_size))


def save_checkpoint(model: GuardModel, folder: Path, stop_ids: list[int]) -> None:
    """Write config.json, generation_config.json and model.safetensors, whose matrices are float16.

    The config's dtype is float32: that is what every engine then loads the weights as. Vectors stay float32.
    """
    folder.mkdir(parents=True, exist_ok=True)
    tensors = {}
    for name, value in model.state_dict().items():
        tensors[name] = value.detach().to("cpu", torch.float16 if value.dim() > 1 else torch.float32).contiguous()
    partial = folder / "model.safetensors.partial"
    save_file(tensors, partial, metadata={"format": "pt"})
    partial.replace(folder / "model.safetensors")
    generation = {"do_sample": False, "eos_token_id": stop_ids, "pad_token_id": 0}
    for name, content in (("config.json", model.config.to_hf()), ("generation_config.json", generation)):
        (folder / name).write_text(json.dumps(content, indent=2) + "\n")


def load_checkpoint(folder: Path) -> GuardModel:
    """The model in ``folder``, with its MTP head."""
    values = json.loads((folder / "config.json").read_text())
    config, module = MODELS[values["model_type"]]
    model = module(config.from_hf(values))
    model.load_state_dict(load_file(folder / "model.safetensors"))
    return model.eval()

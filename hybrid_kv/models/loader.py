"""Checkpoint folders in the Hugging Face format: config.json, *.safetensors, tokenizer files."""

from __future__ import annotations

import json
from hashlib import blake2b
from pathlib import Path
from typing import Any

import torch

from hybrid_kv.config import ConfigError, EngineConfig
from hybrid_kv.models.nemotron_h import NemotronH, NemotronHConfig, join_qkv, layer_kinds
from hybrid_kv.models.nemotron_h_mtp import NemotronHMTP
from hybrid_kv.models.shapes import model_shape, read_config


def resolve_folder(model: str | Path) -> Path:
    """A local checkpoint folder; a name that is no folder is looked up on the hub."""
    folder = Path(model)
    if folder.is_dir():
        return folder
    if str(model).count("/") == 1 and not str(model).startswith((".", "/", "~")):
        from huggingface_hub import snapshot_download

        try:
            return Path(snapshot_download(str(model), allow_patterns=["*.json", "*.safetensors", "tokenizer*"]))
        except Exception as error:  # the hub's client raises many unrelated types for "not there" and "no network"
            first = (str(error).splitlines() or [""])[0]
            raise ConfigError(f"model {model}: not a folder, and the hub says: {first[:160]}") from None
    raise ConfigError(f"model folder {model} does not exist")


def fingerprint(model: str | Path) -> str:
    """Changes when the checkpoint does: its configuration, and name, size and date of every file of weights.

    Not the weights themselves: hashing 60 GB takes a minute, and nobody edits them in place.
    """
    folder = resolve_folder(model)
    files = [(file.name, file.stat().st_size, file.stat().st_mtime_ns) for file in sorted(folder.glob("*.safetensors"))]
    return blake2b(repr((read_config(folder), files)).encode(), digest_size=16).hexdigest()


def load_tensors(folder: Path, mtp: bool = False) -> dict[str, torch.Tensor]:
    """The tensors of a checkpoint, on the CPU: those of the model, or those of its MTP head."""
    from safetensors import SafetensorError, safe_open  # an extra: an engine around a model object needs none

    index = folder / "model.safetensors.index.json"
    if index.exists():
        files = [folder / name for name in sorted(set(read_json(index).get("weight_map", {}).values()))]
    else:
        files = sorted(folder.glob("*.safetensors"))
    if not files:
        raise ConfigError(f"{folder} has no *.safetensors file; only that format is read")
    tensors: dict[str, torch.Tensor] = {}
    for file in files:
        try:
            with safe_open(file, framework="pt") as opened:
                names = [name for name in opened.keys() if name.startswith("mtp.") == mtp]  # noqa: SIM118 (no mapping)
                loaded = {name: opened.get_tensor(name) for name in names}
        except (SafetensorError, OSError) as error:
            raise ConfigError(f"{file} cannot be read ({error}); it is truncated or no safetensors file") from None
        if twice := sorted(tensors.keys() & loaded.keys()):
            raise ConfigError(f"{file} holds {twice[0]} again; leave one file per tensor in {folder}")
        tensors |= loaded
    return tensors


def read_json(file: Path) -> dict[str, Any]:
    """A JSON object; an absent file is an empty one."""
    if not file.exists():
        return {}
    try:
        values = json.loads(file.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ConfigError(f"{file} is not JSON ({error}); download it again") from None
    return values if isinstance(values, dict) else {}


def load_eos_token_ids(model: str | Path) -> frozenset[int]:
    """All tokens that end a text, of generation_config.json or else config.json; instruct models list several."""
    folder = resolve_folder(model)
    for name in ("generation_config.json", "config.json"):
        ids = read_json(folder / name).get("eos_token_id")
        if ids is not None:
            return frozenset(ids if isinstance(ids, list) else [ids])
    return frozenset()


def load_model(model: str | Path, config: EngineConfig, device: torch.device) -> NemotronH:
    """The model of a checkpoint folder, in evaluation mode, on `device`.

    Raises:
        ConfigError: an unknown architecture, a missing, surplus or misshapen tensor.
    """
    folder = resolve_folder(model)
    raw = read_config(folder)
    if raw.get("model_type") != "nemotron_h":
        raise ConfigError(
            f"{folder}: model_type {raw.get('model_type')!r} can't be run; nemotron_h can (others can only be planned)"
        )
    shape = model_shape(raw, cache=config.cache, dtype=config.dtype)
    built = NemotronH(NemotronHConfig.from_hf(raw), shape.layers)
    _assign(built, NemotronH.convert_weights(load_tensors(folder)), folder)
    return built.to(device=device, dtype=shape.dtype).eval()


def load_mtp(model: str | Path, target: NemotronH) -> NemotronHMTP:
    """The MTP head of `target`'s checkpoint folder, in the target's dtype, on its device.

    Raises:
        ConfigError: no such head, one of another kind, a missing, surplus or misshapen tensor.
    """
    folder = resolve_folder(model)
    raw = read_config(folder)
    if (count := raw.get("num_nextn_predict_layers", 0)) != 1:
        raise ConfigError(
            f"{folder}: config.json has num_nextn_predict_layers={count}, 1 is supported; draft with n-grams instead"
        )
    if (kinds := layer_kinds(raw, "mtp_")) != ("full_attention", "mlp"):
        raise ConfigError(
            f"{folder}: an MTP head of the layers {kinds} is not supported, ('full_attention', 'mlp') is; draft with "
            "n-grams instead"
        )
    built = NemotronHMTP(NemotronHConfig.from_hf(raw), target)
    tensors = join_qkv(load_tensors(folder, mtp=True))
    # Inside a module of the name "mtp", so that messages name tensors as the checkpoint does.
    _assign(torch.nn.ModuleDict({"mtp": built}), tensors, folder)
    weight = target.embeddings.weight
    return built.to(device=weight.device, dtype=weight.dtype).eval()


def _assign(model: torch.nn.Module, tensors: dict[str, torch.Tensor], folder: Path) -> None:
    wanted = dict(model.named_parameters())
    if missing := sorted(set(wanted) - set(tensors)):
        raise ConfigError(f"{folder} lacks {len(missing)} tensors, the first is {missing[0]}")
    names = {id(parameter): name for name, parameter in wanted.items()}
    every = model.named_parameters(remove_duplicate=False)
    tied = {name: names[id(parameter)] for name, parameter in every if name not in wanted}
    if surplus := sorted(set(tensors) - set(wanted) - set(tied)):
        raise ConfigError(
            f"{folder} has {len(surplus)} tensors that the model does not know, the first is {surplus[0]}"
        )
    for name, source in tied.items():
        if name in tensors and not torch.equal(tensors[name], tensors[source]):
            raise ConfigError(
                f"{folder}: config.json ties {name} to {source}, but they differ; set tie_word_embeddings to false"
            )
    for name, parameter in wanted.items():
        if parameter.shape != tensors[name].shape:
            raise ConfigError(
                f"{folder}: {name} has shape {tuple(tensors[name].shape)}, config.json says {tuple(parameter.shape)}"
            )
        parameter.data = tensors[name]


def load_tokenizer(model: str | Path) -> Any:
    """The checkpoint's tokenizer, through transformers."""
    from transformers import AutoTokenizer

    folder = resolve_folder(model)
    if not any((folder / name).exists() for name in ("tokenizer.json", "tokenizer_config.json", "tokenizer.model")):
        raise ConfigError(
            f"{folder} has no tokenizer; add tokenizer.json or pass token ids and LLM(..., tokenizer=...)"
        )
    try:
        return AutoTokenizer.from_pretrained(folder)
    except (OSError, ValueError, json.JSONDecodeError) as error:
        raise ConfigError(f"{folder}: the tokenizer cannot be read ({str(error).splitlines()[0]})") from None

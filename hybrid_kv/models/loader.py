"""Checkpoint folders in the Hugging Face format: config.json, *.safetensors, tokenizer files."""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable
from functools import partial
from hashlib import blake2b
from pathlib import Path
from typing import Any, cast

import torch
from torch import nn

from hybrid_kv.config import CacheConfig, ConfigError, EngineConfig, is_path
from hybrid_kv.files import require_regular
from hybrid_kv.models import dflash
from hybrid_kv.models.causal_lm import CausalLM
from hybrid_kv.models.config_file import (
    ConfigFile,
    first_line,
    from_hub,
    is_hub_id,
    read_config,
    read_json,
)
from hybrid_kv.models.interface import BlockDraftHead, DraftHead, Model
from hybrid_kv.models.registry import Tensors, family_of, head_of, require_head, runnable
from hybrid_kv.models.shapes import model_shape

LOGGER = logging.getLogger(__name__)


def resolve_folder(model: str | Path) -> Path:
    """Return a local checkpoint folder; a name that is no folder is looked up on the hub."""
    folder = Path(model)
    try:
        if folder.is_dir():
            for file in folder.iterdir():
                if file.exists() and not file.is_dir():
                    # Transformers and safetensors would wait for a pipe's writer.
                    require_regular(file)
            return folder
    except OSError as error:
        raise ConfigError(
            f"model folder {str(model)[:80]!r} cannot be read: {error.strerror}"
        ) from None
    if is_hub_id(model):
        patterns = ["*.json", "*.safetensors", "tokenizer*"]
        return from_hub(model, "snapshot_download", allow_patterns=patterns)
    raise ConfigError(
        f"model folder {model} does not exist; give one with config.json and *.safetensors"
    )


def fingerprint(model: str | Path) -> str:
    """Return a digest of a checkpoint: configuration, and name, size and date of its weight files.

    Not the weights themselves: hashing 60 GB takes a minute, and they are not edited in place.
    """
    folder = resolve_folder(model)
    files = [
        (file.name, file.stat().st_size, file.stat().st_mtime_ns)
        for file in sorted(folder.glob("*.safetensors"))
    ]
    return blake2b(repr((read_config(folder), files)).encode(), digest_size=16).hexdigest()


def load_eos_token_ids(model: str | Path) -> frozenset[int]:
    """Return all tokens that end a text, of generation_config.json or else config.json.

    Instruct models list several.

    Raises:
        ConfigError: they are no integers.
    """
    folder = resolve_folder(model)
    for name in ("generation_config.json", "config.json"):
        ids = (read_json(folder / name) or {}).get("eos_token_id")
        if ids is None:
            continue
        listed = ids if isinstance(ids, list) else [ids]
        if not all(
            isinstance(token, int) and not isinstance(token, bool) and token >= 0
            for token in listed
        ):
            raise ConfigError(
                f"{folder / name}: eos_token_id={ids!r} must be a token id or a list of them"
            )
        return frozenset(listed)
    return frozenset()


def check_model(model: str | Path, config: EngineConfig) -> None:
    """Read config.json as `load_model` does, and no weight.

    Raises:
        ConfigError: an unknown family, or a value that its model cannot have.
    """
    _build(resolve_folder(model), config)


def load_model(model: str | Path, config: EngineConfig, device: torch.device) -> Model:
    """Load the model of a checkpoint folder, in evaluation mode, onto `device`.

    Raises:
        ConfigError: an unknown family, a missing, surplus or misshapen tensor, weights that are no
            finite floats.
    """
    folder = resolve_folder(model)
    file, built, dtype = _build(folder, config)
    family = family_of(file)
    head = head_of(file)
    skipped: list[str] = []

    def is_wanted(name: str) -> bool:
        if name.startswith(family.skips):
            skipped.append(name)
            return False
        return head is None or not name.startswith(head.prefix)

    tensors = load_tensors(folder, is_wanted)
    if skipped:
        LOGGER.warning(
            "%s: its language model is loaded, %d tensors such as %s are not",
            folder,
            len(skipped),
            skipped[0],
        )
    _assign(built, family.convert_weights(tensors), folder)
    return cast(Model, _placed(built, device, dtype))


def _build(folder: Path, config: EngineConfig) -> tuple[ConfigFile, nn.Module, torch.dtype]:
    """Return config.json, its model, still without weights, and the dtype to compute in."""
    file = ConfigFile.read(folder)
    build = family_of(file).build
    if build is None:
        raise file.fail(
            f"model_type {file.model_type!r} can't be run; {', '.join(runnable())} can (others can "
            "only be planned)"
        )
    shape = model_shape(file, cache=config.cache, dtype=config.dtype)
    return file, _on_meta(file, partial(build, file, shape.layers)), shape.dtype


def load_head(model: str | Path, target: Model) -> DraftHead:
    """Load the draft head of `target`'s checkpoint folder, in the target's dtype, onto its device.

    Raises:
        ConfigError: no such head, one of another kind, a missing, surplus or misshapen tensor.
    """
    folder = resolve_folder(model)
    file = ConfigFile.read(folder)
    head = require_head(file)
    prefix = head.prefix
    built = _on_meta(file, partial(head.build, file, target))

    def is_wanted(name: str) -> bool:
        return name.startswith(prefix)

    _assign(built, head.convert_weights(load_tensors(folder, is_wanted)), folder, prefix)
    weight = next(cast(nn.Module, target).parameters())
    return cast(DraftHead, _placed(built, weight.device, weight.dtype))


def load_block_head(drafter: str | Path, target: Model, cache: CacheConfig) -> BlockDraftHead:
    """Load a block drafter for `target` from its own folder, in the target's dtype and place.

    Raises:
        ConfigError: no such drafter, or none for this target; a missing, surplus or misshapen
            tensor.
    """
    folder = resolve_folder(drafter)
    file = ConfigFile.read(folder)
    if not isinstance(target, CausalLM):
        raise file.fail(
            f"a {type(target).__name__} does not keep the outputs of its layers for a drafter; "
            "draft with n-grams instead"
        )
    weight = next(target.parameters())
    dtype = str(weight.dtype).removeprefix("torch.")
    built = _on_meta(file, partial(dflash.build, file, target, cache, dtype))
    _assign(built, dflash.convert(load_tensors(folder, _is_any)), folder)
    return cast(BlockDraftHead, _placed(built, weight.device, weight.dtype))


def _is_any(name: str) -> bool:
    return True


def _placed(model: nn.Module, device: torch.device, dtype: torch.dtype) -> nn.Module:
    """Put a model on `device` in evaluation mode, in `dtype` but for the names in `as_stored`."""
    for module in model.modules():
        kept = getattr(module, "as_stored", ())
        for name, parameter in module.named_parameters(recurse=False):
            parameter.data = parameter.data.to(device=device, dtype=None if name in kept else dtype)
    return model.eval()


def _on_meta(file: ConfigFile, build: Callable[[], nn.Module]) -> nn.Module:
    """Build a module whose parameters have shapes and no memory.

    A size that is wrong costs nothing, and is named below.
    """
    try:
        with torch.device("meta"):
            return build()
    except (RuntimeError, OverflowError) as error:
        raise file.fail(
            f"no model can have these sizes ({first_line(error)}); correct the file"
        ) from None


def load_tensors(folder: Path, is_wanted: Callable[[str], bool]) -> Tensors:
    """Load the tensors of a checkpoint whose names are wanted, onto the CPU.

    Raises:
        ConfigError: a file is missing, damaged, or holds a tensor that another one holds, too.
    """
    # An extra: an engine around a model object needs none.
    from safetensors import SafetensorError, safe_open

    tensors: Tensors = {}
    for file in _weight_files(folder):
        try:
            with safe_open(file, framework="pt") as opened:
                loaded = {
                    name: opened.get_tensor(name) for name in list(opened.keys()) if is_wanted(name)
                }
        except FileNotFoundError:
            raise ConfigError(
                f"{file} does not exist, but {folder}'s index names it; download it again"
            ) from None
        except (SafetensorError, OSError) as error:
            raise ConfigError(
                f"{file} cannot be read ({error}); it is truncated or no safetensors file"
            ) from None
        twice = sorted(tensors.keys() & loaded.keys())
        if twice:
            raise ConfigError(
                f"{file} holds {twice[0]} again; leave one file per tensor in {folder}"
            )
        tensors |= loaded
    return tensors


def _weight_files(folder: Path) -> list[Path]:
    """Return the files that the index names, or without one all."""
    index = folder / "model.safetensors.index.json"
    listed = read_json(index)
    if listed is None:
        files = sorted(folder.glob("*.safetensors"))
    else:
        names = listed.get("weight_map")
        if (
            not isinstance(names, dict)
            or not names
            or not all(_is_file_name(name) for name in names.values())
        ):
            raise ConfigError(
                f"{index}: weight_map must map tensors to names of files beside it; download it "
                "again"
            )
        files = [folder / name for name in sorted(set(names.values()))]
    if not files:
        raise ConfigError(f"{folder} has no *.safetensors file; only that format is read")
    return files


def _is_file_name(name: Any) -> bool:
    return is_path(name) and name not in (".", "..") and Path(name).name == name


def _assign(model: nn.Module, tensors: Tensors, folder: Path, prefix: str = "") -> None:
    """Give every parameter the tensor of its name after `prefix`."""
    parameters = {prefix + name: parameter for name, parameter in model.named_parameters()}
    missing = sorted(set(parameters) - set(tensors))
    if missing:
        raise ConfigError(f"{folder} lacks {len(missing)} tensors, the first is {missing[0]}")
    names = {id(parameter): name for name, parameter in parameters.items()}
    every = [
        (prefix + name, parameter)
        for name, parameter in model.named_parameters(remove_duplicate=False)
    ]
    tied = {name: names[id(parameter)] for name, parameter in every if name not in parameters}
    surplus = sorted(set(tensors) - set(parameters) - set(tied))
    if surplus:
        raise ConfigError(
            f"{folder} has {len(surplus)} tensors that the model does not know, the first is "
            f"{surplus[0]}"
        )
    for name, source in tied.items():
        if name in tensors and not torch.equal(tensors[name], tensors[source]):
            raise ConfigError(
                f"{folder}: config.json ties {name} to {source}, but they differ; set "
                "tie_word_embeddings to false"
            )
    for name, parameter in parameters.items():
        _check(tensors[name], parameter, f"{folder}: {name}")
    loaded = {
        id(parameter): nn.Parameter(tensors[name], requires_grad=False)
        for name, parameter in parameters.items()
    }
    for module in model.modules():
        for name, parameter in list(module.named_parameters(recurse=False, remove_duplicate=False)):
            setattr(module, name, loaded[id(parameter)])


def _check(tensor: torch.Tensor, parameter: torch.Tensor, label: str) -> None:
    if parameter.shape != tensor.shape:
        raise ConfigError(
            f"{label} has shape {tuple(tensor.shape)}, config.json says {tuple(parameter.shape)}"
        )
    if not tensor.is_floating_point() or tensor.dtype.itemsize < 2:
        raise ConfigError(
            f"{label} is of type {str(tensor.dtype).removeprefix('torch.')}: quantised weights "
            "can't be run; use a "
            "checkpoint in bfloat16, float16 or float32"
        )
    # One pass, without a copy.
    if tensor.numel() and not all(bound.isfinite() for bound in tensor.aminmax()):
        raise ConfigError(
            f"{label} holds NaN or infinity: every answer would be void; download the checkpoint "
            "again"
        )


def load_tokenizer(model: str | Path) -> Any:
    """Load the checkpoint's tokenizer, through transformers.

    Raises:
        ConfigError: there is none, or transformers cannot read it.
    """
    from transformers import AutoTokenizer

    from hybrid_kv.models.random_checkpoint import quiet

    folder = resolve_folder(model)
    files = [
        folder / name for name in ("tokenizer.json", "tokenizer_config.json", "tokenizer.model")
    ]
    if not any(file.exists() for file in files):
        raise ConfigError(
            f"{folder} has no tokenizer; add tokenizer.json or pass token ids and LLM(..., "
            "tokenizer=...)"
        )
    for file in files[:2]:
        read_json(file)  # says what is wrong where transformers only stumbles
    try:
        with quiet():  # It warns of what it finds in config.json, which the model reads by itself.
            tokenizer = AutoTokenizer.from_pretrained(folder)
            # Some settings are only looked at when there is a text.
            tokenizer.decode(tokenizer.encode("a b"))
        # The engine refuses what is too long; the tokenizer only warns.
        tokenizer.model_max_length = sys.maxsize
        return tokenizer
    # Of many unrelated types: it indexes and calls what a damaged file may hold as anything.
    except Exception as error:
        raise ConfigError(
            f"{folder}: transformers cannot read {_unreadable(folder)} ({type(error).__name__}: "
            f"{first_line(error)}); "
            "download its files again, or correct them"
        ) from None


def _unreadable(folder: Path) -> str:
    """Name the file of which transformers' tokenizers complain: they read config.json, too."""
    from transformers import AutoConfig

    try:
        AutoConfig.from_pretrained(folder)
    except Exception:
        return "config.json"
    return "the tokenizer"

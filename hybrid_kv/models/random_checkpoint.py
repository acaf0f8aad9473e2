"""Checkpoints with random weights, of any family that runs here: for tests, and for other engines.

Written by transformers from its own config class, so that every engine that reads the Hugging Face
format loads them. Its own start would give nearly flat logits and states that forget: here logits
have wide margins between the best two tokens, and a state remembers for tens of tokens.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import nn

import hybrid_kv.models.families  # noqa: F401  (registers them)
from hybrid_kv.config import ConfigError
from hybrid_kv.models import dflash
from hybrid_kv.models.config_file import ConfigFile
from hybrid_kv.models.drafter_file import ARCHITECTURE
from hybrid_kv.models.registry import family_of, head_of, sized, sizes_of
from hybrid_kv.models.specs import WINDOW

EOS = 0  # what `generate` stops at
_DRAFTER = {
    "block_size": 16,
    "head_dim": 16,
    "intermediate_size": 52,
    "num_attention_heads": 4,
    "num_hidden_layers": 2,
    "num_key_value_heads": 2,
    "sliding_window": 11,
    "rope_theta": 10000.0,
}


def write_checkpoint(
    model_type: str,
    folder: str | Path,
    size: str = "tiny",
    seed: int = 0,
    keys: Mapping[str, Any] | None = None,
) -> nn.Module:
    """Write config.json, weights, those of the draft head too, and a tokenizer of one token a word.

    Args:
        size: of `registry.sizes_of`.
        keys: replace some of that size's.

    Returns:
        transformers' model.

    Raises:
        ConfigError: the family has no such size, or cannot be built from these keys.
    """
    folder = Path(folder)
    model = random_model(model_type, size, seed, keys)
    with quiet():
        # One file, to which a head's weights can be added.
        model.save_pretrained(folder, max_shard_size="1TB")
    file = ConfigFile.read(folder)
    head = head_of(file)
    shapes = {} if head is None else head.shapes(file)
    if head is not None and shapes:
        _save_head(head.prefix, shapes, folder, seed)
    write_tokenizer(file.size("vocab_size"), folder)
    return model


def write_drafter(
    folder: str | Path,
    target: str | Path,
    seed: int = 0,
    keys: Mapping[str, Any] | None = None,
) -> None:
    """Write config.json and weights of a block drafter for a target, see `models.dflash`.

    Its logits have the target's margins; what it says has nothing to do with the target's answers.

    Args:
        target: a checkpoint's folder.
        keys: replace some of config.json's.
    """
    from safetensors.torch import save_file

    folder = Path(folder)
    folder.mkdir(exist_ok=True)
    file = ConfigFile.read(target)
    last = len(family_of(file).kinds(file)) - 1
    values = {
        "architectures": [ARCHITECTURE],
        "model_type": "qwen3",
        "hidden_size": file.size("hidden_size"),
        "vocab_size": file.size("vocab_size"),
        **_DRAFTER,
        "dflash_config": {"mask_token_id": 1, "target_layer_ids": sorted({0, last // 2, last})},
        **(keys or {}),
    }
    values["layer_types"] = [WINDOW] * values["num_hidden_layers"]
    (folder / "config.json").write_text(json.dumps(values, indent=2), encoding="utf-8")
    shapes = dflash.shapes(ConfigFile.read(folder))
    drawn = _drawn(shapes, torch.Generator().manual_seed(seed))
    save_file(drawn, folder / "model.safetensors", metadata={"format": "pt"})


def random_model(
    model_type: str, size: str = "tiny", seed: int = 0, keys: Mapping[str, Any] | None = None
) -> Any:
    """Return transformers' model with random weights, float32, in evaluation mode."""
    from transformers import AutoConfig, AutoModelForCausalLM

    family_of(ConfigFile({"model_type": model_type}, "checkpoint"))
    sizes = sizes_of(model_type)
    if size not in sizes:
        known = ", ".join(f"{name} ({'|'.join(sizes)})" for name, sizes in sized().items())
        raise ConfigError(f"no checkpoint of {model_type} in size {size!r}; there are {known}")
    values = {**sizes[size], **(keys or {}), "dtype": "float32"}
    with quiet():
        config = AutoConfig.for_model(model_type, **values)
        model = AutoModelForCausalLM.from_config(config).eval()  # type: ignore[no-untyped-call]
    fill(model, seed)
    return model


def fill(model: nn.Module, seed: int) -> None:
    """Draw a value for every weight and every buffer that is saved; see `_value`."""
    g = torch.Generator().manual_seed(seed)
    saved = model.state_dict(keep_vars=True)
    done = set[int]()
    for name, tensor in saved.items():
        if tensor.is_floating_point() and id(tensor) not in done:
            done.add(id(tensor))
            tensor.data.copy_(_value(name, tensor.data, g))


def _value(name: str, start: torch.Tensor, g: torch.Generator) -> torch.Tensor:
    """Draw the value of a weight, in the range of its kind.

    Weights that are not known to be projections stay near the start that their class gave them.
    """
    noise = torch.randn(start.shape, generator=g)
    last = name.split(".")[-1]
    if last == "A_log":
        return torch.rand(start.shape, generator=g).mul_(3.5).add_(0.5).log_()
    if last == "dt_bias" or name.endswith("dt_proj.bias"):
        return torch.rand(start.shape, generator=g).mul_(2).sub_(2)
    if last == "sinks":
        # From a tenth of a query's weight to most of it.
        return 2 * noise
    if "embed" in name:
        return noise
    if "conv" in name and start.dim() == 3:
        return 0.5 * noise
    if start.dim() >= 2 and "adapter" in name:
        # As large as what they adapt, they would sharpen every softmax.
        return noise * (0.5 / start.shape[-1] ** 0.5)
    if start.dim() >= 2:
        return noise * (1.2 / start.shape[-1] ** 0.5)
    return start + 0.1 * noise


@contextmanager
def quiet() -> Iterator[None]:
    """Silence transformers' progress bars, and its warnings of kernels that are not installed."""
    from transformers.utils import logging

    shown = logging.is_progress_bar_enabled()
    level = logging.get_verbosity()
    logging.disable_progress_bar()  # type: ignore[no-untyped-call]
    logging.set_verbosity_error()  # type: ignore[no-untyped-call]
    try:
        yield
    finally:
        logging.set_verbosity(level)
        if shown:
            logging.enable_progress_bar()  # type: ignore[no-untyped-call]


def _save_head(
    prefix: str, shapes: Mapping[str, tuple[int, ...] | str], folder: Path, seed: int
) -> None:
    """Add a draft head to the file of the model's weights: transformers leaves it out.

    See `HeadFamily.shapes`.
    """
    from safetensors.torch import load_file, save_file

    g = torch.Generator().manual_seed(seed + 1)
    path = folder / "model.safetensors"
    tensors = load_file(path)
    head_shapes = dict[str, tuple[int, ...]]()
    for start, given in shapes.items():
        if isinstance(given, str):
            alike = {
                name.removeprefix(given): tensor
                for name, tensor in tensors.items()
                if name.startswith(given)
            }
            head_shapes |= {
                prefix + start + name: tuple(tensor.shape) for name, tensor in alike.items()
            }
        else:
            head_shapes[prefix + start] = given
    save_file({**tensors, **_drawn(head_shapes, g)}, path, metadata={"format": "pt"})


def _drawn(
    shapes: Mapping[str, tuple[int, ...]], generator: torch.Generator
) -> dict[str, torch.Tensor]:
    """Draw tensors of these shapes; norms begin at 1, see `_value`."""
    return {
        name: _value(name, torch.full(shape, float("norm" in name)), generator)
        for name, shape in shapes.items()
    }


def write_tokenizer(vocab_size: int, folder: Path) -> None:
    """Write a tokenizer of one token a word: "w7 w8" is [7, 8]."""
    from tokenizers import AddedToken, Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    words = [f"w{i}" for i in range(vocab_size)]
    # Qwen3.5's class, which transformers takes whatever the files say, cuts a text by itself, but
    # not at added tokens.
    model = models.BPE(
        vocab={word: i for i, word in enumerate(words)},
        merges=[],
        unk_token=words[EOS],
        fuse_unk=True,
    )
    tokenizer = Tokenizer(model)
    tokenizer.add_tokens([AddedToken(word, normalized=False) for word in words])
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    made = PreTrainedTokenizerFast(  # type: ignore[no-untyped-call]
        tokenizer_object=tokenizer, eos_token=f"w{EOS}"
    )
    made.save_pretrained(folder)

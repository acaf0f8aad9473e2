"""The exact model as a checkpoint of another engine, and what it answers there.

A checkpoint is a `config.json` alone: the numbers of `models.exact`, and what an engine must know
of any model. Its answers are not the argmax of the residues: see `ExactAnswers`.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from hybrid_kv.config import ConfigError
from hybrid_kv.models.exact import (
    WINDOWS,
    ExactAttention,
    ExactConfig,
    ExactMamba,
    ExactModel,
    ExactOracle,
    Residues,
)

# Patterns of `models.exact`, and the engine's kind of each layer with states.
PATTERNS: dict[str, tuple[str, dict[str, str]]] = {
    "mixed": ("M*WG*", {"M": "MAMBA2", "W": "SHORT_CONV", "G": "GDN_ATTN"}),
    "mamba2": ("M*MM*", {"M": "MAMBA2"}),
    "mamba1": ("M*MM*", {"M": "MAMBA1"}),
    "short_conv": ("W*WW*", {"W": "SHORT_CONV"}),
    "gdn": ("M*MM*", {"M": "GDN_ATTN"}),
    "kda": ("V*VV*", {"V": "GDN_ATTN"}),
    "linear": ("M*MM*", {"M": "LINEAR"}),
    # Two layers with windows: of one kind, in a group each.
    "window": ("*__M", {"M": "MAMBA2"}),
    "window_drafter": ("*M*M", {"M": "MAMBA2"}),
    # Some engines batch or roll back this one alone; vLLM rejects it as no hybrid.
    "attention": ("***", {}),
}
# A layer with the parts of another one, so that a pattern has two kinds of these parts.
ALIASES = {"G": "M"}
# Attention of a head for drafts that is of no layer; other heads have that of the first one.
HEADS = {"window_drafter": "-"}
VOCABULARY, ECHO, CYCLE = 100, 8, 5
LONGEST = 4096


def _config(name: str) -> ExactConfig:
    """Return the configuration of an exact model by its name.

    Raises:
        ConfigError: there is no such exact model.
    """
    if name not in PATTERNS:
        raise ConfigError(
            f"exact:{name}: there is no such exact model; use one of {', '.join(PATTERNS)}"
        )
    pattern = "".join(ALIASES.get(letter, letter) for letter in PATTERNS[name][0])
    return ExactConfig(pattern=pattern, vocab_size=VOCABULARY)


def _weights(layer: ExactMamba | ExactAttention, letter: str) -> dict[str, Any]:
    """Return the weights of a layer, and the numbers of its window, as JSON has them."""
    weights = {
        key: np.array(value).tolist()
        for key, value in vars(layer).items()
        if key != "name" and value is not None  # such as a sliding window that there is not
    }
    return weights | ({"heads": WINDOWS[letter][1]} if letter in WINDOWS else {})


def write_exact_checkpoint(name: str, folder: str | Path) -> None:
    """Write the `config.json` of one of `PATTERNS`.

    Raises:
        ConfigError: there is no such exact model.
    """
    config = _config(name)
    model, (letters, kinds) = ExactModel(config), PATTERNS[name]
    layers = [
        {"kind": kinds.get(letter, ""), "weights": _weights(layer, letter)}
        for letter, layer in zip(letters, model.layers, strict=True)
    ]
    head = HEADS.get(name, "")
    drafting = ExactModel(replace(config, pattern=config.pattern + head)).layers[-1]
    exact = {
        "name": name,
        "echo": ECHO,
        "embedding": model.embedding.tolist(),
        "logit_map": model.logit_map.tolist(),
        "layers": layers,
        "head": _weights(drafting, head)
        if head
        else next(each["weights"] for each in layers if not each["kind"]),
    }
    about: dict[str, Any] = {
        "architectures": ["ExactHybridForCausalLM"],
        "model_type": "llama",  # the plainest reader of what follows
        "hidden_size": config.width,
        "head_dim": config.width,
        "num_attention_heads": 1,
        "num_key_value_heads": 1,
        "intermediate_size": config.width,
        "num_hidden_layers": len(layers),
        "layers_block_type": ["mamba" if one["kind"] else "attention" for one in layers],
        "mamba_chunk_size": 8,
        "vocab_size": VOCABULARY,
        "max_position_embeddings": LONGEST,
        "torch_dtype": "float32",
        "tie_word_embeddings": False,
        "bos_token_id": 0,
        "eos_token_id": 0,
        "exact": exact,
    }
    (Path(folder) / "config.json").write_text(json.dumps(about))


def has_windows(name: str) -> bool:
    """Return whether layers of a model, or its head, see the last tokens alone."""
    return any(letter in WINDOWS for letter in PATTERNS[name][0] + HEADS.get(name, ""))


def name_of(folder: str | Path) -> str:
    """Return the name of a checkpoint's model, one of `PATTERNS`."""
    return json.loads((Path(folder) / "config.json").read_text())["exact"]["name"]


def model_of(folder: str | Path) -> ExactModel:
    """Return the model of a checkpoint: its weights follow from its name."""
    return ExactModel(_config(name_of(folder)))


class ExactAnswers:
    """The answers of an exact model, alone and without a cache.

    A checksum of the whole history draws one token in `ECHO`; others follow their predecessor in a
    cycle of `CYCLE`: n-grams guess right at times, and what is wrong in the history still shows
    within some tokens.
    """

    def __init__(self, folder: str | Path) -> None:
        self._oracle = ExactOracle(model_of(folder))
        self._known: dict[tuple[int, ...], list[int]] = {}

    def tokens(self, prompt: Sequence[int], count: int) -> list[int]:
        """Return the first `count` tokens after a prompt.

        Each prompt is computed once, unless more tokens are needed.
        """
        key = tuple(prompt)
        if len(self._known.get(key, ())) < count:
            last = prompt[-1]

            def choose(residues: Residues, position: int) -> int:
                nonlocal last
                last = (
                    int(residues.argmax())
                    if residues[0] % ECHO == 0
                    else last - last % CYCLE + (last + 1) % CYCLE
                )
                return last

            self._known[key] = self._oracle.generate(prompt, count, choose=choose)
        return self._known[key][:count]


def is_exact(folder: str | Path) -> bool:
    """Return whether a checkpoint is that of an exact model."""
    file = Path(folder) / "config.json"
    return file.is_file() and "exact" in json.loads(file.read_text())

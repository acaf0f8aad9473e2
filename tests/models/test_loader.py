"""A checkpoint that cannot be used is one ConfigError of one line that names the value."""

from __future__ import annotations

import json
import math
import os
import random
import re
import shutil
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from hybrid_kv.check.guard_model import FOLDER as GUARD_MODEL
from hybrid_kv.config import ConfigError, EngineConfig
from hybrid_kv.engine.llm import LLM
from hybrid_kv.models.config_file import ConfigFile
from hybrid_kv.models.loader import load_head, load_model, load_tokenizer
from hybrid_kv.models.random_checkpoint import write_checkpoint
from hybrid_kv.models.rope import read_rope
from tests.models.tiny_nemotron import Characters, write_tiny
from tests.support.checkpoints import edit, edit_config

Original = tuple[str, dict[str, torch.Tensor]]


@pytest.fixture(scope="module")
def original(tmp_path_factory: pytest.TempPathFactory) -> Original:
    folder = write_tiny(tmp_path_factory.mktemp("original"), "M*-")[1]
    return (folder / "config.json").read_text(), load_file(folder / "model.safetensors")


@pytest.fixture
def folder(original: Original, tmp_path: Path) -> Path:
    config, tensors = original
    (tmp_path / "config.json").write_text(config)
    save_file(tensors, tmp_path / "model.safetensors")
    return tmp_path


def refused(folder: Path, match: str, tokenizer: Characters | None = None) -> None:
    with pytest.raises(ConfigError, match=match) as caught:
        LLM(
            folder,
            tokenizer=tokenizer or Characters(),
            device="cpu",
            dtype="float32",
            max_model_len=32,
        )
    assert "\n" not in str(caught.value)


def truncate(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-100])


def add(name: str, size: int) -> Callable[[Path], None]:
    return lambda folder: edit(folder, lambda stored: stored.update({name: torch.zeros(size)}))


def drop(name: str) -> Callable[[Path], None]:
    return lambda folder: edit(
        folder, lambda stored: stored.pop(next(key for key in stored if key.endswith(name)))
    )


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (drop("mixer.D"), "lacks .*mixer.D"),
        (drop("mixer.q_proj.weight"), "lacks .*qkv_proj"),
        (drop("mixer.k_proj.weight"), "lacks .*k_proj"),
        (drop("lm_head.weight"), "lacks .*lm_head"),
        (drop("mixer.conv1d.bias"), "lacks .*conv_bias"),
        (lambda folder: edit_config(folder, model_type="mamba3"), "'mamba3'"),
        (
            lambda folder: truncate(folder / "model.safetensors"),
            r"model\.safetensors cannot be read .*truncated",
        ),
        (lambda folder: (folder / "model.safetensors").unlink(), "safetensors"),
        (lambda folder: (folder / "config.json").unlink(), r"config\.json does not exist"),
        (
            add("backbone.layers.0.mixer.dt_bias", 5),
            r"dt_bias has shape \(5,\), config\.json says \(4,\)",
        ),
        (
            add("model.layers.9.mixer.D", 4),
            r"1 tensors that the model does not know, the first is layers\.9\.mixer\.D",
        ),
        (
            lambda folder: shutil.copy(folder / "model.safetensors", folder / "older.safetensors"),
            r"older.safetensors holds backbone\..* again; leave one file per tensor",
        ),
    ],
)
def test_a_damaged_folder_is_one_line(
    folder: Path, damage: Callable[[Path], object], message: str
) -> None:
    damage(folder)
    refused(folder, message)


def test_no_tokenizer(folder: Path) -> None:
    with pytest.raises(ConfigError, match="has no tokenizer"):
        LLM(folder, device="cpu", dtype="float32")


def test_tied_embeddings(folder: Path) -> None:
    edit_config(folder, tie_word_embeddings=True)
    refused(folder, r"ties lm_head\.weight to embed_tokens\.weight, but they differ")
    edit(folder, lambda tensors: tensors.pop("lm_head.weight"))
    model = LLM(
        folder, tokenizer=Characters(), device="cpu", dtype="float32", max_model_len=32
    ).model
    assert torch.equal(model.lm_head.weight, model.embed_tokens.weight)


def test_the_index_names_the_files(folder: Path) -> None:
    tensors = load_file(folder / "model.safetensors")
    save_file(
        {name: torch.zeros_like(tensor) for name, tensor in tensors.items()},
        folder / "older.safetensors",
    )
    index = {"weight_map": dict.fromkeys(tensors, "model.safetensors")}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    llm = LLM(folder, tokenizer=Characters(), device="cpu", dtype="float32", max_model_len=32)
    assert bool(llm.model.lm_head.weight.any())


def test_every_listed_eos_token_ends_a_text(folder: Path) -> None:
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": [3, 5]}))
    llm = LLM(folder, tokenizer=Characters(), device="cpu", dtype="float32", max_model_len=32)
    assert {3, 5} <= llm.eos_token_ids


class Recorded(dict):
    """A config.json that remembers which keys were read."""

    def __init__(self, values: dict[str, Any]) -> None:
        super().__init__(values)
        self.read = set()

    def get(self, key: str, default: Any = None) -> Any:
        self.read.add(key)
        return super().get(key, default)


def keys_that_are_read(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Of the guard model's config.json, by everything that loads it and its draft head."""
    values = Recorded(json.loads((GUARD_MODEL / "config.json").read_text()))
    with monkeypatch.context() as patch:
        patch.setattr(ConfigFile, "read", classmethod(lambda cls, source: cls(values, str(source))))
        load_head(GUARD_MODEL, load_model(GUARD_MODEL, EngineConfig(), torch.device("cpu")))
    return sorted(values.read)


def test_a_value_of_a_wrong_type_under_any_key_is_one_line_that_names_the_key(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every key that is read is refused by name; a key that a later version reads is tested too."""
    keys = keys_that_are_read(monkeypatch)
    assert len(keys) >= 29
    shutil.copytree(GUARD_MODEL, tmp_path, dirs_exist_ok=True)
    values = json.loads((tmp_path / "config.json").read_text())
    for key in keys:
        for wrong in ({"wrong": 1}, [["wrong"]]):
            (tmp_path / "config.json").write_text(json.dumps({**values, key: wrong}))
            with pytest.raises(ConfigError) as caught:
                load_head(tmp_path, load_model(tmp_path, EngineConfig(), torch.device("cpu")))
            assert key in str(caught.value)
            assert "\n" not in str(caught.value)


def test_without_any_one_key_it_loads_or_one_line_names_the_key(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shutil.copytree(GUARD_MODEL, tmp_path, dirs_exist_ok=True)
    values = json.loads((tmp_path / "config.json").read_text())
    needed = set()
    for key in keys_that_are_read(monkeypatch):
        others = {name: value for name, value in values.items() if name != key}
        (tmp_path / "config.json").write_text(json.dumps(others))
        try:
            load_head(tmp_path, load_model(tmp_path, EngineConfig(), torch.device("cpu")))
        except ConfigError as error:
            needed.add(key)
            # a default that the weights contradict
            assert key in str(error) or "shape" in str(error)
            assert "\n" not in str(error)
    assert {"vocab_size", "hidden_size", "n_groups", "layers_block_type", "dtype"} <= needed
    assert not needed & {
        "layer_norm_epsilon",
        "use_bias",
        "tie_word_embeddings",
        "num_hidden_layers",
    }


@pytest.mark.parametrize("model", [None, 3, b"folder", {}, object()])
def test_what_is_no_model_is_refused(model: object) -> None:
    with pytest.raises(
        ConfigError,
        match=f"a model of type {type(model).__name__} is neither a checkpoint folder nor",
    ):
        LLM(model, device="cpu")


def test_a_folder_whose_name_no_disk_takes() -> None:
    with pytest.raises(ConfigError, match="cannot be read: File name too long"):
        LLM("a" * 5000, device="cpu")


@pytest.mark.parametrize("value", [-1, 0, 1.5, True, "many", 10**30, 2**31 - 1])
@pytest.mark.parametrize(
    "key", ["vocab_size", "hidden_size", "mamba_num_heads", "chunk_size", "head_dim"]
)
def test_a_size_that_cannot_be_is_refused_without_taking_memory(
    folder: Path, key: str, value: object
) -> None:
    if (key, value) == ("chunk_size", 2**31 - 1):
        return  # a chunk may be as long as it likes
    edit_config(folder, **{key: value})
    refused(
        folder,
        (
            r"must be an integer >= 1|must be at most 2147483647|has shape|no model can "
            r"have these sizes"
        ),
    )


@pytest.mark.parametrize(
    "dtype", [torch.int8, torch.int32, torch.uint8, torch.float8_e4m3fn, torch.bool]
)
def test_weights_that_are_no_floats_are_refused(folder: Path, dtype: torch.dtype) -> None:
    edit(
        folder,
        lambda tensors: tensors.update({"lm_head.weight": tensors["lm_head.weight"].to(dtype)}),
    )
    name = str(dtype).removeprefix("torch.")
    refused(
        folder,
        (
            f"lm_head.weight is of type {name}: quantised weights can't be run; use a "
            "checkpoint in bfloat16"
        ),
    )


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
def test_weights_that_are_not_finite_are_refused(folder: Path, value: float) -> None:
    def spoil(tensors: dict[str, torch.Tensor]) -> None:
        tensors["lm_head.weight"][3, 1] = value

    edit(folder, spoil)
    refused(folder, r"lm_head\.weight holds NaN or infinity: every answer would be void")


BROKEN = (
    "[]",
    "null",
    "3",
    '"text"',
    "",
    "garbage",
    "[" * 100_000,
    '{"a":' * 100_000,
    "\ud800",
    '{"weight_map": 3}',
)


@pytest.mark.parametrize("text", BROKEN, ids=lambda text: repr(text[:10]))
@pytest.mark.parametrize(
    "name",
    ["config.json", "tokenizer.json", "tokenizer_config.json", "generation_config.json", "index"],
)
def test_a_broken_file_is_one_line(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], name: str, text: str
) -> None:
    shutil.copytree(GUARD_MODEL, tmp_path, dirs_exist_ok=True)
    name = "model.safetensors.index.json" if name == "index" else name
    (tmp_path / name).write_text(text, encoding="utf-8", errors="surrogatepass")
    if text == BROKEN[-1] and name in ("generation_config.json", "tokenizer_config.json"):
        assert LLM(
            tmp_path, device="cpu", max_model_len=32
        ).eos_token_ids  # an object without the keys that we ask for
    else:
        with pytest.raises(ConfigError) as caught:
            LLM(tmp_path, device="cpu", max_model_len=32)
        assert "\n" not in str(caught.value)
        assert re.search("again|is not supported|write it as UTF-8", str(caught.value))
    assert capfd.readouterr() == ("", "")


@pytest.mark.parametrize("kind", ["linear", "llama3", "yarn", "default"])
@pytest.mark.parametrize("odd", [0, -1, math.nan, 1e-40, math.inf, "x"])
def test_a_rope_that_would_make_every_answer_nan_is_refused(kind: str, odd: float | str) -> None:
    given = {"rope_type": kind, "factor": odd, "rope_theta": 1e-300 if kind == "default" else 1e4}
    given |= {
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 64,
    }
    sizes = {"hidden_size": 64, "num_attention_heads": 4, "max_position_embeddings": 128}
    with pytest.raises(ConfigError, match=r"^config.json: rope_.*; correct the file$"):
        read_rope(ConfigFile({**sizes, "rope_parameters": given}, "config.json"), 16)


def test_what_is_wrong_with_a_folder_is_not_said_of_its_tokenizer(tmp_path: Path) -> None:
    shutil.copytree(GUARD_MODEL, tmp_path, dirs_exist_ok=True)
    edit_config(tmp_path, pad_token_id="x")
    with pytest.raises(ConfigError, match=r"transformers cannot read config.json \("):
        LLM(tmp_path, device="cpu", max_model_len=32)
    os.mkfifo(tmp_path / "merges.txt")  # transformers would wait for its writer
    with pytest.raises(ConfigError, match=r"merges.txt is not a regular file; name one"):
        LLM(tmp_path, device="cpu", max_model_len=32)


@pytest.mark.parametrize(
    "section", ["added_tokens", "normalizer", "pre_tokenizer", "decoder", "model"]
)
def test_a_tokenizer_with_a_broken_section_is_one_line(tmp_path: Path, section: str) -> None:
    shutil.copytree(GUARD_MODEL, tmp_path, dirs_exist_ok=True)
    values = json.loads((tmp_path / "tokenizer.json").read_text())
    (tmp_path / "tokenizer.json").write_text(json.dumps({**values, section: 3}))
    with pytest.raises(
        ConfigError, match=r"cannot read the tokenizer .*; download its files again"
    ) as caught:
        LLM(tmp_path, device="cpu", max_model_len=32)
    assert "\n" not in str(caught.value)


def test_a_damaged_header_is_one_line(folder: Path) -> None:
    """Or no damage at all: a changed name of a file's metadata is still a name."""
    whole = (folder / "model.safetensors").read_bytes()
    size = struct.unpack("<Q", whole[:8])[0]
    chance, refusals = random.Random(0), 0
    for _ in range(150):
        data = bytearray(whole)
        what = chance.randrange(4)
        if what == 0:
            del data[chance.randrange(len(data)) :]
        elif what == 1:
            data[:8] = struct.pack("<Q", chance.choice([0, size - 1, 10**9, 2**63, 2**64 - 1]))
        elif what == 2:
            data[8 + chance.randrange(size)] = chance.choice(b'{}[],:"0123456789\xff')
        else:
            data = bytearray(chance.randbytes(chance.randrange(2000)))
        (folder / "model.safetensors").write_bytes(data)
        try:
            LLM(folder, tokenizer=Characters(), device="cpu", dtype="float32", max_model_len=32)
        except ConfigError as error:
            assert "\n" not in str(error)
            refusals += 1
    assert refusals > 140


@pytest.mark.parametrize(
    "name", ["../model.safetensors", "/etc/passwd", "", "..", "a\0b", "\ud800", 3, None]
)
def test_an_index_names_files_beside_it_and_no_others(folder: Path, name: object) -> None:
    index = {"weight_map": {"lm_head.weight": name}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    refused(folder, "weight_map must map tensors to names of files beside it; download it again")


def test_a_file_that_the_index_names_and_nobody_has(folder: Path) -> None:
    index = {"weight_map": {"lm_head.weight": "model-2-of-2.safetensors"}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    refused(
        folder,
        r"model-2-of-2\.safetensors does not exist, but .*'s index names it; download it again",
    )


@pytest.mark.parametrize("ids", ["end", [1, "end"], [True], -1, {"a": 1}])
def test_ends_of_a_text_that_are_no_tokens(folder: Path, ids: object) -> None:
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": ids}))
    refused(
        folder, r"generation_config\.json: eos_token_id=.* must be a token id or a list of them"
    )


def test_a_text_longer_than_the_tokenizer_knows_is_the_engines_business(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """transformers would warn, on a line of its own beside the engine's error."""
    write_checkpoint("nemotron_h", tmp_path)
    config = json.loads((tmp_path / "tokenizer_config.json").read_text())
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config | {"model_max_length": 4}))
    tokenizer = load_tokenizer(tmp_path)
    capfd.readouterr()
    assert len(tokenizer.encode("w1 w2 w3 w4 w5 w6")) == 6
    assert capfd.readouterr().err == "" and tokenizer.model_max_length > 10**9

"""A checkpoint that cannot be used is one ConfigError of one line that names the value."""

import json

import pytest
import torch
from safetensors.torch import load_file, save_file

from hybrid_kv.config import ConfigError
from hybrid_kv.engine.llm import LLM
from tests.models.tiny_nemotron import Characters, build


@pytest.fixture(scope="module")
def original(tmp_path_factory):
    folder = tmp_path_factory.mktemp("original")
    build("M*-").save_pretrained(folder)
    return (folder / "config.json").read_text(), load_file(folder / "model.safetensors")


@pytest.fixture
def folder(original, tmp_path):
    config, tensors = original
    (tmp_path / "config.json").write_text(config)
    save_file(tensors, tmp_path / "model.safetensors")
    return tmp_path


def refused(folder, match, tokenizer=None):
    with pytest.raises(ConfigError, match=match) as caught:
        LLM(folder, tokenizer=tokenizer or Characters(), device="cpu", dtype="float32", max_model_len=32)
    assert "\n" not in str(caught.value)


def edit(folder, change):
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file(tensors, folder / "model.safetensors")


def test_the_untouched_checkpoint_loads(folder):
    llm = LLM(folder, tokenizer=Characters(), device="cpu", dtype="float32", max_model_len=32)
    assert llm.generate([[1, 2]], progress=False)[0].finish_reason == "length"


def test_unknown_architecture(folder):
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "model_type": "mamba3"}))
    refused(folder, "'mamba3'")


def test_truncated_file(folder):
    path = folder / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-100])
    refused(folder, r"model\.safetensors cannot be read .*truncated")


@pytest.mark.parametrize(
    "name", ["mixer.D", "mixer.q_proj.weight", "mixer.k_proj.weight", "lm_head.weight", "mixer.conv1d.bias"]
)
def test_missing_tensor(folder, name):
    stem = name.split(".")[-2] if "q_proj" not in name else "qkv_proj"

    def drop(tensors):
        del tensors[next(key for key in tensors if key.endswith(name))]

    edit(folder, drop)
    refused(folder, "lacks .*" + {"conv1d": "conv_bias", "mixer": "mixer.D"}.get(stem, stem))


def test_wrong_shape(folder):
    def widen(tensors):
        name = next(key for key in tensors if key.endswith("dt_bias"))
        tensors[name] = torch.zeros(5)

    edit(folder, widen)
    refused(folder, r"dt_bias has shape \(5,\), config\.json says \(4,\)")


def test_surplus_tensor(folder):
    edit(folder, lambda tensors: tensors.update({"model.layers.9.mixer.D": torch.zeros(4)}))
    refused(folder, r"1 tensors that the model does not know, the first is layers\.9\.mixer\.D")


def test_no_tokenizer(folder):
    with pytest.raises(ConfigError, match="has no tokenizer"):
        LLM(folder, device="cpu", dtype="float32")


def test_no_weights(folder):
    (folder / "model.safetensors").unlink()
    refused(folder, "safetensors")


def test_no_folder(tmp_path):
    refused(tmp_path / "nowhere", "nowhere does not exist")


def test_no_config(folder):
    (folder / "config.json").unlink()
    refused(folder, r"config\.json does not exist")


def test_tied_embeddings(folder):
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "tie_word_embeddings": True}))
    refused(folder, r"ties lm_head\.weight to embeddings\.weight, but they differ")
    edit(folder, lambda tensors: tensors.pop("lm_head.weight"))
    model = LLM(folder, tokenizer=Characters(), device="cpu", dtype="float32", max_model_len=32).model
    assert torch.equal(model.lm_head.weight, model.embeddings.weight)


def test_a_tensor_in_two_files(folder):
    save_file(load_file(folder / "model.safetensors"), folder / "older.safetensors")
    refused(folder, r"older.safetensors holds backbone\..* again; leave one file per tensor")


def test_the_index_names_the_files(folder):
    tensors = load_file(folder / "model.safetensors")
    save_file({name: torch.zeros_like(tensor) for name, tensor in tensors.items()}, folder / "older.safetensors")
    index = {"weight_map": dict.fromkeys(tensors, "model.safetensors")}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    llm = LLM(folder, tokenizer=Characters(), device="cpu", dtype="float32", max_model_len=32)
    assert bool(llm.model.lm_head.weight.any())


def test_every_listed_eos_token_ends_a_text(folder):
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": [3, 5]}))
    llm = LLM(folder, tokenizer=Characters(), device="cpu", dtype="float32", max_model_len=32)
    assert {3, 5} <= llm.eos_token_ids


def test_fp8_is_planned_but_not_run(folder):
    with pytest.raises(ConfigError, match="fp8 cache, which can be planned but not run yet"):
        LLM(folder, tokenizer=Characters(), device="cpu", dtype="float32", cache_dtype="fp8", max_model_len=32)

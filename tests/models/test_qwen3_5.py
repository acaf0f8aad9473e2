"""Qwen3.5 against transformers, its draft head against a dense one, and all of it in engines of every kind.

With `rms_norm_eps` as published, 1e-6, transformers is up to 3e-5 of max|logit| off its own equations in float64: heads
of random queries and keys give small outputs, whose norm magnifies rounding. 1e-4 brings that to 7e-6.
"""

import json
import logging

import pytest
from safetensors.torch import load_file, save_file
from transformers import Qwen3_5Config, Qwen3_5ForConditionalGeneration
from transformers.models.qwen3_5 import modeling_qwen3_5

from hybrid_kv.config import ConfigError, EngineConfig
from hybrid_kv.models.config_file import ConfigFile
from hybrid_kv.models.loader import load_head, load_model
from hybrid_kv.models.random_checkpoint import fill
from hybrid_kv.models.registry import family_of
from hybrid_kv.sampling import SamplingParams
from tests.models.paged_head import CPU
from tests.models.parity import check_exactness, check_parity, checkpoint, load, prompts
from tests.models.qwen_head import check_head

CONFIGS = {
    "grouped": {},
    "tied": {
        "tie_word_embeddings": True,
        "attention_bias": True,
        "linear_num_value_heads": 2,
        "linear_conv_kernel_dim": 3,
    },
    "wide": {
        "head_dim": 24,
        "num_key_value_heads": 4,
        "linear_num_value_heads": 8,
        "linear_key_head_dim": 9,
        "rope_parameters": {"rope_type": "default", "rope_theta": 500.0, "partial_rotary_factor": 0.5},
        "chunk_size": 5,
    },
    "attention_first": {
        "layer_types": ["full_attention", "linear_attention", "linear_attention"],
        "num_hidden_layers": 3,
        "num_attention_heads": 6,
        "head_dim": 8,
        "rope_parameters": {"rope_type": "linear", "factor": 4.0, "rope_theta": 1000.0},
        "rms_norm_eps": 1e-6,
    },
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return checkpoint(tmp_path_factory, "qwen3_5_text")[1]


@pytest.mark.parametrize("keys", CONFIGS.values(), ids=CONFIGS)
def test_every_logit_equals_transformers(tmp_path_factory, keys):
    check_parity(*checkpoint(tmp_path_factory, "qwen3_5_text", keys))


def test_every_engine_gives_what_a_request_gets_alone(folder):
    check_exactness(folder)


def test_a_multimodal_checkpoint_is_run_as_its_language_model(tmp_path, caplog):
    text = family_of(ConfigFile({"model_type": "qwen3_5_text"}, "")).sizes["tiny"]
    vision = {"depth": 1, "hidden_size": 16, "intermediate_size": 20, "num_heads": 2, "out_hidden_size": 40}
    config = Qwen3_5Config(text_config=text, vision_config=vision)
    model = Qwen3_5ForConditionalGeneration(config).eval()
    fill(model, 1)
    model.save_pretrained(tmp_path)
    with caplog.at_level(logging.WARNING, "hybrid_kv"):
        check_parity(model, tmp_path)
    said = {record.getMessage() for record in caplog.records if record.name == "hybrid_kv.models.loader"}
    assert len(said) == 1
    assert "its language model is loaded, 21 tensors such as model.visual." in said.pop()


def test_a_multimodal_checkpoint_drafts_with_its_own_head(folder, tmp_path):
    """Named as on the hub, where the head lies beside the language model."""
    config = json.loads((folder / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "qwen3_5", "text_config": config}))
    tensors = load_file(folder / "model.safetensors")
    save_file(
        {k.replace("model.", "model.language_model.", 1): v for k, v in tensors.items()}, tmp_path / "x.safetensors"
    )
    drafted = []
    for source in (folder, tmp_path):
        llm = load(source, speculative_method="mtp", num_speculative_tokens=2)
        outputs = llm.generate(prompts(101), SamplingParams(max_tokens=8), progress=False)
        drafted.append([(output.token_ids, output.num_accepted_draft_tokens) for output in outputs])
    assert drafted[0] == drafted[1]


@pytest.mark.parametrize("grid", [4, 10**6])
def test_the_draft_head_equals_a_dense_one(folder, grid):
    check_head(folder, modeling_qwen3_5, "Qwen3_5", grid)


@pytest.mark.parametrize(
    ("key", "value", "words"),
    [
        ("hidden_act", "gelu", "hidden_act='gelu' can't be run, 'silu' can"),
        ("attn_output_gate", False, "attn_output_gate=False can't be run, True can"),
        ("layer_types", ["full_attention", "mlp", "moe", "mlp"], "no layers of kind mlp, moe"),
        ("linear_num_value_heads", 5, "not a multiple of 2 key heads"),
        ("linear_value_head_dim", 21, "has shape .* config.json says"),
    ],
)
def test_what_cannot_be_run_is_refused(folder, tmp_path, key, value, words):
    config = json.loads((folder / "config.json").read_text()) | {key: value}
    (tmp_path / "config.json").write_text(json.dumps(config))
    (tmp_path / "model.safetensors").symlink_to(folder / "model.safetensors")
    with pytest.raises(ConfigError, match=words) as caught:
        load_model(tmp_path, EngineConfig(dtype="float32"), CPU)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(("key", "value"), [("mtp_num_hidden_layers", 2), ("mtp_use_dedicated_embeddings", True)])
def test_a_draft_head_of_another_form_is_refused(folder, tmp_path, key, value):
    config = json.loads((folder / "config.json").read_text()) | {key: value}
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(ConfigError, match=f"{key}={value}.*draft with n-grams"):
        load_head(tmp_path, load_model(folder, EngineConfig(dtype="float32"), CPU))

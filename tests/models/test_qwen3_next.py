"""Qwen3-Next against transformers, its draft head against a dense one, and all of it in engines of every kind."""

import json

import pytest
from transformers.models.qwen3_next import modeling_qwen3_next

from hybrid_kv.config import ConfigError, EngineConfig
from hybrid_kv.models.loader import load_model
from tests.models.paged_head import CPU
from tests.models.parity import check_exactness, check_parity, checkpoint
from tests.models.qwen_head import check_head

CONFIGS = {
    "some_sparse": {},
    "all_sparse_but_one": {
        "decoder_sparse_step": 1,
        "mlp_only_layers": [1],
        "norm_topk_prob": False,
        "attention_bias": True,
    },
    "yarn": {
        "decoder_sparse_step": 1,
        "num_experts": 5,
        "num_experts_per_tok": 4,
        "linear_num_value_heads": 4,
        "linear_num_key_heads": 4,
        "linear_conv_kernel_dim": 2,
        "head_dim": 24,
        "tie_word_embeddings": True,
        "max_position_embeddings": 64,
        "rope_parameters": {
            "rope_type": "yarn",
            "factor": 4.0,
            "rope_theta": 1000.0,
            "original_max_position_embeddings": 16,
            "partial_rotary_factor": 0.5,
        },
    },
    "dense": {"num_experts": 0},
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return checkpoint(tmp_path_factory, "qwen3_next")[1]


@pytest.mark.parametrize("keys", CONFIGS.values(), ids=CONFIGS)
def test_every_logit_equals_transformers(tmp_path_factory, keys):
    check_parity(*checkpoint(tmp_path_factory, "qwen3_next", keys))


def test_every_engine_gives_what_a_request_gets_alone(folder):
    check_exactness(folder)


@pytest.mark.parametrize("step", [1, 2])
def test_the_draft_head_equals_a_dense_one(tmp_path_factory, step):
    """With experts, and without as the first layer has none."""
    folder = checkpoint(tmp_path_factory, "qwen3_next", {"decoder_sparse_step": step})[1]
    check_head(folder, modeling_qwen3_next, "Qwen3Next", grid=4)


@pytest.mark.parametrize(
    ("key", "value", "words"),
    [
        ("mlp_only_layers", 3, "mlp_only_layers=3 must list layers"),
        ("mlp_only_layers", ["1"], "must list layers by their number"),
        ("num_experts_per_tok", 7, "num_experts_per_tok=7 must be at most num_experts=6"),
        ("decoder_sparse_step", 0, "decoder_sparse_step=0 must be an integer >= 1"),
        ("num_experts", 7, r"layers\.1\.mlp\.gate\.weight has shape \(6, 40\), config.json says \(7, 40\)"),
        ("decoder_sparse_step", 1, r"lacks 12 tensors, the first is layers\.0\.mlp\.experts\.down_proj"),
    ],
)
def test_what_cannot_be_run_is_refused(folder, tmp_path, key, value, words):
    config = json.loads((folder / "config.json").read_text()) | {key: value}
    (tmp_path / "config.json").write_text(json.dumps(config))
    (tmp_path / "model.safetensors").symlink_to(folder / "model.safetensors")
    with pytest.raises(ConfigError, match=words) as caught:
        load_model(tmp_path, EngineConfig(dtype="float32"), CPU)
    assert "\n" not in str(caught.value)

"""Kimi-Linear: Kimi Delta Attention, latent attention, experts in groups."""

import json

import pytest
import torch
from safetensors.torch import load_file, save_file

from hybrid_kv.cache.spec import MLAAttentionSpec
from hybrid_kv.models.shapes import model_shape
from tests.models.parity import check_exactness, check_parity, checkpoint, load
from tests.models.refusals import check_refused

VARIANTS = {
    "experts_in_groups": {},
    "dense": {"mlp_layer_types": ["dense"] * 5, "linear_conv_kernel_dim": 2},
    "latent_queries": {"q_lora_rank": 18, "attention_bias": True, "n_shared_experts": 2, "norm_topk_prob": False},
    "one_group": {"n_group": 1, "topk_group": 1, "num_experts_per_tok": 1, "first_k_dense_replace": 0, "chunk_size": 5},
}


@pytest.mark.parametrize("variant", VARIANTS)
def test_every_logit_equals_transformers(tmp_path_factory, variant):
    check_parity(*checkpoint(tmp_path_factory, "kimi_linear", VARIANTS[variant]))


def test_every_mode_is_exact(tmp_path_factory):
    check_exactness(checkpoint(tmp_path_factory, "kimi_linear")[1])


def test_the_hubs_spelling(tmp_path_factory):
    """moonshotai/Kimi-Linear-48B-A3B-Instruct counts layers from 1, in an object for the recurrent ones."""
    model, folder = checkpoint(tmp_path_factory, "kimi_linear")
    config = json.loads((folder / "config.json").read_text())
    kinds = config.pop("layer_types")
    config["linear_attn_config"] = {
        "full_attn_layers": [i + 1 for i, kind in enumerate(kinds) if kind == "full_attention"],
        "kda_layers": [i + 1 for i, kind in enumerate(kinds) if kind == "linear_attention"],
        "head_dim": config.pop("linear_head_dim"),
        "num_heads": config.pop("linear_num_heads"),
        "short_conv_kernel_size": config.pop("linear_conv_kernel_dim"),
    }
    config["first_k_dense_replace"] = config.pop("mlp_layer_types").count("dense")
    names = {
        "num_experts": "num_local_experts",
        "num_experts_per_token": "num_experts_per_tok",
        "moe_renormalize": "norm_topk_prob",
        "num_expert_group": "n_group",
        "num_shared_experts": "n_shared_experts",
    }
    for hub, own in names.items():
        if own in config:
            config[hub] = config.pop(own)
    (folder / "config.json").write_text(json.dumps(config))
    tensors = load_file(folder / "model.safetensors")
    assert {"q_conv1d", "w1", "block_sparse_moe"} <= {part for name in tensors for part in name.split(".")}
    check_parity(model, folder)


def test_the_names_that_transformers_runs_with(tmp_path_factory):
    model, folder = checkpoint(tmp_path_factory, "kimi_linear")
    save_file(model.state_dict(), folder / "model.safetensors")
    check_parity(model, folder)


def test_a_token_takes_one_vector_in_the_latent_cache(tmp_path_factory):
    _, folder = checkpoint(tmp_path_factory, "kimi_linear")
    shape = model_shape(folder, num_speculative_tokens=2)
    layers = shape.layers
    assert shape.max_position_embeddings == 1048576
    spec = layers["layers.1"]
    assert isinstance(spec, MLAAttentionSpec)
    assert spec.page_size_bytes == (14 + 6) * 4
    assert [(part.name, part.shape) for part in layers["layers.0"].parts] == [("conv", (5, 72)), ("ssm", (3, 8, 8))]
    llm = load(folder)
    (latents,) = llm.runner.views["layers.1"]
    assert latents.shape[2] == 20
    assert latents.numel() * 4 == llm.plan.config.num_blocks * llm.plan.config.page_size_bytes


def test_the_sanitizer_finds_nothing(tmp_path_factory):
    _, folder = checkpoint(tmp_path_factory, "kimi_linear")
    llm = load(folder, sanitize=True, mamba_cache_mode="all", speculative_method="ngram", num_speculative_tokens=2)
    outputs = llm.generate([[7, 8, 9, 7, 8, 9, 7, 8], [7, 8, 9, 7, 8]], progress=False)
    assert all(output.error is None for output in outputs)


def test_half_precision_runs(tmp_path_factory):
    _, folder = checkpoint(tmp_path_factory, "kimi_linear")
    (output,) = load(folder, dtype="bfloat16").generate([[7, 8, 9]], progress=False)
    assert output.error is None and torch.tensor(output.token_ids).lt(101).all()


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"hidden_act": "relu"}, "hidden_act='relu' can't be run, 'silu' can"),
        ({"mla_use_nope": False}, "mla_use_nope=False can't be run"),
        ({"num_key_value_heads": 2}, "num_key_value_heads=2 can't be run, 4 can"),
        ({"mlp_layer_types": ["dense"]}, "must name 5 layers"),
        ({"mlp_layer_types": [["dense"]] * 5}, "must name 5 layers, each dense or sparse"),
        ({"num_experts_per_token": 9}, "num_experts_per_token=9 must be at most 8"),
        ({"topk_group": 5}, "topk_group=5 must be at most 4"),
        ({"n_group": 3}, "8 experts cannot be in 3 groups"),
        ({"linear_attn_config": 3}, "linear_attn_config=3 must be an object"),
        (
            {"layer_types": None, "linear_attn_config": {"full_attn_layers": [0]}},
            r"full_attn_layers=\[0\] must list layers from 1 to 5",
        ),
    ],
)
def test_what_cannot_be_run_is_refused(tmp_path_factory, keys, message):
    check_refused(checkpoint(tmp_path_factory, "kimi_linear")[1], keys, message)

"""LFM2 and LFM2-MoE against transformers, and in every kind of engine against themselves alone."""

import json

import pytest
from safetensors.torch import load_file, save_file

from hybrid_kv.cache.spec import MambaSpec
from hybrid_kv.config import ConfigError
from hybrid_kv.models.config_file import ConfigFile
from hybrid_kv.models.shapes import model_shape
from tests.models.parity import check_exactness, check_parity, checkpoint, load
from tests.models.refusals import check_refused

CASES = {
    "dense": ("lfm2", {}),
    "dense_untied_bias": (
        "lfm2",
        {"tie_word_embeddings": False, "conv_bias": True, "block_ffn_dim_multiplier": 1.5, "num_key_value_heads": 1},
    ),
    "dense_yarn": (
        "lfm2",
        {
            "block_auto_adjust_ff_dim": False,
            "conv_L_cache": 2,
            "rope_parameters": {
                "rope_type": "yarn",
                "rope_theta": 1e4,
                "factor": 4.0,
                "original_max_position_embeddings": 16,
            },
        },
    ),
    "experts": ("lfm2_moe", {}),
    "experts_without_bias": (
        "lfm2_moe",
        {
            "use_expert_bias": False,
            "norm_topk_prob": False,
            "routed_scaling_factor": 1.7,
            "num_dense_layers": 0,
            "num_experts_per_tok": 1,
        },
    ),
}


@pytest.fixture(scope="module", params=CASES)
def parts(request, tmp_path_factory):
    return checkpoint(tmp_path_factory, *CASES[request.param])


def test_every_logit_equals_transformers(parts):
    check_parity(*parts)


@pytest.mark.parametrize("model_type", ["lfm2", "lfm2_moe"])
def test_every_engine_computes_what_a_request_alone_gets(tmp_path_factory, model_type):
    check_exactness(checkpoint(tmp_path_factory, model_type)[1])


def test_experts_in_one_tensor_each_are_read_too(tmp_path_factory):
    """`save_pretrained` splits them as the hub does; transformers itself keeps them in one."""
    model, folder = checkpoint(tmp_path_factory, "lfm2_moe")
    assert any(".experts.0.w1." in name for name in load_file(folder / "model.safetensors"))
    fused = {name: tensor for name, tensor in model.state_dict().items() if name != "lm_head.weight"}  # tied
    save_file(fused, folder / "model.safetensors")
    check_parity(model, folder)


def test_the_hubs_older_keys(tmp_path_factory):
    """`full_attn_idxs`, `block_ff_dim` and `tie_embedding`, as in LiquidAI/LFM2-1.2B."""
    model, folder = checkpoint(tmp_path_factory, "lfm2")
    config = json.loads((folder / "config.json").read_text())
    config["full_attn_idxs"] = [i for i, kind in enumerate(config.pop("layer_types")) if kind == "full_attention"]
    config["block_ff_dim"], config["intermediate_size"] = config["intermediate_size"], 7
    config["tie_embedding"] = config.pop("tie_word_embeddings")
    (folder / "config.json").write_text(json.dumps(config))
    check_parity(model, folder)


def test_a_convolution_keeps_a_window_and_no_state(tmp_path_factory):
    _, folder = checkpoint(tmp_path_factory, "lfm2", {"dtype": "bfloat16"})
    specs = model_shape(folder, num_speculative_tokens=2).layers
    spec = specs["layers.0"]
    assert isinstance(spec, MambaSpec)
    assert [(part.name, part.shape, part.role) for part in spec.parts] == [("conv", (5, 40), "window")]
    assert [name for name, spec in specs.items() if not isinstance(spec, MambaSpec)] == ["layers.1", "layers.4"]


def test_the_sanitizer_finds_nothing(tmp_path_factory):
    _, folder = checkpoint(tmp_path_factory, "lfm2")
    llm = load(folder, sanitize=True, mamba_cache_mode="all", speculative_method="ngram", num_speculative_tokens=2)
    prompt = [7, 8, 9, 7, 8, 9, 7, 8]
    outputs = llm.generate([prompt, prompt[:5]], progress=False)
    assert all(output.error is None for output in outputs)


@pytest.mark.parametrize(
    ("keys", "words"),
    [
        ({"conv_L_cache": 1}, "conv_L_cache=1"),
        ({"layer_types": None, "full_attn_idxs": [9]}, r"full_attn_idxs=\[9\] must list layers below 5"),
        ({"layer_types": ["conv", "sliding_attention"]}, "sliding_attention"),
    ],
)
def test_a_wrong_key_is_one_line(keys, words):
    tiny = {"model_type": "lfm2", "dtype": "float32", "hidden_size": 8, "vocab_size": 11, "num_attention_heads": 2}
    file = ConfigFile({**tiny, "num_hidden_layers": 5, "layer_types": ["conv"] * 5, **keys}, "config.json")
    with pytest.raises(ConfigError, match=words):
        model_shape(file)


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"num_dense_layers": -1}, "num_dense_layers=-1 must be an integer >= 0"),
        ({"num_experts_per_tok": 7}, "num_experts_per_tok=7 must be at most 6"),
    ],
)
def test_experts_that_cannot_be_are_refused(tmp_path_factory, keys, message):
    check_refused(checkpoint(tmp_path_factory, "lfm2_moe")[1], keys, message)

"""Qwen3.5 with experts against transformers, its draft head against a dense one, and in engines of every kind."""

import json
import re

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import Qwen3_5MoeConfig, Qwen3_5MoeForConditionalGeneration
from transformers.models.qwen3_5_moe import modeling_qwen3_5_moe

from hybrid_kv.config import ConfigError, EngineConfig
from hybrid_kv.models.config_file import ConfigFile
from hybrid_kv.models.loader import load_model
from hybrid_kv.models.random_checkpoint import fill
from hybrid_kv.models.registry import family_of
from tests.models.paged_head import CPU
from tests.models.parity import check_exactness, check_parity, checkpoint
from tests.models.qwen_head import check_head

CONFIGS = {
    "grouped": {},
    "tied": {
        "tie_word_embeddings": True,
        "num_experts": 9,
        "num_experts_per_tok": 3,
        "linear_num_value_heads": 2,
        "num_attention_heads": 6,
        "norm_topk_prob": False,  # of Qwen3-Next; without effect here
    },
}


@pytest.fixture(scope="module")
def tiny(tmp_path_factory):
    return checkpoint(tmp_path_factory, "qwen3_5_moe_text")


@pytest.mark.parametrize("keys", CONFIGS.values(), ids=CONFIGS)
def test_every_logit_equals_transformers(tmp_path_factory, keys):
    check_parity(*checkpoint(tmp_path_factory, "qwen3_5_moe_text", keys))


def test_every_engine_gives_what_a_request_gets_alone(tiny):
    check_exactness(tiny[1])


@pytest.mark.parametrize("grid", [4, 10**6])
def test_the_draft_head_equals_a_dense_one(tiny, grid):
    check_head(tiny[1], modeling_qwen3_5_moe, "Qwen3_5Moe", grid)


def test_a_multimodal_checkpoint_is_run_as_its_language_model(tmp_path):
    text = family_of(ConfigFile({"model_type": "qwen3_5_moe_text"}, "")).sizes["tiny"]
    vision = {"depth": 1, "hidden_size": 16, "intermediate_size": 20, "num_heads": 2, "out_hidden_size": 40}
    model = Qwen3_5MoeForConditionalGeneration(Qwen3_5MoeConfig(text_config=text, vision_config=vision)).eval()
    fill(model, 1)
    model.save_pretrained(tmp_path)
    check_parity(model, tmp_path)


def together(tensors):
    """Experts as Qwen's own checkpoints have them: one tensor for all."""
    found, fused = {}, {}
    for name, tensor in tensors.items():
        if match := re.fullmatch(r"(.*\.experts)\.(\d+)\.(\w+)_proj\.weight", name):
            found.setdefault(match[1], {}).setdefault(match[3], {})[int(match[2])] = tensor
        else:
            fused[name] = tensor
    for stem, parts in found.items():
        each = {part: torch.stack([by[i] for i in sorted(by)]) for part, by in parts.items()}
        fused[f"{stem}.gate_up_proj"] = torch.cat([each["gate"], each["up"]], 1)
        fused[f"{stem}.down_proj"] = each["down"]
    return fused


def test_experts_in_one_tensor_are_those_one_by_one(tiny, tmp_path):
    model, folder = tiny
    tensors = load_file(folder / "model.safetensors")
    fused = together(tensors)
    assert len(tensors) - len(fused) == 5 * (3 * 6 - 2)  # four layers and the head, six experts of three parts
    save_file(fused, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text((folder / "config.json").read_text())
    check_parity(model, tmp_path)
    check_head(folder, modeling_qwen3_5_moe, "Qwen3_5Moe", 4)


def test_an_expert_that_lacks_is_named(tiny, tmp_path):
    folder = tiny[1]
    tensors = load_file(folder / "model.safetensors")
    save_file({k: v for k, v in tensors.items() if ".2.mlp.experts.3.down" not in k}, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text(json.dumps(json.loads((folder / "config.json").read_text())))
    with pytest.raises(ConfigError, match=r"lacks layers\.2\.mlp\.experts\.down_proj of expert 3"):
        load_model(tmp_path, EngineConfig(dtype="float32"), CPU)

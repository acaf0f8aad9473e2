"""Logits of every token through the engine against transformers' NemotronH with the same random weights.

Tolerance: 2e-5 of max|logit|, the difference of chunked and recurrent float32 arithmetic (see
tests/kernels/ssd/test_reference.py). Greedy tokens are compared too, where margins are wider than rounding.
"""

import json

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.models.parity import ENGINES, compare, load, preempt
from tests.models.tiny_nemotron import build

GEOMETRIES = {
    "gqa_mlp": ("M-M*-M*-", {"n_groups": 1, "num_key_value_heads": 1}),
    "groups": ("MM*M", {"n_groups": 4, "use_conv_bias": False, "head_dim": 24}),
    "mha": ("M*M-", {"num_key_value_heads": 4, "head_dim": 8, "mamba_num_heads": 6, "hidden_size": 40}),
    "odd": ("*M", {"conv_kernel": 3, "chunk_size": 5}),
}


@pytest.fixture(scope="module", params=GEOMETRIES)
def checkpoint(request, tmp_path_factory):
    pattern, overrides = GEOMETRIES[request.param]
    model = build(pattern, **overrides)
    folder = tmp_path_factory.mktemp(request.param)
    model.save_pretrained(folder)
    return model, folder


@pytest.mark.parametrize("engine", ENGINES, ids=lambda engine: str(engine["max_num_batched_tokens"]))
def test_every_logit_equals_transformers(checkpoint, engine):
    model, folder = checkpoint
    compare(model, load(folder, **engine))


@pytest.mark.parametrize("dtypes", [("float64", "float32"), ("float32", "float64")], ids="-".join)
def test_states_of_another_dtype_than_the_model(checkpoint, dtypes):
    model, folder = checkpoint
    compare(model, load(folder, dtype=dtypes[0], mamba_ssm_cache_dtype=dtypes[1], max_num_batched_tokens=17))


def test_after_preemption(checkpoint):
    model, folder = checkpoint
    assert compare(model, load(folder, max_num_batched_tokens=33), preempt)[1] > 0


def test_a_pool_too_small_for_all_preempts(checkpoint):
    model, folder = checkpoint
    least = 1 + load(folder, block_size=4).plan.config.max_blocks_per_request(48)
    engines = (load(folder, block_size=4, num_blocks=least + more) for more in range(12))
    assert sum(compare(model, engine)[1] for engine in engines) > 0


@pytest.mark.parametrize("prefix", ["backbone.", "model."])
def test_pattern_spelling_and_either_prefix(checkpoint, tmp_path, prefix):
    model, folder = checkpoint
    config = json.loads((folder / "config.json").read_text())
    letters = {"linear_attention": "M", "mamba": "M", "full_attention": "*", "attention": "*", "mlp": "-"}
    config["hybrid_override_pattern"] = "".join(letters[kind] for kind in config.pop("layers_block_type"))
    (tmp_path / "config.json").write_text(json.dumps(config))
    tensors = load_file(folder / "model.safetensors")
    assert any(name.startswith("backbone.") for name in tensors)
    renamed = {name.replace("backbone.", prefix, 1): tensor for name, tensor in tensors.items()}
    save_file({**renamed, "mtp.layers.0.norm.weight": torch.ones(3)}, tmp_path / "model.safetensors")
    compare(model, load(tmp_path))

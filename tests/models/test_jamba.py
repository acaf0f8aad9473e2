"""Jamba: Mamba-1, attention without positions, experts."""

import pytest
import torch
from safetensors.torch import load_file, save_file

from hybrid_kv.config import ConfigError
from hybrid_kv.models.shapes import model_shape
from tests.models.parity import TOLERANCE, check_exactness, check_parity, checkpoint, load
from tests.models.refusals import check_refused

VARIANTS = {
    "experts": {},
    "dense": {"num_experts": 1, "tie_word_embeddings": True, "attn_layer_offset": 2, "num_key_value_heads": 1},
    "many_experts": {"expert_layer_period": 1, "expert_layer_offset": 0, "num_experts_per_tok": 3, "mamba_expand": 3},
    "biased": {"mamba_proj_bias": True, "mamba_conv_bias": False, "mamba_d_conv": 2, "mamba_dt_rank": "auto"},
}


@pytest.mark.parametrize("variant", VARIANTS)
def test_every_logit_equals_transformers(tmp_path_factory, variant):
    check_parity(*checkpoint(tmp_path_factory, "jamba", VARIANTS[variant]))


def test_every_mode_is_exact(tmp_path_factory):
    check_exactness(checkpoint(tmp_path_factory, "jamba")[1])


def test_transformers_forgets_the_state_between_chunks(tmp_path_factory):
    """Why only a whole text and single tokens are compared; when this fails, chunks can be, too."""
    model, _ = checkpoint(tmp_path_factory, "jamba")
    ids = torch.arange(20)[None]
    with torch.inference_mode():
        whole = model(ids, use_cache=False).logits[0, 10:]
        past = model(ids[:, :10], use_cache=True).past_key_values
        behind = model(ids[:, 10:], past_key_values=past).logits[0]
    assert float((whole - behind).abs().max()) > 100 * TOLERANCE * float(whole.abs().max())


def test_experts_in_one_tensor_each_are_read_too(tmp_path_factory):
    """`save_pretrained` splits them as the hub does; transformers itself keeps them in one."""
    model, folder = checkpoint(tmp_path_factory, "jamba")
    assert any(".experts.0.gate_proj." in name for name in load_file(folder / "model.safetensors"))
    save_file(model.state_dict(), folder / "model.safetensors")
    check_parity(model, folder)


def test_a_missing_expert_is_named(tmp_path_factory):
    _, folder = checkpoint(tmp_path_factory, "jamba")
    kept = {name: t for name, t in load_file(folder / "model.safetensors").items() if ".experts.2.down" not in name}
    save_file(kept, folder / "model.safetensors")
    with pytest.raises(ConfigError, match="of expert 2"):
        load(folder)


def test_layers_come_in_periods(tmp_path_factory):
    shape = model_shape(checkpoint(tmp_path_factory, "jamba")[1])
    assert [name for name, spec in shape.layers.items() if not hasattr(spec, "parts")] == ["layers.1", "layers.4"]
    assert shape.counts == {"mamba1": 4, "attention": 2}


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"hidden_act": "relu"}, "hidden_act='relu' can't be run, 'silu' can"),
        ({"mamba_inner_layernorms": False}, "mamba_inner_layernorms=False can't be run"),
        ({"num_experts_per_tok": 6}, "num_experts_per_tok=6 must be at most 5"),
        ({"sliding_window": 8}, "sliding_window=8 can't be run"),
        ({"attn_layer_offset": 3}, "attn_layer_offset=3 must be below attn_layer_period=3"),
        ({"expert_layer_offset": -1}, "expert_layer_offset=-1 must be an integer >= 0"),
    ],
)
def test_what_cannot_be_run_is_refused(tmp_path_factory, keys, message):
    check_refused(checkpoint(tmp_path_factory, "jamba")[1], keys, message)

"""Granite-4-H: four multipliers, experts beside an MLP or none, rotated keys or none."""

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.models.parity import check_exactness, check_parity, checkpoint
from tests.models.refusals import check_refused

VARIANTS = {
    "mixture": {},
    "dense_rotated": {"num_local_experts": 0, "position_embedding_type": "rope", "attention_bias": True},
    "tied_one_group": {
        **{"tie_word_embeddings": True, "mamba_n_groups": 1, "mamba_conv_bias": False, "mamba_proj_bias": True},
        **{"num_key_value_heads": 1, "embedding_multiplier": 1.0, "logits_scaling": 16.0},
    },
    "all_experts": {"num_local_experts": 3, "num_experts_per_tok": 3, "mamba_d_conv": 2, "attention_multiplier": 1.0},
}


@pytest.mark.parametrize("variant", VARIANTS)
def test_every_logit_equals_transformers(tmp_path_factory, variant):
    check_parity(*checkpoint(tmp_path_factory, "granitemoehybrid", VARIANTS[variant]))


def test_every_mode_is_exact(tmp_path_factory):
    check_exactness(checkpoint(tmp_path_factory, "granitemoehybrid")[1])


def test_experts_by_the_names_that_transformers_has_in_memory(tmp_path_factory):
    model, folder = checkpoint(tmp_path_factory, "granitemoehybrid")
    assert "model.layers.0.block_sparse_moe.input_linear.weight" in load_file(folder / "model.safetensors")
    save_file({name: tensor.contiguous() for name, tensor in model.state_dict().items()}, folder / "model.safetensors")
    check_parity(model, folder)


def test_a_shifted_expert_is_seen(tmp_path_factory):
    """The parity test can fail: every router's rows moved by one."""
    model, folder = checkpoint(tmp_path_factory, "granitemoehybrid")
    tensors = load_file(folder / "model.safetensors")
    rolled = {name: torch.roll(t, 1, 0) if "router" in name else t for name, t in tensors.items()}
    save_file(rolled, folder / "model.safetensors")
    with pytest.raises(AssertionError):
        check_parity(model, folder)


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"hidden_act": "relu"}, "hidden_act='relu' can't be run, 'silu' can"),
        ({"num_local_experts": -1}, "num_local_experts=-1 must be an integer >= 1"),
        ({"num_experts_per_tok": 7}, "num_experts_per_tok=7, but there are 6 experts"),
        ({"logits_scaling": 0}, "logits_scaling=0 must be a number above 0"),
    ],
)
def test_what_cannot_be_run_is_refused(tmp_path_factory, keys, message):
    check_refused(checkpoint(tmp_path_factory, "granitemoehybrid")[1], keys, message)

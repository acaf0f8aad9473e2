"""Mamba-2 without attention."""

import pytest
import torch
from safetensors.torch import load_file, save_file

from hybrid_kv.models.shapes import model_shape
from tests.models.parity import check_exactness, check_parity, checkpoint
from tests.models.refusals import check_refused

VARIANTS = {
    "groups": {},
    "tied_biased": {"tie_word_embeddings": True, "use_bias": True, "use_conv_bias": False, "n_groups": 1},
    "short_window": {"conv_kernel": 2, "num_heads": 4, "head_dim": 20, "chunk_size": 5, "n_groups": 4},
}


@pytest.mark.parametrize("variant", VARIANTS)
def test_every_logit_equals_transformers(tmp_path_factory, variant):
    check_parity(*checkpoint(tmp_path_factory, "mamba2", VARIANTS[variant]))


def test_every_mode_is_exact(tmp_path_factory):
    check_exactness(checkpoint(tmp_path_factory, "mamba2")[1])


def test_an_older_name_of_the_embedding(tmp_path_factory):
    model, folder = checkpoint(tmp_path_factory, "mamba2")
    tensors = load_file(folder / "model.safetensors")
    tensors["backbone.embedding.weight"] = tensors.pop("backbone.embeddings.weight")
    save_file(tensors, folder / "model.safetensors")
    check_parity(model, folder)


def test_a_transposed_convolution_is_seen(tmp_path_factory):
    """The parity test can fail: taps in reverse order."""
    model, folder = checkpoint(tmp_path_factory, "mamba2")
    tensors = load_file(folder / "model.safetensors")
    flipped = {name: torch.flip(t, [-1]).contiguous() if "conv1d.weight" in name else t for name, t in tensors.items()}
    save_file(flipped, folder / "model.safetensors")
    with pytest.raises(AssertionError):
        check_parity(model, folder)


def test_nothing_grows_with_a_request(tmp_path_factory):
    assert model_shape(checkpoint(tmp_path_factory, "mamba2")[1]).counts == {"mamba2": 4}


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"hidden_act": "relu"}, "hidden_act='relu' can't be run, 'silu' can"),
        ({"num_heads": 4}, "num_heads=4 times head_dim=10 is not the inner size 80"),
        ({"time_step_limit": [0.0, 1]}, "can't be run"),
    ],
)
def test_what_cannot_be_run_is_refused(tmp_path_factory, keys, message):
    check_refused(checkpoint(tmp_path_factory, "mamba2")[1], keys, message)

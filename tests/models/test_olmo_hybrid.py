"""OLMo-Hybrid against transformers, and in engines of every kind."""

import pytest
from safetensors.torch import load_file, save_file

from tests.models.parity import check_exactness, check_parity, checkpoint

CONFIGS = {
    "no_rope": {},
    "rope": {
        "rope_parameters": {"rope_type": "default", "rope_theta": 500.0},
        "tie_word_embeddings": True,
        "num_key_value_heads": 4,
        "linear_conv_kernel_dim": 3,
        "linear_num_value_heads": 2,
    },
    "positive": {"linear_allow_neg_eigval": False, "attention_bias": True, "rms_norm_eps": 1e-3, "chunk_size": 5},
}


@pytest.fixture(scope="module")
def tiny(tmp_path_factory):
    return checkpoint(tmp_path_factory, "olmo_hybrid")


@pytest.mark.parametrize("keys", CONFIGS.values(), ids=CONFIGS)
def test_every_logit_equals_transformers(tmp_path_factory, keys):
    check_parity(*checkpoint(tmp_path_factory, "olmo_hybrid", keys))


def test_every_engine_gives_what_a_request_gets_alone(tiny):
    check_exactness(tiny[1])


def test_the_names_that_transformers_has_in_memory_are_read_too(tiny, tmp_path):
    """As in checkpoints that vLLM loads."""
    model, folder = tiny
    assert any("q_conv1d" in name or "_layer_norm." in name for name in load_file(folder / "model.safetensors"))
    save_file(model.state_dict(), tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text((folder / "config.json").read_text())
    check_parity(model, tmp_path)

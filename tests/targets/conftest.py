"""Two small models on disk."""

import pytest

from hybrid_kv.models.random_checkpoint import fill, quiet, write_checkpoint


@pytest.fixture(scope="module")
def hybrid(tmp_path_factory):
    folder = tmp_path_factory.mktemp("lfm2")
    plain = {"rope_type": "default", "rope_theta": 10000.0}  # mlx-lm reads no other
    return str(folder), write_checkpoint("lfm2", folder, keys={"rope_parameters": plain})


@pytest.fixture(scope="module")
def attention(tmp_path_factory):
    """A model that transformers batches continuously, and whose caches mlx-lm can trim."""
    from transformers import LlamaConfig, LlamaForCausalLM

    folder = tmp_path_factory.mktemp("llama")
    config = LlamaConfig(
        vocab_size=101, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, head_dim=8, dtype="float32",
    )  # fmt: skip
    model = LlamaForCausalLM(config).eval()
    fill(model, seed=0)
    with quiet():
        model.save_pretrained(folder)
    return str(folder), model

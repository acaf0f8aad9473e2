"""Zamba2: attention whose weights layers share, each with adapters of its own."""

import pytest
import torch
from safetensors.torch import load_file, save_file

from hybrid_kv.config import EngineConfig
from hybrid_kv.models.loader import load_model
from hybrid_kv.models.shapes import model_shape
from tests.models.paged_head import CPU
from tests.models.parity import check_exactness, check_parity, checkpoint
from tests.models.refusals import check_refused

VARIANTS = {
    "two_blocks": {},
    "one_block_plain_attention": {
        **{"num_mem_blocks": 1, "use_shared_attention_adapter": False, "num_key_value_heads": 2},
        "use_mem_rope": False,
    },
    "biased": {"add_bias_linear": True, "mamba_ngroups": 1, "mamba_d_conv": 3, "num_mem_blocks": 3},
}


@pytest.mark.parametrize("variant", VARIANTS)
def test_every_logit_equals_transformers(tmp_path_factory, variant):
    check_parity(*checkpoint(tmp_path_factory, "zamba2", VARIANTS[variant]))


def test_every_mode_is_exact(tmp_path_factory):
    check_exactness(checkpoint(tmp_path_factory, "zamba2")[1])


def test_layers_share_weights_and_no_cache(tmp_path_factory):
    folder = checkpoint(tmp_path_factory, "zamba2")[1]
    assert model_shape(folder).counts == {"mamba2": 5, "attention": 3}
    layers = load_model(folder, EngineConfig(dtype="float32"), CPU).layers
    assert layers[1].shared is layers[4].shared is not layers[3].shared
    assert layers[1].attention.o_proj.weight is layers[4].attention.o_proj.weight
    assert layers[1].attention.name != layers[4].attention.name


def test_weights_that_are_stored_with_every_layer_must_be_alike(tmp_path_factory):
    """A block's weights may lie with each layer that runs it, as transformers keeps them in memory."""
    model, folder = checkpoint(tmp_path_factory, "zamba2")
    tensors = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    assert "model.layers.4.shared_transformer.self_attn.o_proj.weight" in tensors
    save_file(tensors, folder / "model.safetensors")
    check_parity(model, folder)
    tensors["model.layers.4.shared_transformer.self_attn.o_proj.weight"] += 1
    save_file(tensors, folder / "model.safetensors")
    check_refused(folder, {}, r"ties layers\.4\.shared\.o_proj\.weight to layers\.1\.shared\.o_proj\.weight")


@pytest.mark.parametrize("part", ["linear_q_adapter_list.0.1", "gate_up_proj_adapter_list.2.0"])
def test_an_adapter_of_another_layer_is_seen(tmp_path_factory, part):
    """The parity test can fail: a block's two adapters change places."""
    model, folder = checkpoint(tmp_path_factory, "zamba2")
    tensors = load_file(folder / "model.safetensors")
    (one,) = (name for name in tensors if part in name)
    number = "2" if "list.0" in part else "0"
    other = one.replace(part, f"{part[: part.index('list')]}list.{number}{part[-2:]}")
    tensors[one], tensors[other] = tensors[other], tensors[one]
    save_file(tensors, folder / "model.safetensors")
    with pytest.raises(AssertionError):
        check_parity(model, folder)


def test_an_adapter_of_no_layer_is_refused(tmp_path_factory):
    folder = checkpoint(tmp_path_factory, "zamba2")[1]
    tensors = load_file(folder / "model.safetensors")
    name = "model.layers.1.shared_transformer.feed_forward.gate_up_proj_adapter_list.7.0.weight"
    save_file({**tensors, name: torch.zeros(6, 36)}, folder / "model.safetensors")
    check_refused(folder, {}, "does not know, the first is layers.1.shared.gate_up_proj_adapter_list.7.0.weight")


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"hidden_act": "silu"}, "hidden_act='silu' can't be run, 'gelu' can"),
        ({"use_long_context": True}, "use_long_context=True can't be run, False can"),
        ({"use_conv_bias": False}, "use_conv_bias=False can't be run, True can"),
        ({"num_key_value_heads": 2}, "num_key_value_heads=2 must be 4 where attention has adapters"),
        ({"num_mem_blocks": 0}, "num_mem_blocks=0 must be an integer >= 1"),
    ],
)
def test_what_cannot_be_run_is_refused(tmp_path_factory, keys, message):
    check_refused(checkpoint(tmp_path_factory, "zamba2")[1], keys, message)

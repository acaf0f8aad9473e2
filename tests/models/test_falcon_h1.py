"""Falcon-H1: two caches in every layer, a multiplier at every projection, three orders of gate and norm."""

import json

import pytest

from hybrid_kv.models.shapes import model_shape
from tests.models.parity import check_exactness, check_parity, checkpoint
from tests.models.refusals import check_refused

BIASES = dict.fromkeys(("attention_bias", "mlp_bias", "mamba_proj_bias", "projectors_bias"), True)
VARIANTS = {
    "norm_before_gate": {},
    "gate_before_norm": {
        **{"mamba_norm_before_gate": False, "mamba_n_groups": 4},
        **{"rope_parameters": {"rope_type": "default", "rope_theta": 1e11}},
    },
    "no_norm_biased": {"mamba_rms_norm": False, "mamba_n_groups": 1, **BIASES},
    "expanded_tied": {
        **{"mamba_d_ssm": None, "mamba_expand": 2, "tie_word_embeddings": True, "projectors_bias": True},
        **{"num_key_value_heads": 4, "mamba_conv_bias": False, "mamba_d_conv": 3, "mlp_multipliers": None},
    },
}


@pytest.mark.parametrize("variant", VARIANTS)
def test_every_logit_equals_transformers(tmp_path_factory, variant):
    check_parity(*checkpoint(tmp_path_factory, "falcon_h1", VARIANTS[variant]))


@pytest.mark.parametrize("variant", ["norm_before_gate", "no_norm_biased"])
def test_every_mode_is_exact(tmp_path_factory, variant):
    check_exactness(checkpoint(tmp_path_factory, "falcon_h1", VARIANTS[variant])[1])


def test_every_multiplier_counts(tmp_path_factory):
    """Each of them doubled is seen: none is left out, and none stands twice."""
    model, folder = checkpoint(tmp_path_factory, "falcon_h1")
    path = folder / "config.json"
    config = json.loads(path.read_text())
    names = [name for name in config if "multiplier" in name]
    assert len(names) == 9
    for name in names:
        value = config[name]
        changes = [value * 2] if isinstance(value, float) else [
            [v * (1 + (i == j)) for i, v in enumerate(value)] for j in range(len(value))
        ]  # fmt: skip
        for change in changes:
            path.write_text(json.dumps(config | {name: change}))
            with pytest.raises(AssertionError):
                check_parity(model, folder)


def test_every_layer_keeps_two_caches(tmp_path_factory):
    shape = model_shape(checkpoint(tmp_path_factory, "falcon_h1")[1])
    assert shape.counts == {"mamba2": 4, "attention": 4}
    assert list(shape.layers)[:2] == ["layers.0.attention", "layers.0.mamba"]


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"hidden_act": "gelu"}, "hidden_act='gelu' can't be run, 'silu' can"),
        ({"ssm_multipliers": [1.0, 1.0]}, r"ssm_multipliers=\[1.0, 1.0\] must be a list of 5 numbers"),
        ({"ssm_multipliers": [1.0, 1.0, 0, 1.0, 1.0]}, "ssm_multipliers=0 must be a number above 0"),
        ({"time_step_limit": [0.0, 0.1]}, r"time_step_limit=\[0.0, 0.1\] can't be run"),
        ({"mamba_d_ssm": 96}, "mamba_n_heads=8 times mamba_d_head=10 is not the inner size 96"),
    ],
)
def test_what_cannot_be_run_is_refused(tmp_path_factory, keys, message):
    check_refused(checkpoint(tmp_path_factory, "falcon_h1")[1], keys, message)

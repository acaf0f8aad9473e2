"""Bamba: Mamba-2 and attention over half of each head rotated."""

import pytest

from tests.models.parity import check_exactness, check_parity, checkpoint
from tests.models.refusals import check_refused

LLAMA3 = {
    **{"rope_type": "llama3", "rope_theta": 500.0, "factor": 8.0, "partial_rotary_factor": 0.5},
    **{"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 64},
}
VARIANTS = {
    "plain": {},
    "biased_and_tied": {
        **{"attention_bias": True, "mlp_bias": True, "mamba_proj_bias": True, "mamba_conv_bias": False},
        **{"tie_word_embeddings": True, "rope_parameters": LLAMA3},
    },
    "one_group_no_kv_groups": {
        **{"mamba_n_groups": 1, "num_key_value_heads": 4, "mamba_d_conv": 3, "attn_layer_indices": [0]},
        **{"rope_parameters": {"rope_type": "default", "rope_theta": 900.0, "partial_rotary_factor": 1.0}},
    },
}


@pytest.mark.parametrize("variant", VARIANTS)
def test_every_logit_equals_transformers(tmp_path_factory, variant):
    check_parity(*checkpoint(tmp_path_factory, "bamba", VARIANTS[variant]))


def test_every_mode_is_exact(tmp_path_factory):
    check_exactness(checkpoint(tmp_path_factory, "bamba")[1])


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"hidden_act": "gelu"}, "hidden_act='gelu' can't be run, 'silu' can"),
        ({"time_step_limit": [0.001, 0.1]}, r"time_step_limit=\[0.001, 0.1\] can't be run"),
        ({"attn_rotary_emb": 12}, "attn_rotary_emb=12, but 6 channels are rotated"),
        ({"rope_parameters": {"rope_type": "dynamic", "factor": 2.0}}, "rope_type='dynamic' is not supported"),
    ],
)
def test_what_cannot_be_run_is_refused(tmp_path_factory, keys, message):
    check_refused(checkpoint(tmp_path_factory, "bamba")[1], keys, message)

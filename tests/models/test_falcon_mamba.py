"""Falcon-Mamba: Mamba-1 without attention."""

import json

import pytest

from hybrid_kv.models.shapes import model_shape
from tests.models.parity import check_exactness, check_parity, checkpoint
from tests.models.refusals import check_refused

VARIANTS = {
    "plain": {},
    "untied_biased": {"tie_word_embeddings": False, "use_bias": True, "use_conv_bias": False, "mixer_rms_eps": 1e-2},
    "short_window": {"conv_kernel": 2, "expand": 3, "time_step_rank": "auto", "state_size": 1},
}


@pytest.mark.parametrize("variant", VARIANTS)
def test_every_logit_equals_transformers(tmp_path_factory, variant):
    check_parity(*checkpoint(tmp_path_factory, "falcon_mamba", VARIANTS[variant]))


def test_every_mode_is_exact(tmp_path_factory):
    check_exactness(checkpoint(tmp_path_factory, "falcon_mamba")[1])


def test_the_number_of_channels_counts_before_what_it_is_a_multiple_of(tmp_path_factory):
    """tiiuae/falcon-mamba-7b says `expand` 16 and 8,192 channels, twice the hidden size."""
    _, folder = checkpoint(tmp_path_factory, "falcon_mamba")
    config = json.loads((folder / "config.json").read_text()) | {"expand": 16, "intermediate_size": 80}
    spec = model_shape(config).layers["layers.0"]
    assert [(part.name, part.shape) for part in spec.parts] == [("conv", (3, 80)), ("ssm", (80, 6))]


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"hidden_act": "relu"}, "hidden_act='relu' can't be run, 'silu' can"),
        ({"time_step_rank": 0}, "time_step_rank=0 must be an integer >= 1"),
    ],
)
def test_what_cannot_be_run_is_refused(tmp_path_factory, keys, message):
    check_refused(checkpoint(tmp_path_factory, "falcon_mamba")[1], keys, message)

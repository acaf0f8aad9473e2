"""The oracle of models of every kind."""

import pytest

from hybrid_kv.models.random_checkpoint import write_checkpoint
from hybrid_kv.probes.oracle import Oracle


@pytest.mark.parametrize("family", ["lfm2", "lfm2_moe"])
def test_rounding_of_float32_is_measured_with_and_without_experts(family, tmp_path):
    write_checkpoint(family, tmp_path)
    oracle = Oracle(tmp_path)
    oracle.rounds((5, 6, 7, 8, 9))
    assert oracle.logprobs((5, 6)).shape == (2, 101)
    assert 0 < oracle.rounding < 1e-3

"""The oracle of models of every kind."""

import json

import pytest

from hybrid_kv.models.random_checkpoint import write_checkpoint
from hybrid_kv.probes import oracle as oracle_module
from hybrid_kv.probes.oracle import Oracle


@pytest.mark.parametrize("family", ["lfm2", "lfm2_moe"])
def test_rounding_of_float32_is_measured_with_and_without_experts(family, tmp_path):
    write_checkpoint(family, tmp_path)
    oracle = Oracle(tmp_path)
    oracle.rounds((5, 6, 7, 8, 9))
    assert oracle.logprobs((5, 6)).shape == (2, 101)
    assert 0 < oracle.rounding < 1e-3


def test_a_servers_dtype_is_the_one_that_the_checkpoint_names(tmp_path):
    write_checkpoint("lfm2", tmp_path)
    text, config = (5, 6, 7, 8, 9), tmp_path / "config.json"
    rounding = {}
    for dtype in ("float32", "bfloat16"):
        config.write_text(json.dumps({**json.loads(config.read_text()), "dtype": dtype}))
        for told in (dtype, "auto"):
            oracle = Oracle(tmp_path, told)
            oracle.rounds(text)
            rounding[dtype, told] = oracle.rounding
        assert rounding[dtype, dtype] == rounding[dtype, "auto"]
    assert rounding["bfloat16", "auto"] > 1e3 * rounding["float32", "auto"]


def test_a_text_is_computed_once_as_long_as_there_is_room(tmp_path, monkeypatch):
    write_checkpoint("lfm2", tmp_path)
    oracle, computed = Oracle(tmp_path), []
    whole = oracle._whole
    monkeypatch.setattr(oracle, "_whole", lambda model, text: computed.append(text) or whole(model, text))
    monkeypatch.setattr(oracle_module, "KEPT_BYTES", 2 * 2 * 101 * 8)
    for text in ((5, 6), (7, 8), (5, 6), (9, 9), (7, 8), (5, 6)):
        oracle.logprobs(text)
    assert computed == [(5, 6), (7, 8), (9, 9), (5, 6)]

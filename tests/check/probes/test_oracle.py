"""The oracle of models of every kind."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from hybrid_kv.check.probes import oracle as oracle_module
from hybrid_kv.check.probes.oracle import Oracle
from hybrid_kv.models.random_checkpoint import write_checkpoint


@pytest.mark.parametrize("family", ["lfm2", "lfm2_moe"])
def test_rounding_of_float32_is_measured_with_and_without_experts(
    family: str, tmp_path: Path
) -> None:
    write_checkpoint(family, tmp_path)
    oracle = Oracle(tmp_path)
    oracle.rounds((5, 6, 7, 8, 9))
    assert oracle.logprobs((5, 6)).shape == (2, 101)
    assert 0 < oracle.rounding < 1e-3


def test_a_servers_dtype_is_the_one_that_the_checkpoint_names(tmp_path: Path) -> None:
    write_checkpoint("lfm2", tmp_path)
    text, config = (5, 6, 7, 8, 9), tmp_path / "config.json"
    rounding = {}
    for dtype in ("float32", "bfloat16"):
        config.write_text(json.dumps({**json.loads(config.read_text()), "dtype": dtype}))
        for given in (dtype, "auto"):
            oracle = Oracle(tmp_path, given)
            oracle.rounds(text)
            rounding[dtype, given] = oracle.rounding
        assert rounding[dtype, dtype] == rounding[dtype, "auto"]
    assert rounding["bfloat16", "auto"] > 1e3 * rounding["float32", "auto"]


def test_a_text_is_computed_once_as_long_as_there_is_room(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_checkpoint("lfm2", tmp_path)
    oracle, computed = Oracle(tmp_path), []
    whole = oracle.whole_logprobs
    monkeypatch.setattr(
        oracle, "whole_logprobs", lambda model, text: computed.append(text) or whole(model, text)
    )
    monkeypatch.setattr(oracle_module, "KEPT_BYTES", 2 * 2 * 101 * 8)
    for text in ((5, 6), (7, 8), (5, 6), (9, 9), (7, 8), (5, 6)):
        oracle.logprobs(text)
    assert computed == [(5, 6), (7, 8), (9, 9), (5, 6)]


def test_a_router_that_is_about_to_choose_another_expert_is_seen(tmp_path: Path) -> None:
    write_checkpoint("lfm2_moe", tmp_path)
    oracle, text, inputs = Oracle(tmp_path), tuple(range(5, 60)), []
    apart = [*oracle.moves(text, 8)]
    assert [*oracle.moves(text, 8)] == apart
    gate = oracle.exact.get_submodule("model.layers.1.feed_forward.gate")
    handle = gate.register_forward_hook(
        lambda _, given, __: inputs.append(given[0].reshape(-1, given[0].shape[-1]))
    )
    oracle.whole_logprobs(oracle.exact, text)
    handle.remove()
    (last,) = (rows[-1] for rows in inputs)
    bias = oracle.exact.get_buffer("model.layers.1.feed_forward.expert_bias")
    found = (gate.weight.data @ last).sigmoid() + bias
    second, third = found.argsort(descending=True)[1:3]  # two are chosen
    tie = (found[second] - bias[third]).logit()
    gate.weight.data[third] += last * (tie - gate.weight.data[third] @ last) / (last @ last)
    oracle.known.clear()
    turned = [moved > 10 * max(apart) for moved in oracle.moves(text, 8)]
    assert True in turned and False in turned

"""An exact checkpoint is exact however it is computed; what is not exact is named."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from hybrid_kv.config import ConfigError
from hybrid_kv.models.exact_weights.checkpoint import has_exact_weights, write_exact_weights
from hybrid_kv.models.exact_weights.families import FAMILIES
from hybrid_kv.models.exact_weights.verify import verify
from hybrid_kv.models.random_checkpoint import write_checkpoint

LENGTH = 24  # tokens; more than a chunk of 16


@pytest.mark.parametrize("family", FAMILIES)
def test_every_operation_is_equal_to_the_bit(family: str, tmp_path: Path) -> None:
    write_exact_weights(family, tmp_path)
    results = list(verify(tmp_path, length=LENGTH))
    assert [result.dtype for result in results[::7]] == ["float64", "float32", "bfloat16"]
    assert not [str(result.difference) for result in results if result.difference is not None]


@pytest.mark.parametrize("family", FAMILIES)
def test_every_weight_is_a_bfloat16(family: str, tmp_path: Path) -> None:
    write_exact_weights(family, tmp_path)
    for name, tensor in load_file(tmp_path / "model.safetensors").items():
        assert torch.equal(tensor.bfloat16().float(), tensor), name


def test_the_first_operation_that_is_not_exact_is_named(tmp_path: Path) -> None:
    write_exact_weights("lfm2", tmp_path)
    path = tmp_path / "model.safetensors"
    tensors = load_file(path)
    tensors["model.layers.2.conv.out_proj.weight"] *= 1 / 3
    save_file(tensors, path, metadata={"format": "pt"})
    results = verify(tmp_path, length=LENGTH)
    found = next(result.difference for result in results if result.dtype == "float32")
    assert found.operation == "model.layers.2.conv.out_proj"
    assert found.before == "model.layers.2.conv.in_proj"


def test_random_weights_are_not_exact(tmp_path: Path) -> None:
    write_checkpoint("lfm2", tmp_path)
    assert not has_exact_weights(tmp_path)
    assert any(result.difference is not None for result in verify(tmp_path, length=20))


def test_the_same_seed_writes_the_same_weights(tmp_path: Path) -> None:
    found = []
    for seed, name in ((1, "a"), (1, "b"), (2, "c")):
        write_exact_weights("lfm2", tmp_path / name, seed)
        found.append((tmp_path / name / "model.safetensors").read_bytes())
    assert found[0] == found[1] != found[2]


def test_a_family_that_has_none_is_refused(tmp_path: Path) -> None:
    with pytest.raises(
        ConfigError, match="no exact checkpoint of bamba; there are granitemoehybrid, lfm2"
    ):
        write_exact_weights("bamba", tmp_path)

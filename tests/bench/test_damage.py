"""Damage is counted where tokens change, and nowhere else."""

import pytest
import torch

from bench.damage import CACHES, SCOPES, Cell, Model, count_shown, rows_of, tensors_of
from hybrid_kv.models.exact_weights.checkpoint import write_exact_weights

NUM_TRIALS = 6


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Model:
    folder = tmp_path_factory.mktemp("exact")
    write_exact_weights("lfm2", folder)
    return Model(folder)


def test_a_cache_that_is_right_never_shows(model: Model) -> None:
    kinds = {"nothing": lambda texts, index, cache: tensors_of(texts.right.layers[index], cache)}
    shown = count_shown(model, NUM_TRIALS, 0, kinds)
    assert shown == {
        Cell(cache, scope, "nothing"): 0 for cache in ("window", "kv") for scope in SCOPES
    }


def test_caches_of_noise_show_in_nearly_every_trial(model: Model) -> None:
    noise = {
        "signs": lambda texts, index, cache: [
            1.0 - 2.0 * torch.rand_like(tensor).round()
            for tensor in tensors_of(texts.right.layers[index], cache)
        ]
    }
    shown = count_shown(model, NUM_TRIALS, 0, noise)
    assert shown[Cell("window", "all layers", "signs")] >= NUM_TRIALS - 1
    assert {cell.cache for cell in shown} < {*CACHES}


def test_a_row_has_the_share_of_its_trials() -> None:
    (row,) = rows_of("lfm2", {Cell("kv", "one layer", "zeroed"): 3}, 4)
    assert (row.value, row.n, row.params["cache"]) == (0.75, 4, "kv")

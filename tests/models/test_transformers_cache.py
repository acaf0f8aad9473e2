"""The names by which releases of transformers take and give a cache."""

from __future__ import annotations

from typing import Any

import pytest
from transformers import Mamba2Config, Mamba2Model

from hybrid_kv.models.transformers_cache import cache_argument, cache_of


def since_5_24(tokens: object, cache: object = None) -> None: ...
def of_mamba(tokens: object, cache_params: object = None) -> None: ...
def of_others(tokens: object, past_key_values: object = None, use_cache: bool = True) -> None: ...


@pytest.mark.parametrize(
    ("function", "name"),
    [(since_5_24, "cache"), (of_mamba, "cache_params"), (of_others, "past_key_values")],
)
def test_a_cache_goes_by_the_name_that_a_function_has(function: Any, name: str) -> None:
    assert cache_argument(function) == name
    assert cache_of({"logits": 0, name: 7}) == 7


def test_the_installed_release_goes_on_from_its_own_cache() -> None:
    import torch

    config = Mamba2Config(
        vocab_size=8,
        hidden_size=8,
        num_heads=2,
        head_dim=8,
        state_size=4,
        n_groups=1,
        num_hidden_layers=1,
    )
    model, tokens = Mamba2Model(config).eval(), torch.arange(6)[None]
    with torch.inference_mode():
        whole = model(tokens)[0][:, -1]
        cache = cache_of(model(tokens[:, :5], use_cache=True))
        last = model(tokens[:, 5:], use_cache=True, **{cache_argument(model.forward): cache})[0]
    assert torch.allclose(last[:, -1], whole, atol=1e-5)

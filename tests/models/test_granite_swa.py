"""Granite-SWA in the engine: cached and drafted, a compute without sinks, its published shape."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from hybrid_kv.attention.paged import TorchCompute
from hybrid_kv.cache.spec import FullAttentionSpec, SlidingWindowSpec
from hybrid_kv.check.guard.exactness import beside_transformers
from hybrid_kv.config import ConfigError
from hybrid_kv.engine import runner
from hybrid_kv.engine.runner import ModelRunner
from hybrid_kv.models.shapes import model_shape
from hybrid_kv.sampling import SamplingParams
from tests.models.parity import TOLERANCE, checkpoint, load

# The defaults of its class in transformers are those of granite-swash-2b.
PUBLISHED: dict[str, Any] = {
    **{"model_type": "granite_swa", "dtype": "bfloat16", "vocab_size": 100352},
    **{"hidden_size": 2560, "intermediate_size": 8192, "num_hidden_layers": 24},
    **{"num_attention_heads": 20, "num_key_value_heads": 4, "sliding_window": 128},
}


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> tuple[torch.nn.Module, Path]:
    return checkpoint(tmp_path_factory, "granite_swa")


def test_logits_after_hits_and_drafts_equal_transformers(
    tiny: tuple[torch.nn.Module, Path],
) -> None:
    """Prompts are longer than the window; the second helping finds their blocks."""
    model, folder = tiny
    llm = load(
        folder,
        sanitize=True,
        enable_prefix_caching=True,
        block_size=4,
        max_num_batched_tokens=13,
        speculative_method="ngram",
        num_speculative_tokens=3,
    )
    shared = [7, 8, 9, 10] * 6
    prompts = [[*shared, 11, 12], shared[:23], [3, 4] * 14]
    hits = drafts = 0
    for _ in range(2):
        for output, logits, expected, far in beside_transformers(
            model, llm, prompts, SamplingParams(max_tokens=12)
        ):
            assert output.error is None and len(logits) and far <= TOLERANCE
            answers = expected[len(output.prompt_token_ids) - 1 :]
            assert answers.argmax(-1).tolist() == output.token_ids
            hits += output.cached_tokens
            drafts += output.num_draft_tokens
    assert hits >= 40 and drafts >= 20


def test_a_compute_without_sinks_is_refused_before_memory_is_taken(
    tiny: tuple[torch.nn.Module, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    class Plain(TorchCompute):
        has_sinks = False

    monkeypatch.setattr(runner, "compute_of", lambda name: Plain())
    monkeypatch.setattr(ModelRunner, "allocate_memory", lambda _: pytest.fail("allocated"))
    with pytest.raises(
        ConfigError,
        match=r"layer layers\.0 has attention sinks, which torch does not compute here; use "
        "--attention-backend TORCH",
    ):
        load(tiny[1])


def test_every_fourth_layer_sees_all_tokens() -> None:
    shape = model_shape(PUBLISHED)
    kinds = [type(spec) for spec in shape.layers.values()]
    assert kinds == [FullAttentionSpec, *[SlidingWindowSpec] * 3] * 6
    assert shape.mamba_chunk_size is None
    assert {spec.page_size_bytes for spec in shape.layers.values()} == {2 * 4 * 128 * 2}
    window = shape.layers["layers.1"]
    assert isinstance(window, SlidingWindowSpec) and window.sliding_window == 128

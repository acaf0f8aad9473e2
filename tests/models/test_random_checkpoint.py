"""Random checkpoints load here and in transformers, and their states matter."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from transformers import AutoTokenizer

from hybrid_kv.config import ConfigError
from hybrid_kv.engine.llm import LLM
from hybrid_kv.models.random_checkpoint import random_model, write_checkpoint
from hybrid_kv.models.registry import overview, sized


def test_the_tokenizer_has_a_word_for_each_token(tmp_path: Path) -> None:
    write_checkpoint("mamba2", tmp_path)
    (output,) = LLM(tmp_path, device="cpu", max_model_len=64).generate(["w7 w8 w9"], progress=False)
    assert output.prompt_token_ids == [7, 8, 9]
    tokenizer = AutoTokenizer.from_pretrained(tmp_path)
    assert tokenizer.encode(tokenizer.decode([7, 70])) == [7, 70]


@pytest.mark.parametrize("model_type", sorted(sized()))
def test_margins_are_wide_and_earlier_tokens_count(model_type: str) -> None:
    """A token 40 places back moves the logits by more than any rounding."""
    model = random_model(model_type, seed=5)
    ids = torch.arange(1, 61).remainder(97).add(2).repeat(2, 1)
    ids[1, 20] = 1
    with torch.inference_mode():
        first, second = model(ids, use_cache=False).logits[:, -20:]
    top = first.topk(2).values
    assert float((top[:, 0] - top[:, 1]).median()) > 0.02 * float(first.abs().max())
    assert float((first - second).abs().max()) > 1e-3


def test_the_same_seed_writes_the_same_weights(tmp_path: Path) -> None:
    weights = []
    for seed, name in ((1, "a"), (1, "b"), (2, "c")):
        write_checkpoint("nemotron_h", tmp_path / name, seed=seed)
        with safe_open(tmp_path / name / "model.safetensors", "pt") as opened:
            weights.append({key: opened.get_tensor(key) for key in opened.keys()})  # noqa: SIM118  (no mapping)
    assert all(torch.equal(weights[0][key], weights[1][key]) for key in weights[0])
    assert not any(torch.equal(weights[0][key], weights[2][key]) for key in weights[0])


def test_a_family_without_such_a_size_is_refused() -> None:
    with pytest.raises(
        ConfigError,
        match=r"no checkpoint of llama in size 'tiny'; there are .*nemotron_h \(tiny\|small",
    ):
        random_model("llama")


def test_the_overview_lists_every_family_once() -> None:
    found = overview()
    names = [entry["model_type"] for entry in found]
    runs = [entry["runs"] for entry in found]
    assert len(set(names)) == len(names) and runs == sorted(runs, reverse=True)
    nemotron = next(entry for entry in found if entry["model_type"] == "nemotron_h")
    assert nemotron["runs"] and nemotron["draft_head"] and nemotron["sizes"] == ["tiny", "small"]
    assert next(entry for entry in found if entry["model_type"] == "llama")["checked_against"] == ""

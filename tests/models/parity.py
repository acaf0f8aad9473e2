"""Logits of every token through the engine against transformers' model of the same random weights.

Greedy tokens are compared too, where margins are wider than rounding.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from hybrid_kv.check.guard.exactness import FLOAT32_LIMIT, beside_transformers
from hybrid_kv.check.guard.poison import poison
from hybrid_kv.check.guard.scenario import SmallKVFirst
from hybrid_kv.config import ConfigError
from hybrid_kv.engine.llm import LLM
from hybrid_kv.models.random_checkpoint import write_checkpoint
from hybrid_kv.sampling import SamplingParams
from tests.models.tiny_nemotron import Characters

TOLERANCE = FLOAT32_LIMIT
# Prompts in chunks of several sizes; the guard has each family's tiny model in engines of other
# kinds.
ENGINE = {
    "max_num_batched_tokens": 27,
    "attention_backend": SmallKVFirst.name,
    "captured_batch_sizes": (3, 4),
}
LENGTHS = (40, 1, 23, 16)


SEEDS = {"nemotron_h": 3}  # with which the best two tokens are far apart; of the others it is 1


def checkpoint(
    factory: pytest.TempPathFactory, model_type: str, keys: dict[str, Any] | None = None, **how: Any
) -> tuple[torch.nn.Module, Path]:
    """transformers' model and its folder; see `write_checkpoint`."""
    folder = factory.mktemp(model_type)
    return write_checkpoint(
        model_type, folder, "tiny", SEEDS.get(model_type, 1), keys, **how
    ), folder


def prompts(vocab_size: int) -> list[list[int]]:
    g = torch.Generator().manual_seed(5)
    return [torch.randint(0, vocab_size, (length,), generator=g).tolist() for length in LENGTHS]


def load(folder: Path, **options: Any) -> LLM:
    options = {
        "max_num_seqs": 4,
        "max_model_len": 64,
        "device": "cpu",
        "dtype": "float32",
    } | options
    llm = LLM(folder, tokenizer=Characters(), **options)
    poison(llm)
    return llm


def compare(model: torch.nn.Module, llm: LLM, disturb: Callable[[LLM], None] | None = None) -> int:
    """Assert equal logits and tokens; returns the number of preemptions."""
    texts = prompts(model.config.get_text_config().vocab_size)
    preemptions = 0
    for output, logits, expected, far in beside_transformers(
        model, llm, texts, SamplingParams(max_tokens=5), disturb
    ):
        assert output.error is None and logits.shape == expected.shape
        assert far <= TOLERANCE
        answers, scale = expected[len(output.prompt_token_ids) - 1 :], float(expected.abs().max())
        top = answers.topk(2).values
        assert float((top[:, 0] - top[:, 1]).min()) > 4 * TOLERANCE * scale, (
            "margins too small to compare tokens"
        )
        assert answers.argmax(-1).tolist() == output.token_ids
        preemptions += output.num_preemptions
    return preemptions


def preempt(llm: LLM) -> None:
    """Every fourth step."""
    if llm.num_steps % 4 == 3 and len(llm.scheduler.running) > 1:
        llm.scheduler.preempt(llm.scheduler.running[-1])


def check_parity(model: torch.nn.Module, folder: Path) -> None:
    """In chunks and with preemptions."""
    assert compare(model, load(folder, **ENGINE), preempt)


def check_refused(folder: Path, keys: dict[str, Any], message: str) -> None:
    """Expect a checkpoint with `keys` in its config to be refused in a line like `message`."""
    path = folder / "config.json"
    kept = path.read_text()
    path.write_text(json.dumps(json.loads(kept) | keys))
    try:
        with pytest.raises(ConfigError, match=message) as caught:
            load(folder)
    finally:
        path.write_text(kept)
    assert "\n" not in str(caught.value)

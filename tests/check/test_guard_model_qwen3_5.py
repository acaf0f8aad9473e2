"""The second guard model as its training sees it, with random weights, and as others do."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from hybrid_kv.check.guard.float64 import KeepFloat64, float64_pass
from hybrid_kv.config import EngineConfig
from hybrid_kv.engine.llm import LLM
from hybrid_kv.engine.record import record_logits
from hybrid_kv.models.loader import load_head, load_model
from hybrid_kv.sampling import SamplingParams
from tests.models.paged_head import CPU, Paged, pairs

VOCABULARY = 98


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Random weights in all that training would move: norms, gates, a head that is not zero."""
    from accuracy.guard_model import new_model, save_checkpoint
    from accuracy.train import save_tokenizer

    torch.manual_seed(0)
    model = new_model("qwen3_5_moe_text")
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() == 1:
                parameter.add_(torch.randn_like(parameter) * 0.2)
        model.lm_head.weight.normal_(std=0.1)
    folder = tmp_path_factory.mktemp("qwen")
    save_checkpoint(model, folder)
    save_tokenizer(folder)
    return folder


def tokens(length: int) -> list[int]:
    return torch.randint(
        0, VOCABULARY, (length,), generator=torch.Generator().manual_seed(length)
    ).tolist()


@torch.no_grad()
def test_logits_equal_the_engine(folder: Path) -> None:
    llm = LLM(
        folder,
        dtype="float64",
        mamba_ssm_cache_dtype="float64",
        max_num_batched_tokens=90,
        max_model_len=512,
    )
    plain = float64_pass(folder)
    outputs = record_logits(
        llm, [tokens(203), tokens(5)], SamplingParams(max_tokens=8, ignore_eos=True)
    )
    for output, logits in outputs:
        expected = plain(torch.tensor([output.prompt_token_ids + output.token_ids]))[0, :-1]
        assert (logits - expected).abs().max() <= 1e-12


@torch.no_grad()
def test_drafts_equal_the_engine_s_head(folder: Path) -> None:
    from accuracy.guard_model import load_checkpoint

    plain, target = (
        load_checkpoint(folder, torch.float64),
        load_model(folder, EngineConfig(dtype="float64"), CPU),
    )
    head = load_head(folder, target)
    head.grid = 10**6
    ids = torch.tensor(tokens(60))
    with KeepFloat64():
        hidden = plain.decode(ids[None])[0][0]
        expected = plain.draft_hidden(hidden[None, :-1], ids[None, 1:])[0]
    (out,) = Paged(head, 1, 16).step([(0, 0, *pairs((ids, hidden), 0, 60))])
    assert (out[1:] - expected).abs().max() <= 1e-12


@torch.no_grad()
def test_a_router_that_leaves_experts_unused_costs() -> None:
    from accuracy.guard_model import BALANCE_WEIGHT, new_model

    model = new_model("qwen3_5_moe_text")
    assert 0.9 < float(model.decode(torch.tensor([tokens(203)]))[1]) / BALANCE_WEIGHT < 1.3
    for layer in model.decoder.model.layers:
        layer.mlp.gate.weight.mul_(100)
    # One expert of four takes nearly all.
    assert float(model.decode(torch.tensor([tokens(1)]))[1]) / BALANCE_WEIGHT > 1.8

"""The engine on Triton kernels, in the interpreter, against the same engine on plain torch.

Tolerance: float32 twice, with sums in another order: 2e-5 of max|logit| (tests/models/parity.py),
as both differ from the exact result by that at most, 4e-5.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from hybrid_kv.check.guard.poison import poison
from hybrid_kv.check.guard.scenario import ScriptedProposer
from hybrid_kv.engine.llm import LLM
from hybrid_kv.engine.record import record_logits
from hybrid_kv.models.random_checkpoint import write_checkpoint
from hybrid_kv.sampling import SamplingParams
from tests.kernels.interpreter import interpreted
from tests.models.tiny_nemotron import VOCAB, Characters, write_tiny

pytest.importorskip("triton")

TOLERANCE = 4e-5
COUNT = 3
PROMPTS = [
    [(11 * i * i + 5 * start) % VOCAB for i in range(length)]
    for start, length in enumerate((3, 18))
]
MODES = ("none", "align", "all")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(write_tiny(tmp_path_factory.mktemp("tiny"), "M*")[1])


def engine(
    folder: str, kernels: str, sequences: list[list[int]] | None = None, k: int = 0, **options: Any
) -> LLM:
    proposer = None
    if k:
        proposer = ScriptedProposer("mixed", k, sequences, [len(p) for p in PROMPTS] * 2, 4, VOCAB)
    defaults = {
        "max_num_batched_tokens": 10,
        "max_num_seqs": 3,
        "captured_batch_sizes": (3,),
        "max_model_len": 24,
        "dtype": "float32",
    }
    defaults |= {"device": "cpu", "block_size": 4, "num_blocks": 64, "attention_backend": "TORCH"}
    llm = LLM(
        folder,
        Characters(),
        proposer,
        num_speculative_tokens=k,
        kernels=kernels,
        **defaults | options,
    )
    poison(llm)
    return llm


def answers(llm: LLM, rounds: int) -> list[tuple[list[int], torch.Tensor, int]]:
    """Return every request's tokens and logits; the `rounds` after the first hit the cache."""
    found = []
    for _ in range(rounds):
        for output, logits in record_logits(llm, PROMPTS, SamplingParams(max_tokens=COUNT)):
            assert output.error is None, output.error
            found.append((output.token_ids, logits, output.cached_tokens))
    return found


def check_engine(folder: str, mode: str, k: int, scheme: str) -> float:
    options = {"mamba_cache_mode": mode, "state_scheme": scheme}
    rounds, sequences = 1 if mode == "none" else 2, None
    if k:
        plain = [tokens for tokens, *_ in answers(engine(folder, "torch"), 1)]
        sequences = [
            prompt + tokens for prompt, tokens in zip(PROMPTS, plain, strict=True)
        ] * rounds
    expected = answers(engine(folder, "torch", sequences, k, **options), rounds)
    launched = engine(folder, "triton", sequences, k, **options)
    assert launched.runner.kernels == "triton"
    got = answers(launched, rounds)
    error, hits = 0.0, 0
    for (tokens, logits, cached), (wanted, reference, wanted_cached) in zip(
        got, expected, strict=True
    ):
        assert tokens == wanted and cached == wanted_cached and len(tokens) == COUNT
        assert logits.shape == reference.shape
        error = max(error, float((logits - reference).abs().max() / reference.abs().max()))
        hits += cached
    assert (hits > 0) == (mode != "none")
    return error


@pytest.mark.parametrize(
    ("mode", "k", "scheme"),
    [
        ("none", 0, "slots"),
        ("align", 3, "slots"),
        ("align", 0, "recompute"),
        ("all", 3, "recompute"),
    ],
)
def test_tokens_and_logits_are_those_of_torch(folder: str, mode: str, k: int, scheme: str) -> None:
    error = interpreted(check_engine, folder, mode, k, scheme)
    assert 0 < error <= TOLERANCE  # not the same arithmetic twice


def check_float64(folder: str, scheme: str) -> None:
    """In float64, where float32 kernels would lose digits, layers use plain torch, bit for bit."""
    options = {"dtype": "float64", "mamba_ssm_cache_dtype": "float64", "mamba_cache_mode": "align"}
    expected, got = (
        answers(engine(folder, name, state_scheme=scheme, **options), 1)
        for name in ("torch", "triton")
    )
    for (tokens, logits, _), (wanted, reference, _) in zip(got, expected, strict=True):
        assert (
            tokens == wanted and reference.dtype == torch.float64 and torch.equal(logits, reference)
        )


@pytest.mark.parametrize("scheme", ["slots", "recompute"])
def test_float64_keeps_its_digits(folder: str, scheme: str) -> None:
    interpreted(check_float64, folder, scheme)


@pytest.mark.parametrize(
    "norm_before_gate", [True, False], ids=["norm before gate", "gate before norm"]
)
def test_a_mamba2_layer_of_another_family(tmp_path: Path, norm_before_gate: bool) -> None:
    """Orders of the gated norm that NemotronH does not have."""
    keys = {"num_hidden_layers": 1, "mamba_norm_before_gate": norm_before_gate}
    write_checkpoint("falcon_h1", tmp_path, keys=keys)
    error = interpreted(check_engine, str(tmp_path), "none", 0, "slots")
    assert 0 < error <= TOLERANCE


# States so small that blocks of attention keep their 4 tokens.
DELTA_NETS = {
    "qwen3_5_text": {
        "num_hidden_layers": 2,
        "full_attention_interval": 2,
        "num_key_value_heads": 4,
        "head_dim": 32,
        "linear_num_key_heads": 1,
        "linear_num_value_heads": 2,
        "linear_key_head_dim": 6,
        "linear_value_head_dim": 10,
    },
    "kimi_linear": {
        "num_hidden_layers": 2,
        "layer_types": ["linear_attention", "full_attention"],
        "mlp_layer_types": ["dense", "dense"],
        "linear_num_heads": 2,
        "linear_head_dim": 5,
        "kv_lora_rank": 64,
    },
    # Decays that are inverted for the kernels' softplus, and inverted back there.
    "bailing_hybrid": {
        "num_hidden_layers": 2,
        "layer_types": ["linear_attention", "full_attention"],
        "mlp_layer_types": ["dense", "dense"],
        "num_attention_heads": 2,
        "num_key_value_heads": 2,
        "head_dim": 5,
        "kv_lora_rank": 64,
    },
}


# Each two of family (decays of a head, and of a key channel), mode, drafts and scheme meet in one
# of them.
@pytest.mark.parametrize(
    ("family", "mode", "k", "scheme"),
    [
        ("qwen3_5_text", "none", 0, "slots"),
        ("kimi_linear", "none", 2, "recompute"),
        ("qwen3_5_text", "align", 0, "recompute"),
        ("kimi_linear", "align", 2, "slots"),
        ("qwen3_5_text", "all", 2, "recompute"),
        ("kimi_linear", "all", 0, "slots"),
        ("bailing_hybrid", "all", 2, "slots"),
    ],
)
def test_delta_nets_answer_as_in_torch(
    tmp_path: Path, family: str, mode: str, k: int, scheme: str
) -> None:
    write_checkpoint(family, tmp_path, keys=DELTA_NETS[family])
    error = interpreted(check_engine, str(tmp_path), mode, k, scheme)
    assert 0 < error <= TOLERANCE

"""Engines for the suites that need a whole one: the exact model, and a tiny random NemotronH."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, cast

from hybrid_kv.engine.llm import LLM
from hybrid_kv.models.causal_lm import CausalLM
from hybrid_kv.models.config_file import ConfigFile
from hybrid_kv.models.exact import ExactModel, ExactOracle
from hybrid_kv.models.random_checkpoint import fill
from hybrid_kv.models.registry import family_of
from hybrid_kv.models.shapes import model_shape

BLOCK_SIZE = 16
VOCAB = 97


class Right:
    """A proposer that knows the answers; requests are distinguished by their numbers."""

    def __init__(
        self, texts: Sequence[Sequence[int]], wanted: Sequence[Sequence[int]], K: int
    ) -> None:
        self._sequences = [[*text, *answer] for text, answer in zip(texts, wanted, strict=True)]
        self._K = K

    def propose(self, requests: Sequence[Any], token_ids: Any, num_tokens: Any) -> list[list[int]]:
        """See `engine.runner.Proposer`."""
        known = zip(requests, num_tokens.tolist(), strict=True)
        return [self._sequences[int(request.request_id)][n : n + self._K] for request, n in known]


def answers(texts: Sequence[Sequence[int]], length: int) -> list[list[int]]:
    """Return the exact model's answers, by its oracle: each request alone, without a cache."""
    oracle = ExactOracle(ExactModel())
    return [oracle.generate(text, length) for text in texts]


def exact_engine(mode: str, K: int, num_reqs: int, proposer: Any, **options: Any) -> LLM:
    """Return the exact model with room for `num_reqs` requests."""
    drafts = {"num_speculative_tokens": K, "proposer": proposer} if K else {}
    return LLM(
        ExactModel(num_speculative_tokens=K),
        device="cpu",
        mamba_cache_mode=mode,
        enable_prefix_caching=mode != "none",
        block_size=BLOCK_SIZE,
        max_num_seqs=num_reqs,
        max_model_len=256,
        **drafts,
        **options,
    )


def tiny_engine(seed: int, mode: str) -> LLM:
    """Return a NemotronH of two Mamba layers, one of attention and an MLP, in float32.

    Its weights are random, with healthy margins between the best two tokens.
    """
    raw = {
        "model_type": "nemotron_h",
        "vocab_size": VOCAB,
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 4,
        "hybrid_override_pattern": "M*M-",
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "mamba_num_heads": 8,
        "mamba_head_dim": 16,
        "ssm_state_size": 16,
        "n_groups": 2,
        "conv_kernel": 4,
        "chunk_size": 16,
        "torch_dtype": "float32",
    }
    file = ConfigFile.read(raw)
    build = family_of(file).build
    assert build is not None
    model = cast(CausalLM, build(file, model_shape(raw).layers)).eval()
    for weight in model.parameters():
        weight.data.fill_(1.0)
    fill(model, seed)
    return LLM(
        model,
        device="cpu",
        mamba_cache_mode=mode,
        enable_prefix_caching=mode != "none",
        max_num_seqs=8,
        max_model_len=256,
        max_num_batched_tokens=256,
    )

"""K and V of 8 bits: stored in the cache, and computed with in the model's dtype."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from hybrid_kv.engine.llm import LLM, RequestOutput
from hybrid_kv.kernels.common.strided import gather_tokens, put_tokens, token_places
from hybrid_kv.models.random_checkpoint import write_checkpoint
from hybrid_kv.sampling import SamplingParams

PARAMS = SamplingParams(max_tokens=3, logprobs=1, ignore_eos=True)
PROMPT = [(7 * i + 3) % 50 + 1 for i in range(200)]


def logprobs(output: RequestOutput) -> list[float]:
    assert output.logprobs is not None
    return [token.logprob for token in output.logprobs]


@pytest.mark.parametrize(("family", "num_cached"), [("lfm2", 192), ("kimi_linear", 176)])
def test_logits_are_those_of_rounded_k_and_v_cached_or_not(
    family: str, num_cached: int, tmp_path: Path
) -> None:
    """Rounding is of a token alone, so that chunks and hits give the same K and V."""
    with_bytes = {"kv_cache_dtype": "fp8"}
    write_checkpoint(family, tmp_path)

    def run(**options: Any) -> list[RequestOutput]:
        wide: dict[str, Any] = {"dtype": "float64", "mamba_ssm_cache_dtype": "float64"}
        llm = LLM(tmp_path, device="cpu", max_model_len=256, max_num_seqs=4, **wide, **options)
        return [llm.generate([PROMPT], PARAMS, progress=False)[0] for _ in range(2)]

    exact, rounded = logprobs(run()[0]), logprobs(run(**with_bytes)[0])
    assert 1e-6 < np.abs(np.subtract(exact, rounded)).max() < 1
    cached = run(mamba_cache_mode="align", max_num_batched_tokens=60, **with_bytes)
    assert [output.cached_tokens for output in cached] == [0, num_cached]
    for output in cached:
        assert logprobs(output) == pytest.approx(rounded, abs=1e-9)


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.float8_e5m2], ids=str)
def test_what_is_beyond_8_bits_is_the_largest_of_them(dtype: torch.dtype) -> None:
    """A cast alone makes infinities of these in float8_e5m2 (torch 2.13)."""
    pool = torch.zeros(3, 4, 6, dtype=torch.int8).view(dtype)
    cache = pool[:, :, :2]
    values = torch.tensor([[1e6, -1e6], [0.3125, -448.0]])
    cells = torch.tensor([2, 0]), torch.tensor([1, 3])
    put_tokens(cache, cells, values)
    stored = gather_tokens(cache, token_places(cache, *cells)).float()
    largest = torch.finfo(dtype).max
    assert stored.tolist() == [[largest, -largest], [0.3125, -448]]
    assert not pool[:, :, 2:].float().any()

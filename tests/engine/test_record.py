"""Every computed token has its logits."""

from __future__ import annotations

import pytest

from hybrid_kv.engine.llm import LLM
from hybrid_kv.engine.record import record_logits
from hybrid_kv.models import exact
from hybrid_kv.sampling import SamplingParams


@pytest.mark.parametrize(("mode", "method"), [("none", None), ("none", "ngram"), ("all", "ngram")])
def test_recorded_logits_cover_every_computed_token(mode: str, method: str | None) -> None:
    llm = LLM(
        exact.ExactModel(),
        num_blocks=200,
        max_num_seqs=3,
        max_num_batched_tokens=8,
        max_model_len=64,
        device="cpu",
        block_size=8,
        mamba_cache_mode=mode,
        speculative_method=method,
        num_speculative_tokens=3 if method else 0,
    )
    prompts = [[1, 2, 3, 4, 5, 6, 7, 1, 2, 3], [8], [1, 2, 3, 4, 5, 6, 7, 1, 2, 3, 4]]
    for output, logits in record_logits(llm, prompts, SamplingParams(max_tokens=4)):
        # The last token's own logits are never computed: nothing follows it. Nor are those of
        # cached tokens.
        assert (
            len(logits)
            == len(output.prompt_token_ids) + len(output.token_ids) - 1 - output.cached_tokens
        )
        assert logits[-len(output.token_ids) :].argmax(-1).tolist() == output.token_ids
    assert output.cached_tokens == (8 if mode == "all" else 0)

"""The engine runs as many requests at once as `cache.capacity` says, in every mode."""

from __future__ import annotations

import numpy as np
import pytest

from hybrid_kv.cache.capacity import capacity
from hybrid_kv.engine.llm import LLM
from hybrid_kv.models.exact import ExactModel
from hybrid_kv.sampling import SamplingParams


@pytest.mark.parametrize("mode", ["none", "align", "all"])
def test_as_many_as_fit_run_without_preemption_and_one_more_does_not(mode: str) -> None:
    """Requests of one length that start in one step need the most in one step."""
    llm = LLM(
        ExactModel(), device="cpu", block_size=4, num_blocks=100, max_num_seqs=32, max_num_batched_tokens=512,
        max_model_len=40, mamba_cache_mode=mode,
    )  # fmt: skip
    lengths = np.array([10]), np.array([11])
    count = capacity(llm.plan.counted, *lengths, 40, 0).num_fit
    assert 2 < count < 32

    def preemptions(count: int) -> int:
        llm.reset_prefix_cache()
        prompts = [[i, *range(9)] for i in range(count)]
        outputs = llm.generate(prompts, SamplingParams(max_tokens=11, ignore_eos=True), progress=False)
        return sum(output.num_preemptions for output in outputs)

    assert preemptions(count) == 0
    assert preemptions(count + 1) > 0

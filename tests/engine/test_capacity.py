"""The engine runs as many requests at once as `cache.capacity` says, in every mode."""

from __future__ import annotations

import numpy as np
import pytest

from hybrid_kv.cache.capacity import capacity
from hybrid_kv.check.guard.scenario import ScriptedProposer
from hybrid_kv.engine.llm import LLM
from hybrid_kv.models.exact import ExactConfig, ExactModel, ExactOracle
from hybrid_kv.sampling import SamplingParams


@pytest.mark.parametrize("mode", ["none", "align", "all"])
def test_as_many_as_fit_run_without_preemption_and_one_more_does_not(mode: str) -> None:
    """Requests of one length that start in one step need the most in one step."""
    llm = LLM(
        ExactModel(),
        device="cpu",
        block_size=4,
        num_blocks=100,
        max_num_seqs=32,
        max_num_batched_tokens=512,
        max_model_len=40,
        mamba_cache_mode=mode,
    )
    lengths = np.array([10]), np.array([11])
    count = capacity(llm.plan.counted, *lengths, 40, 0).num_fit
    assert 2 < count < 32

    def preemptions(count: int) -> int:
        llm.reset_prefix_cache()
        prompts = [[i, *range(9)] for i in range(count)]
        outputs = llm.generate(
            prompts, SamplingParams(max_tokens=11, ignore_eos=True), progress=False
        )
        return sum(output.num_preemptions for output in outputs)

    assert preemptions(count) == 0
    assert preemptions(count + 1) > 0


@pytest.mark.parametrize(
    ("mode", "num_drafts", "states"),
    [
        ("none", 0, 1),
        ("none", 3, 4),
        ("align", 0, 2),
        ("align", 3, 5),
        ("all", 0, 8),
        ("all", 3, 11),
    ],
)
def test_the_default_pool_has_the_blocks_that_requests_of_full_length_hold_and_no_more(
    mode: str, num_drafts: int, states: int
) -> None:
    """64 tokens in blocks of 8: eight of K and V, and a mode's states plus one for each draft."""
    model, prompts = ExactModel(ExactConfig("M*")), [[i, *range(20)] for i in range(3)]
    params = SamplingParams(max_tokens=43, ignore_eos=True)
    oracle = [ExactOracle(model).generate(prompt, 43) for prompt in prompts]
    sequences = [[*prompt, *answer] for prompt, answer in zip(prompts, oracle, strict=True)]
    proposer = (
        ScriptedProposer("wrong", num_drafts, sequences, [21] * 3, 8, model.vocab_size)
        if num_drafts
        else None
    )
    llm = LLM(
        model,
        device="cpu",
        block_size=8,
        max_num_seqs=3,
        max_model_len=64,
        mamba_cache_mode=mode,
        num_speculative_tokens=num_drafts,
        proposer=proposer,
    )
    assert llm.plan.config.num_blocks == 1 + 3 * (8 + states)
    outputs = llm.generate(prompts, params, progress=False)
    assert [output.token_ids for output in outputs] == oracle
    assert sum(output.num_preemptions for output in outputs) == 0

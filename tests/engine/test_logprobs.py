"""Log-probabilities that a request wants are those of the logits that its tokens come from."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from hybrid_kv import LLM, SamplingParams
from hybrid_kv.check.guard_model import FOLDER
from hybrid_kv.engine.record import record_logits
from hybrid_kv.sampling import TokenLogprobs, token_logprobs

FLOAT64 = {"dtype": "float64", "mamba_ssm_cache_dtype": "float64", "device": "cpu"}
PROMPTS = [
    [3 + (7 * i + 11 * j) % 80 for j in range(length)]
    for i, length in enumerate((30, 101, 57, 150))
]


def same(found: TokenLogprobs, logits: torch.Tensor, token: int, num_top: int) -> bool:
    """Whether it is what these logits [vocab_size] say of the token."""
    expected = logits.log_softmax(-1)
    best = expected.topk(num_top)
    values = torch.tensor([found.logprob, *(value for _, value in found.top)], dtype=torch.float64)
    close = (values - torch.stack([expected[token], *best.values])).abs().max() < 1e-9
    return bool(close) and [other for other, _ in found.top] == best.indices.tolist()


@pytest.fixture(scope="module")
def expected() -> list[tuple[list[int], torch.Tensor]]:
    """Tokens and logits of each prompt alone."""
    llm = LLM(str(FOLDER), max_model_len=256, max_num_seqs=1, **FLOAT64)
    return [
        (out.token_ids, rows)
        for out, rows in record_logits(llm, PROMPTS, SamplingParams(12, ignore_eos=True))
    ]


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"mamba_cache_mode": "all", "max_num_batched_tokens": 40},
        {"mamba_cache_mode": "align", "speculative_method": "mtp", "num_speculative_tokens": 3},
        {
            "mamba_cache_mode": "all",
            "speculative_method": "ngram",
            "num_speculative_tokens": 2,
            "state_scheme": "recompute",
        },
        {"async_scheduling": True, "speculative_method": "mtp", "num_speculative_tokens": 2},
        {"num_blocks": 12, "async_scheduling": True, "max_num_batched_tokens": 40},
    ],
    ids=lambda options: " ".join(f"{name}={value}" for name, value in options.items()) or "plain",
)
def test_they_are_those_of_the_logits(
    options: dict[str, Any], expected: list[tuple[list[int], torch.Tensor]]
) -> None:
    llm = LLM(str(FOLDER), max_model_len=256, **{"max_num_seqs": 4} | FLOAT64 | options)
    steps = 0

    def preempt(llm: LLM) -> None:
        nonlocal steps
        steps += 1
        if steps in (2, 9):
            llm.reset_prefix_cache(reset_running_requests=True)

    params = SamplingParams(12, ignore_eos=True, logprobs=3, prompt_logprobs=2)
    outputs = llm.generate(PROMPTS, params, progress=False, on_step=preempt)
    assert any(output.num_preemptions for output in outputs)
    for prompt, output, (token_ids, logits) in zip(PROMPTS, outputs, expected, strict=True):
        assert output.token_ids == token_ids
        assert output.logprobs is not None and output.prompt_logprobs is not None
        found = [*output.prompt_logprobs, *output.logprobs]
        assert (len(output.logprobs), len(output.prompt_logprobs)) == (12, len(prompt) - 1)
        num_top = [2] * len(output.prompt_logprobs) + [3] * 12
        rows = zip(found, logits, [*prompt[1:], *token_ids], num_top, strict=True)
        assert all(same(*row) for row in rows)


def test_a_prompt_whose_tokens_are_scored_is_not_taken_from_the_cache() -> None:
    llm = LLM(str(FOLDER), max_model_len=256, mamba_cache_mode="all", device="cpu")
    prompt = [PROMPTS[3]]
    (first,) = llm.generate(prompt, SamplingParams(1, prompt_logprobs=0), progress=False)
    (again,) = llm.generate(prompt, SamplingParams(1, prompt_logprobs=0), progress=False)
    (plain,) = llm.generate(prompt, SamplingParams(1, logprobs=0), progress=False)
    assert [one.cached_tokens for one in (first, again, plain)] == [0, 0, 96]
    assert (
        first.prompt_logprobs == again.prompt_logprobs and len(first.prompt_logprobs or []) == 149
    )
    assert plain.prompt_logprobs is None and [one.top for one in plain.logprobs or []] == [()]


def test_tokens_behind_the_end_of_an_answer_have_none() -> None:
    """Drafts that were right, behind a stop token."""
    options: dict[str, Any] = {"speculative_method": "ngram", "num_speculative_tokens": 3}
    llm = LLM(str(FOLDER), max_model_len=256, device="cpu", **options)
    prompt = (
        "Question: Ann has 3 pens. Ann buys 4 more. How many pens does Ann have now?\n"
        "Answer: 3+4=7\n#### 7\n\n"
    ) * 2
    (whole,) = llm.generate([prompt], SamplingParams(12, ignore_eos=True), progress=False)
    assert whole.num_accepted_draft_tokens
    for stop in set(whole.token_ids):
        (output,) = llm.generate(
            [prompt],
            SamplingParams(12, stop_token_ids=(stop,), ignore_eos=True, logprobs=0),
            progress=False,
        )
        assert output.token_ids == whole.token_ids[: whole.token_ids.index(stop) + 1]
        assert output.logprobs is not None and len(output.logprobs) == len(output.token_ids)


def test_narrow_logits_are_widened_and_a_small_vocabulary_has_few_best() -> None:
    logits = torch.tensor([[0.0, 2.0, 1.0]], dtype=torch.bfloat16)
    (found,) = token_logprobs(logits, [2], 20)
    assert [token for token, _ in found.top] == [1, 2, 0]
    assert found.logprob == found.top[1][1] == float(logits.float().log_softmax(-1)[0, 2])

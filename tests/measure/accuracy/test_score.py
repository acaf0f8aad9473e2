"""Scores of given tokens against the plain forward pass, by every path of a prompt."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from accuracy.tokenizer import encode
from hybrid_kv.check.guard.float64 import float64_pass
from hybrid_kv.check.guard_model import FOLDER, problems
from hybrid_kv.config import HybridKVError
from hybrid_kv.engine.llm import LLM
from hybrid_kv.measure.accuracy import score as scoring
from hybrid_kv.measure.accuracy.score import Score, score
from tests.cli.run import raising

ITEMS = problems.eval_set(11, 3, shots=2)
WRONG = encode(" 1+1=3\n#### 3")
# The reference's answer, a wrong one, one that ends sooner, and a single token: each after the same
# context.
PAIRS = [
    (encode(item.prompt), continuation)
    for item in ITEMS
    for continuation in (encode(f" {item.answer}"), WRONG, WRONG[:5], WRONG[:1])
]
# A hit in mode `align` is a multiple of 80 tokens here, in `all` of 96: the continuation of this
# one reaches over both.
PAIRS.append((PAIRS[0][0][:70], PAIRS[0][0][70:130]))


@pytest.fixture(scope="module")
def expected() -> list[Score]:
    plain = float64_pass(FOLDER)
    scores = []
    for context, continuation in PAIRS:
        logits = plain(torch.tensor([context + continuation[:-1]]))[0, len(context) - 1 :]
        wanted = torch.tensor(continuation)
        log_probs = logits.log_softmax(-1)[torch.arange(len(wanted)), wanted]
        scores.append(Score(float(log_probs.sum()), bool((logits.argmax(-1) == wanted).all())))
    assert {one.is_greedy for one in scores} == {True, False}
    return scores


def engine(**options: Any) -> LLM:
    dtypes = {"dtype": "float64", "mamba_ssm_cache_dtype": "float64"}
    return LLM(
        FOLDER, device="cpu", **{"max_model_len": 512, "max_num_seqs": 4, **dtypes, **options}
    )


def assert_equal(found: list[Score], expected: list[Score]) -> None:
    assert [one.is_greedy for one in found] == [one.is_greedy for one in expected]
    for one, other in zip(found, expected, strict=True):
        assert one.log_prob == pytest.approx(other.log_prob, abs=1e-9)


@pytest.mark.parametrize(
    "options",
    [
        pytest.param({}, id="whole prompts"),
        pytest.param({"max_num_batched_tokens": 37}, id="cut into chunks"),
        pytest.param({"num_blocks": 14, "block_size": 32}, id="few blocks"),
        pytest.param({"async_scheduling": True}, id="async"),
        pytest.param(
            {"speculative_method": "mtp", "num_speculative_tokens": 2}, id="with a draft head"
        ),
    ],
)
def test_scores_are_those_of_the_plain_forward_pass(
    options: dict[str, Any], expected: list[Score]
) -> None:
    llm = engine(**options)
    assert_equal(score(llm, PAIRS), expected)


@pytest.mark.parametrize("mode", ["align", "all"])
def test_a_hit_serves_the_context_and_never_the_continuation(
    mode: str, expected: list[Score], monkeypatch: pytest.MonkeyPatch
) -> None:
    llm = engine(mamba_cache_mode=mode)
    runs: list[list[int]] = []
    plain = llm.generate

    def counted(*args: Any, **kwargs: Any) -> Any:
        outputs = plain(*args, **kwargs)
        runs.append([output.cached_tokens for output in outputs])
        return outputs

    monkeypatch.setattr(llm, "generate", counted)
    assert_equal(score(llm, PAIRS), expected)
    runs.clear()
    assert_equal(score(llm, PAIRS), expected)
    first, again = runs
    assert len(first) == len(PAIRS) and all(first)
    # Those whose hit reached into the continuation were sent once more, and found nothing.
    assert 0 < len(again) < len(first) and not any(again)


def test_equal_prompts_run_once() -> None:
    llm = engine()
    context = encode(ITEMS[0].prompt)
    one, two, longer = score(
        llm, [(context, [7]), (context, [8]), (context[:-2], [*context[-2:], 7])]
    )
    # number 0 was the only one before it
    assert llm.make_request([1], scoring.SamplingParams()).request_id == "1"
    assert one != two and longer.log_prob < one.log_prob


def test_nothing_is_asked_for_no_pairs() -> None:
    assert score(engine(), []) == []


def test_a_prompt_that_the_engine_refuses_has_no_score() -> None:
    with pytest.raises(
        HybridKVError, match=r"1 of 2 prompts cannot be scored; the first: .*max_model_len is 64"
    ):
        score(engine(max_model_len=64), [([5] * 80, [6]), ([5] * 8, [6])])


def test_nothing_watches_the_engine_after_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    llm = engine()
    monkeypatch.setattr(scoring, "_note", raising(RuntimeError("injected")))
    with pytest.raises(RuntimeError, match="injected"):
        score(llm, PAIRS[:1])
    assert not llm.observers and not llm.scheduler.has_requests
    # A hook that is left would raise.
    llm.generate([PAIRS[0][0]], scoring.SamplingParams(max_tokens=1), progress=False)

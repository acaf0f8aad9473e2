from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch

from hybrid_kv import LLM, SamplingParams
from hybrid_kv.check.targets.ours import ROOM, Ours
from hybrid_kv.check.targets.target import CAPABILITIES, COUNTERS, Ask, TargetError
from hybrid_kv.engine.record import record_logits

PROMPT = tuple((i * 7) % 90 + 1 for i in range(120))


def alone(folder: str, prompt: Sequence[int], **params: Any) -> list[int]:
    llm = LLM(folder, device="cpu", dtype="float32", max_model_len=512)
    return llm.generate([list(prompt)], SamplingParams(ignore_eos=True, **params), progress=False)[
        0
    ].token_ids


def test_answers_are_those_of_generate(folder: str) -> None:
    target = Ours(folder, {"prefix": "align", "spec": "ngram3", "chunk": "17", "async": "on"})
    requests = [
        Ask(PROMPT),
        Ask(PROMPT[:9], max_tokens=3),
        Ask(PROMPT[:50], temperature=1.0, seed=5),
    ]
    answers = target.ask(requests)
    assert list(answers[0].token_ids) == alone(folder, PROMPT, max_tokens=12)
    assert list(answers[1].token_ids) == alone(folder, PROMPT[:9], max_tokens=3)
    assert list(answers[2].token_ids) == alone(
        folder, PROMPT[:50], max_tokens=12, temperature=1.0, seed=5
    )
    assert set(target.counters()) == set(COUNTERS) and target.can == set(CAPABILITIES) - {"steps"}


def test_a_second_time_comes_from_the_cache_until_it_is_reset(folder: str) -> None:
    target = Ours(folder, {"prefix": "align"})
    found = [target.ask([Ask(PROMPT, max_tokens=2)])[0].cached_tokens for _ in range(2)]
    target.reset()
    found += [target.ask([Ask(PROMPT, max_tokens=2)])[0].cached_tokens]
    assert found[0] == found[2] == 0 < found[1] == target.counters()["hits"]


def test_preempted_requests_get_the_same_answers(folder: str) -> None:
    target = Ours(folder, {})
    requests = [Ask(PROMPT), Ask(PROMPT[:20])]
    assert target.ask(requests, preempt_every=4) == target.ask(requests)
    assert target.counters()["preemptions"] >= 4


def test_a_tight_pool_preempts(folder: str) -> None:
    target = Ours(folder, {"blocks": "tight"})
    target.ask([Ask(PROMPT * 2, max_tokens=40) for _ in range(6)])
    assert target.counters()["preemptions"] > 0


def test_an_engine_that_gets_no_further_is_said_to_hang(
    folder: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    target = Ours(folder, {})
    monkeypatch.setattr(target.llm, "step", lambda: None)
    with pytest.raises(TargetError, match="no request is a token further after 64 steps"):
        target.ask([Ask(PROMPT)])


def test_what_a_tight_pool_drops_comes_back_from_host_memory(folder: str) -> None:
    target = Ours(folder, {"prefix": "align", "blocks": "tight", "offload": "host"})
    target.ask([Ask(PROMPT, max_tokens=2)])
    target.reset()
    (again,) = target.ask([Ask(PROMPT, max_tokens=2)])
    assert again.cached_tokens > 0 and target.longest == ROOM


def test_a_text_that_ends_the_answer_does_so(folder: str) -> None:
    target = Ours(folder, {})
    (whole,) = target.ask([Ask(PROMPT, max_tokens=6)])
    text = target.llm.tokenizer.decode(whole.token_ids[1:2])
    (cut,) = target.ask([Ask(PROMPT, max_tokens=6, stop=(text,))])
    assert 0 < len(cut.token_ids) <= 2 and cut.token_ids == whole.token_ids[: len(cut.token_ids)]


def test_an_aborted_request_keeps_the_tokens_it_has(folder: str) -> None:
    target = Ours(folder, {})
    whole, cut = target.ask([Ask(PROMPT), Ask(PROMPT, abort_after=3)])
    assert cut.token_ids == whole.token_ids[:3]


def test_a_request_can_wait_for_others(folder: str) -> None:
    target = Ours(folder, {"prefix": "align"})
    first, second = target.ask([Ask(PROMPT, max_tokens=2), Ask(PROMPT, max_tokens=2, after=1)])
    assert (first.cached_tokens, first.token_ids) == (
        0,
        second.token_ids,
    ) and second.cached_tokens > 0


def test_logprobs_are_those_of_the_whole_text(folder: str) -> None:
    target = Ours(folder, {"spec": "ngram3"})
    (answer,) = target.ask([Ask(PROMPT, logprobs=True)])
    plain, text = LLM(folder, device="cpu", dtype="float32"), [*PROMPT, *answer.token_ids]
    ((_, logits),) = record_logits(plain, [text], SamplingParams(max_tokens=1))
    due = logits.log_softmax(-1)[len(PROMPT) - 1 : -1].gather(
        1, torch.tensor(answer.token_ids)[:, None]
    )[:, 0]
    own = [row[token] for row, token in zip(answer.logprobs, answer.token_ids, strict=True)]
    assert torch.allclose(torch.tensor(own), due, atol=1e-4)
    assert all(
        row[token] == max(row.values())
        for row, token in zip(answer.logprobs, answer.token_ids, strict=True)
    )


def test_a_prompt_that_does_not_fit_is_an_error_of_its_own(folder: str) -> None:
    target = Ours(folder, {})
    long, short = target.ask([Ask((1,) * 3000), Ask((1,))])
    assert "3000" in long.error and len(short.token_ids) == 12

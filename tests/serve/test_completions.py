"""`/v1/completions` through the official client: what the engine alone would say, whole and in events."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import pytest

from hybrid_kv import LLM, SamplingParams
from tests.serve.conftest import QUESTION, Served

MODEL = "guard_model"


def test_a_question_gets_the_answer_of_the_engine_alone(server: Served, alone: LLM) -> None:
    (expected,) = alone.generate([QUESTION], SamplingParams(60, stop=("Question:",)), progress=False)
    found = server.client.completions.create(
        model=MODEL, prompt=QUESTION, max_tokens=60, temperature=0, stop="Question:",
        extra_body={"return_token_ids": True},
    )  # fmt: skip
    (choice,) = found.choices
    assert "#### 7" in choice.text == expected.text
    assert (choice.finish_reason, choice.token_ids) == (expected.finish_reason, expected.token_ids)  # type: ignore[attr-defined]
    assert choice.prompt_token_ids == expected.prompt_token_ids  # type: ignore[attr-defined]
    assert found.usage is not None
    assert found.usage.prompt_tokens == len(expected.prompt_token_ids)
    assert found.usage.completion_tokens == len(expected.token_ids)


@pytest.mark.parametrize("stop", [None, "Question:", ["#", "\n"]])
def test_the_events_of_a_stream_add_up_to_the_whole_answer(server: Served, stop: str | list[str] | None) -> None:
    asked = {"model": MODEL, "prompt": [QUESTION, QUESTION[:40]], "max_tokens": 40, "temperature": 0, "stop": stop}
    extra = {"return_token_ids": True}
    whole = server.client.completions.create(**asked, extra_body=extra)
    events = list(
        server.client.completions.create(**asked, stream=True, stream_options={"include_usage": True}, extra_body=extra)
    )
    assert len(events) > 10
    for index, choice in enumerate(whole.choices):
        own = [event.choices[0] for event in events if event.choices and event.choices[0].index == index]
        assert "".join(one.text for one in own) == choice.text
        assert [token for one in own for token in one.token_ids] == choice.token_ids
        assert [one.finish_reason for one in own] == [None] * (len(own) - 1) + [choice.finish_reason]
        assert [one.prompt_token_ids for one in own if hasattr(one, "prompt_token_ids")] == [choice.prompt_token_ids]
    assert events[-1].choices == [] and events[-1].usage.completion_tokens == whole.usage.completion_tokens


def test_requests_at_once_get_what_each_gets_alone(server: Served, alone: LLM) -> None:
    """16 at once where 4 run, with prefixes in common, some sampled with a seed."""
    prompts = [alone.make_request(QUESTION * 5, SamplingParams()).prompt_token_ids[: 60 + 17 * i] for i in range(4)] * 4
    params = [SamplingParams(24, temperature=1.0 if i >= 8 else 0.0, seed=i) for i in range(16)]
    expected = alone.generate(prompts, params, progress=False)

    def ask(i: int) -> list[int]:
        found = server.client.completions.create(
            model=MODEL, prompt=prompts[i], max_tokens=24, temperature=params[i].temperature, seed=i,
            extra_body={"return_token_ids": True},
        )  # fmt: skip
        return found.choices[0].token_ids  # type: ignore[attr-defined]

    with ThreadPoolExecutor(16) as pool:
        assert list(pool.map(ask, range(16))) == [output.token_ids for output in expected]


def test_choices_of_a_prompt_draw_with_seeds_of_their_own(server: Served, alone: LLM) -> None:
    params = [SamplingParams(12, temperature=4.0, top_p=0.9, seed=7 + i) for i in range(3)]
    expected = alone.generate([QUESTION] * 3, params, progress=False)
    found = server.client.completions.create(
        model=MODEL, prompt=QUESTION, max_tokens=12, temperature=4, top_p=0.9, seed=7, n=3
    )
    assert [choice.text for choice in found.choices] == [output.text for output in expected]
    assert len({choice.text for choice in found.choices}) > 1
    assert found.usage is not None and found.usage.prompt_tokens == len(expected[0].prompt_token_ids)


def test_usage_says_what_came_from_the_cache_and_a_salt_keeps_it_apart(server: Served) -> None:
    prompt = [5 + i % 70 for i in range(150)]

    def cached(salt: str) -> int:
        found = server.client.completions.create(
            model=MODEL, prompt=prompt, max_tokens=1, temperature=0, extra_body={"cache_salt": salt}
        )
        return found.usage.prompt_tokens_details.cached_tokens  # type: ignore[union-attr, return-value]

    assert [cached("a"), cached("a"), cached("b"), cached("b")] == [0, 96, 0, 96]
    assert server.http.post("/reset_prefix_cache").status_code == 200
    assert cached("a") == 0

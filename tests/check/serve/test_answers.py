"""Answers through the official client: what the engine alone would say, whole and in events."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import pytest

from hybrid_kv import LLM, SamplingParams
from tests.check.serve.conftest import QUESTION, Served

MODEL = "guard_model"


def test_a_question_gets_the_answer_of_the_engine_alone(server: Served, alone: LLM) -> None:
    (expected,) = alone.generate(
        [QUESTION], SamplingParams(60, stop=("Question:",)), progress=False
    )
    found = server.client.completions.create(
        model=MODEL,
        prompt=QUESTION,
        max_tokens=60,
        temperature=0,
        stop="Question:",
        extra_body={"return_token_ids": True},
    )
    (choice,) = found.choices
    assert "#### 7" in choice.text == expected.text
    assert (choice.finish_reason, choice.token_ids) == (expected.finish_reason, expected.token_ids)  # type: ignore[attr-defined]
    assert choice.prompt_token_ids == expected.prompt_token_ids  # type: ignore[attr-defined]
    assert found.usage is not None
    assert found.usage.prompt_tokens == len(expected.prompt_token_ids)
    assert found.usage.completion_tokens == len(expected.token_ids)


@pytest.mark.parametrize("stop", [None, "Question:", ["#", "\n"]])
def test_the_events_of_a_stream_add_up_to_the_whole_answer(
    server: Served, stop: str | list[str] | None
) -> None:
    sent = {
        "model": MODEL,
        "prompt": [QUESTION, QUESTION[:40]],
        "max_tokens": 40,
        "temperature": 0,
        "stop": stop,
    }
    extra = {"return_token_ids": True}
    whole = server.client.completions.create(**sent, extra_body=extra)
    events = list(
        server.client.completions.create(
            **sent, stream=True, stream_options={"include_usage": True}, extra_body=extra
        )
    )
    assert len(events) > 10
    for index, choice in enumerate(whole.choices):
        own = [
            event.choices[0]
            for event in events
            if event.choices and event.choices[0].index == index
        ]
        assert "".join(one.text for one in own) == choice.text
        assert [token for one in own for token in one.token_ids] == choice.token_ids
        assert [one.finish_reason for one in own] == [None] * (len(own) - 1) + [
            choice.finish_reason
        ]
        assert [one.prompt_token_ids for one in own if hasattr(one, "prompt_token_ids")] == [
            choice.prompt_token_ids
        ]
    assert (
        events[-1].choices == []
        and events[-1].usage.completion_tokens == whole.usage.completion_tokens
    )


def test_requests_at_once_get_what_each_gets_alone(server: Served, alone: LLM) -> None:
    """16 at once where 4 run, with prefixes in common, some sampled with a seed."""
    prompts = [
        alone.make_request(QUESTION * 5, SamplingParams()).prompt_token_ids[: 60 + 17 * i]
        for i in range(4)
    ] * 4
    params = [SamplingParams(24, temperature=1.0 if i >= 8 else 0.0, seed=i) for i in range(16)]
    expected = alone.generate(prompts, params, progress=False)

    def send(i: int) -> list[int]:
        found = server.client.completions.create(
            model=MODEL,
            prompt=prompts[i],
            max_tokens=24,
            temperature=params[i].temperature,
            seed=i,
            extra_body={"return_token_ids": True},
        )
        return found.choices[0].token_ids  # type: ignore[attr-defined]

    with ThreadPoolExecutor(16) as pool:
        assert list(pool.map(send, range(16))) == [output.token_ids for output in expected]


def test_choices_of_a_prompt_draw_with_seeds_of_their_own(server: Served, alone: LLM) -> None:
    params = [SamplingParams(12, temperature=4.0, top_p=0.9, seed=7 + i) for i in range(3)]
    expected = alone.generate([QUESTION] * 3, params, progress=False)
    found = server.client.completions.create(
        model=MODEL, prompt=QUESTION, max_tokens=12, temperature=4, top_p=0.9, seed=7, n=3
    )
    assert [choice.text for choice in found.choices] == [output.text for output in expected]
    assert len({choice.text for choice in found.choices}) > 1
    assert found.usage is not None and found.usage.prompt_tokens == len(
        expected[0].prompt_token_ids
    )


def test_logprobs_of_an_answer_are_those_of_the_engine(server: Served, alone: LLM) -> None:
    (expected,) = alone.generate([QUESTION], SamplingParams(8, logprobs=3), progress=False)
    sent = {"model": MODEL, "prompt": QUESTION, "max_tokens": 8, "temperature": 0, "logprobs": 3}
    found = server.client.completions.create(**sent).choices[0].logprobs
    as_ids = (
        server.client.completions.create(**sent, extra_body={"return_tokens_as_token_ids": True})
        .choices[0]
        .logprobs
    )
    assert expected.logprobs is not None and found is not None and as_ids is not None
    assert found.token_logprobs == pytest.approx(
        [one.logprob for one in expected.logprobs], abs=1e-4
    )
    assert (
        "".join(found.tokens)
        == expected.text
        == " 3+4=7\n#### 7"[: found.text_offset[-1]] + found.tokens[-1]
    )
    assert as_ids.tokens == [f"token_id:{token}" for token in expected.token_ids]
    for likeliest, one in zip(as_ids.top_logprobs, expected.logprobs, strict=True):
        assert list(likeliest) == [f"token_id:{token}" for token, _ in one.top]
        assert list(likeliest.values()) == pytest.approx([value for _, value in one.top], abs=1e-4)


@pytest.mark.parametrize("max_tokens", [0, 3])
@pytest.mark.parametrize("stream", [False, True])
def test_an_echo_begins_with_the_prompt_and_its_logprobs(
    server: Served, alone: LLM, max_tokens: int, stream: bool
) -> None:
    params = SamplingParams(3, logprobs=1, prompt_logprobs=1)
    (expected,) = alone.generate([QUESTION], params, progress=False)
    assert expected.prompt_logprobs is not None and expected.logprobs is not None
    sent = {
        "model": MODEL,
        "prompt": expected.prompt_token_ids,
        "max_tokens": max_tokens,
        "temperature": 0,
    }
    sent |= {"echo": True, "logprobs": 1}
    for _ in range(2):  # a hit would have no logits
        if stream:
            choices = [
                event.choices[0] for event in server.client.completions.create(**sent, stream=True)
            ]
        else:
            choices = server.client.completions.create(**sent).choices
        text, values = "", []
        for choice in choices:
            assert choice.logprobs.text_offset == [
                len(text) + n for n in offsets(choice.logprobs.tokens)
            ]
            text += choice.text
            values += choice.logprobs.token_logprobs
        own = [*expected.prompt_logprobs, *expected.logprobs[:max_tokens]]
        assert text == QUESTION + (expected.text if max_tokens else "")
        assert values[0] is None and values[1:] == pytest.approx(
            [one.logprob for one in own], abs=1e-4
        )
        assert choices[-1].finish_reason == "length"


def offsets(tokens: list[str]) -> list[int]:
    return [sum(map(len, tokens[:i])) for i in range(len(tokens))]


def test_a_conversation_is_a_prompt_made_by_the_template(server: Served, alone: LLM) -> None:
    (expected,) = alone.generate(
        [QUESTION], SamplingParams(40, stop=("Question:",), logprobs=2), progress=False
    )
    question = QUESTION.removeprefix("Question: ").removesuffix("\nAnswer:")
    sent = {
        "model": MODEL,
        "max_tokens": 40,
        "temperature": 0,
        "stop": ["Question:"],
        "logprobs": True,
    }
    sent |= {"messages": [{"role": "user", "content": question}], "top_logprobs": 2}
    extra = {"return_token_ids": True}
    found = server.client.chat.completions.create(**sent, extra_body=extra)
    (choice,) = found.choices
    assert "#### 7" in choice.message.content == expected.text
    assert (
        found.prompt_token_ids == expected.prompt_token_ids
        and choice.token_ids == expected.token_ids
    )
    content = choice.logprobs.content
    assert expected.logprobs is not None
    assert [one.logprob for one in content] == pytest.approx(
        [one.logprob for one in expected.logprobs], abs=1e-4
    )
    assert [[other.token for other in one.top_logprobs] for one in content] == [
        [alone.tokenizer.decode([token]) for token, _ in one.top]
        for one in expected.logprobs  # type: ignore[union-attr]
    ]
    assert all(bytes(one.bytes).decode() == one.token for one in content)
    events = list(server.client.chat.completions.create(**sent, stream=True, extra_body=extra))
    assert (
        events[0].choices[0].delta.role == "assistant"
        and events[0].prompt_token_ids == found.prompt_token_ids
    )
    assert "".join(event.choices[0].delta.content for event in events) == expected.text
    assert [one for event in events[1:] for one in event.choices[0].logprobs.content] == content


def test_a_conversation_without_a_limit_may_take_all_that_is_left(server: Served) -> None:
    found = server.client.chat.completions.create(
        model=MODEL,
        messages=[{"role": "user", "content": "?"}],
        temperature=0,
        extra_body={"ignore_eos": True},
    )
    assert found.usage.total_tokens == server.llm.config.scheduler.max_model_len

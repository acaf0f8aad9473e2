"""A bad body is refused in one line, and nothing of it reaches the engine."""

from __future__ import annotations

import json
from typing import Any

import pytest

from tests.check.serve.conftest import Served

COMPLETIONS: list[tuple[Any, int, str]] = [
    (b"{", 400, "the body is not JSON"),
    (b'{"prompt": "\\ud800"}', 400, "the body is not JSON"),
    (b'{"prompt": ' + b"[" * 5000 + b"]" * 5000 + b"}", 400, "the body is not JSON"),
    ([], 400, "Input should be an object"),
    ({}, 400, "prompt is missing"),
    (
        {"prompt": None},
        400,
        "prompt: must be a text, a list of token ids, or a list of these, given None",
    ),
    ({"prompt": [[]]}, 400, "prompt: must be a text"),
    ({"prompt": []}, 400, "prompt: is an empty list"),
    ({"prompt": [1, "a"]}, 400, "prompt: must be a text"),
    ({"prompt": ""}, 400, "the prompt is empty"),
    ({"prompt": [-1]}, 400, "token -1 is outside the vocabulary"),
    ({"prompt": [5, 10**9]}, 400, "token 1000000000 is outside the vocabulary"),
    ({"prompt": [5] * 512}, 400, "the prompt has 512 tokens, max_model_len is 512"),
    ({"prompt": [5] * 500, "max_tokens": 13}, 400, "max_tokens=13 are more than max_model_len=512"),
    ({"prompt": "a", "max_tokens": 10**20}, 400, "are more than max_model_len=512"),
    ({"prompt": "a", "max_tokens": 0}, 400, "max_tokens=0 gives no token"),
    (
        {"prompt": "a", "max_tokens": -1},
        400,
        "max_tokens: Input should be greater than or equal to 0, given -1",
    ),
    (
        {"prompt": "a", "max_tokens": "5"},
        400,
        "max_tokens: Input should be a valid integer, given '5'",
    ),
    ({"prompt": "a", "n": 0}, 400, "n: Input should be greater than or equal to 1"),
    ({"prompt": "a", "temperature": -1}, 400, "temperature=-1.0 must be finite and >= 0"),
    (b'{"prompt": "a", "temperature": NaN}', 400, "temperature: Input should be a finite number"),
    ({"prompt": "a", "seed": 2**63}, 400, "must fit in 64 bits"),
    ({"prompt": "a", "stop": 3}, 400, "stop"),
    ({"prompt": "a", "logprobs": 21}, 400, "logprobs: Input should be less than or equal to 20"),
    (
        {"prompt": "a", "frequency_penalty": 0.5},
        400,
        "frequency_penalty is not supported; leave it out",
    ),
    ({"prompt": "a", "stop": ["a"] * 65}, 400, "List should have at most 64 items"),
    (
        {"prompt": "a", "stop_token_ids": [5] * 65},
        400,
        "stop_token_ids: List should have at most 64 items",
    ),
    ({"prompt": "a", "k" * 10_000: 1}, 400, "is not supported"),
    (
        {"prompt": "a", "model": "m" * 10_000},
        404,
        "mm' does not exist; this server serves 'guard_model'",
    ),
    (
        {"prompt": "a", "stream_options": {"include_usage": True}},
        400,
        "stream_options needs stream=true",
    ),
    (
        {"prompt": "a", "stream": True, "stream_options": {"x": 1}},
        400,
        "stream_options.x is not supported",
    ),
    ({"prompt": "a", "cache_salt": 5}, 400, "cache_salt: Input should be a valid string"),
]
USER = [{"role": "user", "content": "?"}]
CHAT: list[tuple[Any, int, str]] = [
    ({}, 400, "messages is missing"),
    ({"messages": []}, 400, "messages: List should have at least 1 item"),
    ({"messages": [{"role": "user"}]}, 400, "messages.0.content"),
    (
        {"messages": [{"role": 1, "content": "?"}]},
        400,
        "messages.0.role: Input should be a valid string",
    ),
    (
        {"messages": [{"role": "user", "content": [{"type": "image_url"}]}]},
        400,
        "messages.0.content",
    ),
    ({"messages": USER, "top_logprobs": 2}, 400, "top_logprobs needs logprobs=true"),
    ({"messages": USER, "max_tokens": 600}, 400, "are more than max_model_len=512"),
    ({"messages": USER, "tools": []}, 400, "tools is not supported"),
    ({"messages": [{"role": "user", "content": "?" * 600}]}, 400, "max_model_len is 512"),
]
BODIES = [("/v1/completions", *case) for case in COMPLETIONS] + [
    ("/v1/chat/completions", *case) for case in CHAT
]


@pytest.mark.parametrize(
    ("path", "body", "status", "said"), BODIES, ids=lambda value: str(value)[:60]
)
def test_a_bad_body_is_one_line(
    server: Served, path: str, body: Any, status: int, said: str
) -> None:
    data = body if isinstance(body, bytes) else json.dumps(body).encode()
    for stream in (False, True):
        if stream and isinstance(body, dict) and "stream_options" not in body:
            data = json.dumps(body | {"stream": True}).encode()
        answer = server.http.post(path, content=data, headers={"content-type": "application/json"})
        error = answer.json()["error"]
        assert (answer.status_code, error["type"]) == (status, "invalid_request_error")
        assert (
            said in error["message"]
            and "\n" not in error["message"]
            and len(error["message"]) < 300
        )
    assert not server.llm.scheduler.has_requests


def test_an_error_names_the_field(server: Served) -> None:
    answer = server.http.post("/v1/completions", json={"prompt": "a", "stop_token_ids": ["x"]})
    error = answer.json()["error"]
    assert error["param"] == "stop_token_ids" and error["message"].startswith("stop_token_ids.0: ")


def test_fields_that_clients_send_by_themselves_change_nothing(server: Served) -> None:
    plain = {"model": "guard_model", "prompt": "Question:", "max_tokens": 5, "temperature": 0}
    unasked = {
        "frequency_penalty": 0,
        "presence_penalty": 0.0,
        "user": "me",
        "n": None,
        "stop": None,
        "seed": 3,
    }
    texts = [
        server.http.post("/v1/completions", json=plain | more).json()["choices"]
        for more in ({}, unasked)
    ]
    assert texts[0] == texts[1]

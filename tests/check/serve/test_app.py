"""Routes, access and limits."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import pytest
from fastapi.testclient import TestClient

from hybrid_kv import __version__
from hybrid_kv.check.serve.app import Access, Front
from hybrid_kv.check.serve.schema import CompletionRequest
from hybrid_kv.check.serve.template import render
from tests.check.serve.conftest import Served
from tests.cli.run import raising

ASK = {"prompt": "Question:", "max_tokens": 2}
ROUTES = [
    ("GET", "/v1/models"),
    ("POST", "/v1/completions"),
    ("POST", "/v1/chat/completions"),
    ("POST", "/reset_prefix_cache"),
    ("POST", "/sleep"),
    ("POST", "/wake_up"),
    ("GET", "/is_sleeping"),
    ("GET", "/metrics"),
]


@pytest.fixture
def front(server: Served) -> Callable[..., TestClient]:
    """Another front of the same engine, with other rules."""

    def make(**rules: Any) -> TestClient:
        return TestClient(Front(server.engine, server.metrics, Access("guard_model", **rules)).app)

    return make


@pytest.mark.parametrize(("method", "path"), ROUTES)
@pytest.mark.parametrize(
    "sent", [None, "secret", "Bearer", "Bearer ", "Bearer wrong", "Bearer secret2", "Basic secret"]
)
def test_without_the_key_nothing_is_answered(
    front: Callable[..., TestClient], method: str, path: str, sent: str | None
) -> None:
    headers = {} if sent is None else {"Authorization": sent}
    answer = front(api_key="secret").request(
        method, path, headers=headers, json=ASK if "v1" in path else None
    )
    assert answer.status_code == 401 and answer.headers["www-authenticate"] == "Bearer"
    assert answer.json()["error"]["code"] == "invalid_api_key" and "secret" not in answer.text


def test_with_the_key_everything_is_answered(front: Callable[..., TestClient]) -> None:
    client = front(api_key="sécret")
    headers = {"Authorization": "bearer sécret".encode()}
    assert client.post("/v1/completions", json=ASK, headers=headers).status_code == 200
    assert client.get("/metrics", headers=headers).status_code == 200
    assert client.get("/health").status_code == 200  # it tells nothing
    assert client.get("/version").json() == {"version": __version__}  # nor does it need a key


def test_a_body_that_is_too_long_is_not_read_to_its_end(front: Callable[..., TestClient]) -> None:
    client = front(max_body_bytes=100)
    headers = {"content-type": "application/json"}
    answer = client.post("/v1/completions", content=b" " * 101, headers=headers)
    assert (
        answer.status_code == 413
        and answer.json()["error"]["message"] == "the body is longer than 100 bytes"
    )
    assert (
        client.post(
            "/v1/completions", content=(b" " * 30 for _ in range(50)), headers=headers
        ).status_code
        == 413
    )
    assert client.post("/v1/completions", json=ASK).status_code == 200


@pytest.mark.parametrize(("then", "seconds"), [([{"type": "http.disconnect"}], 60), ([], 0.01)])
def test_a_body_that_does_not_end_is_no_bug(
    front: Callable[..., TestClient], then: list[dict[str, Any]], seconds: float
) -> None:
    sent: list[Any] = []
    messages = [{"type": "http.request", "body": b"{", "more_body": True}, *then]

    async def receive() -> Any:
        return messages.pop(0) if messages else await asyncio.Event().wait()

    async def send(message: Any) -> None:
        sent.append(message)

    headers = [(b"content-type", b"application/json")]
    scope = {
        "type": "http",
        "method": "POST",
        "path": "/v1/completions",
        "query_string": b"",
        "headers": headers,
    }
    asyncio.run(asyncio.wait_for(front(receive_timeout=seconds).app(scope, receive, send), 60))
    assert sent[0]["status"] == 408 and (b"connection", b"close") in sent[0]["headers"]


def test_too_many_sequences_are_refused_before_any_work(
    server: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(CompletionRequest, "sampling_params", None)
    monkeypatch.setattr(server.llm.tokenizer, "encode", None)
    answer = server.http.post("/v1/completions", json={"prompt": ["a"] * 20_000, "n": 128})
    assert answer.status_code == 400
    assert answer.json()["error"]["message"].startswith(
        "2560000 sequences in one request, 260 may be open"
    )


def test_a_prompt_is_tokenized_once_for_all_choices(
    server: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    tokenizer: Any = server.llm.tokenizer
    encoded, encode = [], tokenizer.encode
    monkeypatch.setattr(tokenizer, "encode", lambda text: encoded.append(text) or encode(text))
    assert server.http.post("/v1/completions", json=ASK | {"n": 3}).status_code == 200
    assert encoded == ["Question:"]


@pytest.mark.parametrize(
    ("method", "path", "status"),
    [
        ("GET", "/", 404),
        ("GET", "/v1/completions", 405),
        ("POST", "/v1/embeddings", 404),
        ("GET", "/docs", 404),
    ],
)
def test_a_wrong_path_is_an_error_in_the_same_form(
    server: Served, method: str, path: str, status: int
) -> None:
    answer = server.http.request(method, path)
    assert answer.status_code == status and answer.json()["error"]["message"].startswith(
        f"{method} {path}: "
    )


def test_a_form_is_answered_with_what_to_send(server: Served) -> None:
    answer = server.http.post("/v1/completions", data={"prompt": "a"})
    assert (
        answer.status_code == 415
        and "send JSON as application/json" in answer.json()["error"]["message"]
    )


@pytest.mark.parametrize(
    ("template", "said"),
    [
        (None, "guard_model has no chat template: start the server with --chat-template"),
        (
            "{{ raise_exception('roles must alternate') }}",
            "refuses these messages: roles must alternate",
        ),
        ("{% for", "the chat template refuses these messages: "),
        ("{{ 1 + messages }}", "the chat template refuses these messages: TypeError: "),
        ("{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}", "RecursionError: "),
        ("{% for i in range(10**9) %}{% endfor %}", "OverflowError: Range too big"),
        (r"{{ '\ud800' }}", "UnicodeEncodeError: "),
        (
            "{% for i in range(9999) %}{{ 'abc' * 9999 }}{% endfor %}",
            "it makes more than 1048576 characters",
        ),
        (
            "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}",
            "it takes more than 2 s",
        ),
        ("{{ 'a' * 10**10 }}", "it takes more than 2 s or 512 MiB of memory"),
        ("", "the prompt is empty"),
    ],
)
def test_a_template_that_is_missing_or_refuses_is_one_line(
    front: Callable[..., TestClient], template: str | None, said: str
) -> None:
    body = {"messages": [{"role": "user", "content": "?"}]}
    answer = front(chat_template=template).post("/v1/chat/completions", json=body)
    assert answer.status_code == 400 and said in answer.json()["error"]["message"]


def test_a_template_makes_the_text_that_transformers_makes(server: Served) -> None:
    tokenizer: Any = server.llm.tokenizer
    template = """
    {%- if tools is not none or documents is not none %}
    {{- raise_exception('none were given') }}{% endif %}
    {% for message in messages %}{% if loop.index > 2 %}{% break %}{% endif %}
    {% generation %}{{ message | tojson }} {{ message.content | tojson(indent=1) -}}
    {% endgeneration %}
    {% endfor %}{{ bos_token }}{{ strftime_now('%Y') -}}
    {% if add_generation_prompt %}Answer:{% endif %}
    """
    messages = [
        {"role": role, "content": f"<{role} 'é' & more>"}
        for role in ("system", "user", "assistant")
    ]
    variables = {
        "messages": messages,
        "tools": None,
        "documents": None,
        "add_generation_prompt": True,
    }
    expected = tokenizer.apply_chat_template(
        messages, chat_template=template, tokenize=False, add_generation_prompt=True
    )
    assert render(template, tokenizer.special_tokens_map | variables, 10**6) == expected


def test_a_bug_is_one_line_without_what_it_knows(
    server: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    front = Front(server.engine, server.metrics, Access("guard_model"))
    monkeypatch.setattr(front, "_answer", raising(KeyError("a secret")))
    answer = TestClient(front.app, raise_server_exceptions=False).post("/v1/completions", json=ASK)
    assert (answer.status_code, answer.json()["error"]["message"]) == (
        500,
        "internal error: KeyError",
    )

"""Routes, access and limits."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from fastapi.testclient import TestClient

from hybrid_kv import __version__
from hybrid_kv.serve.app import Access, Front
from tests.serve.conftest import Served

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
    answer = front(api_key="secret").request(method, path, headers=headers, json=ASK if "v1" in path else None)
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
    read = []

    def chunks() -> Any:
        for number in range(50):
            read.append(number)
            yield b" " * 30

    headers = {"content-type": "application/json"}
    answer = client.post("/v1/completions", content=b" " * 101, headers=headers)
    assert answer.status_code == 413 and answer.json()["error"]["message"] == "the body is longer than 100 bytes"
    assert client.post("/v1/completions", content=chunks(), headers=headers).status_code == 413
    assert client.post("/v1/completions", json=ASK).status_code == 200


@pytest.mark.parametrize(
    ("method", "path", "status"),
    [("GET", "/", 404), ("GET", "/v1/completions", 405), ("POST", "/v1/embeddings", 404), ("GET", "/docs", 404)],
)
def test_a_wrong_path_is_an_error_in_the_same_form(server: Served, method: str, path: str, status: int) -> None:
    answer = server.http.request(method, path)
    assert answer.status_code == status and answer.json()["error"]["message"].startswith(f"{method} {path}: ")


def test_a_form_is_answered_with_what_to_send(server: Served) -> None:
    answer = server.http.post("/v1/completions", data={"prompt": "a"})
    assert answer.status_code == 415 and "send JSON as application/json" in answer.json()["error"]["message"]


@pytest.mark.parametrize(
    ("template", "said"),
    [
        (None, "guard_model has no chat template: start the server with --chat-template"),
        (
            "{{ raise_exception('roles must alternate') }}",
            "the chat template refuses these messages: roles must alternate",
        ),
        ("{% for", "the chat template refuses these messages: "),
        ("{{ 1 + messages }}", "the chat template refuses these messages: "),
        ("", "the prompt is empty"),
    ],
)
def test_a_template_that_is_missing_or_refuses_is_one_line(
    front: Callable[..., TestClient], template: str | None, said: str
) -> None:
    body = {"messages": [{"role": "user", "content": "?"}]}
    answer = front(chat_template=template).post("/v1/chat/completions", json=body)
    assert answer.status_code == 400 and said in answer.json()["error"]["message"]


def test_a_bug_is_one_line_without_what_it_knows(server: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: Any) -> None:
        raise KeyError("a secret")

    front = Front(server.engine, server.metrics, Access("guard_model"))
    monkeypatch.setattr(front, "_answer", broken)
    answer = TestClient(front.app, raise_server_exceptions=False).post("/v1/completions", json=ASK)
    assert (answer.status_code, answer.json()["error"]["message"]) == (500, "internal error: KeyError")

"""A server of the guard model for all tests of this folder, and the same engine alone."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import httpx2
import pytest

from hybrid_kv import LLM
from hybrid_kv.check.guard_model import FOLDER
from hybrid_kv.check.serve.app import Access
from hybrid_kv.check.serve.server import Server, open_socket

QUESTION = "Question: Ann has 3 pens. Ann buys 4 more. How many pens does Ann have now?\nAnswer:"
TEMPLATE = "{% for message in messages %}Question: {{ message.content }}\n{% endfor %}Answer:"
OPTIONS: dict[str, Any] = {
    "mamba_cache_mode": "all",
    "speculative_method": "ngram",
    "num_speculative_tokens": 3,
    "max_num_seqs": 4,
    "num_blocks": 64,
    "max_model_len": 512,
    "device": "cpu",
}


class Served:
    """A server that runs in a thread, and clients of it."""

    def __init__(self, server: Server, port: int, key: str | None) -> None:
        import openai  # not above: every worker of a run reads this file, and it takes seconds

        self.server, self.engine, self.metrics = server, server.engine, server.metrics
        self.llm = server.engine.llm
        self.url = f"http://127.0.0.1:{port}"
        arguments: dict[str, Any] = {
            "base_url": f"{self.url}/v1",
            "api_key": key or "none",
            "max_retries": 0,
        }
        self.client = openai.OpenAI(**arguments)
        self.http = httpx2.Client(base_url=self.url, timeout=60)


@contextmanager
def served(
    llm: LLM,
    access: Access | None = None,
    failures: list[BaseException] | None = None,
    **limits: int,
) -> Iterator[Served]:
    """Args: `failures` gets what ended the server, where that is meant."""
    access = access or Access("guard_model", chat_template=TEMPLATE)
    opened = open_socket("127.0.0.1", 0, access.api_key is not None)
    server = Server(llm, access, **limits)

    def run() -> None:
        try:
            server.run([opened])
        except BaseException as error:
            if failures is None:
                raise
            failures.append(error)

    thread = threading.Thread(target=run)
    opened.listen()  # clients that come before the loop runs wait
    thread.start()
    try:
        one = Served(server, opened.getsockname()[1], access.api_key)
        with one.http, one.client:
            yield one
    finally:
        server.should_exit = True
        thread.join(30)
        assert not thread.is_alive()


@pytest.fixture(scope="session")
def server() -> Iterator[Served]:
    with served(LLM(str(FOLDER), **OPTIONS)) as one:
        yield one


@pytest.fixture(scope="session")
def alone() -> LLM:
    """Without a cache, drafts or a server."""
    return LLM(str(FOLDER), max_model_len=512, max_num_seqs=1, device="cpu")

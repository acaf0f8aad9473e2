"""How the server begins and ends."""

from __future__ import annotations

import json
import os
import queue
import re
import signal
import socket
import threading
from concurrent.futures import ThreadPoolExecutor
from importlib import import_module

import httpx2
import pytest

from hybrid_kv import LLM
from hybrid_kv.check.guard_model import FOLDER
from hybrid_kv.check.serve.app import Access
from hybrid_kv.check.serve.server import open_socket
from hybrid_kv.config import ConfigError
from tests.check.serve.conftest import OPTIONS, QUESTION, served
from tests.cli.run import run


@pytest.mark.parametrize("ending", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_ends_what_streams_in_order(
    ending: signal.Signals, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The server has the main thread, as signals need; a client's thread learns its address."""
    monkeypatch.setenv("HYBRID_KV_API_KEY", "secret")
    addresses, lines = queue.SimpleQueue[str](), list[str]()
    monkeypatch.setattr(
        import_module("hybrid_kv.cli.serve"),
        "print",
        lambda line, **_: addresses.put(line),
        raising=False,
    )

    def ask() -> None:
        body = {"prompt": QUESTION, "max_tokens": 4000, "ignore_eos": True, "stream": True}
        (url,) = re.findall(
            r"^guard_model at (http://127\.0\.0\.1:\d+/v1); Ctrl-C ends it$",
            addresses.get(timeout=60),
        )
        headers = {"Authorization": "Bearer secret"}
        with httpx2.stream(
            "POST", f"{url}/completions", json=body, headers=headers, timeout=60
        ) as answer:
            for line in filter(None, answer.iter_lines()):
                if not lines:
                    os.kill(os.getpid(), ending)
                lines.append(line)

    def end_in_any_case() -> None:
        if not has_ended.wait(60):
            os.kill(os.getpid(), signal.SIGHUP)

    has_ended = threading.Event()
    with ThreadPoolExecutor(2) as pool:
        asked = pool.submit(ask)
        pool.submit(end_in_any_case)
        code, _, err = run(capsys, "serve", "--port", "0", "--grace", "0", "--device", "cpu")
        has_ended.set()
        asked.result()
    assert code == 0 and err.startswith("loading nemotron_h in float32: ") and err.count("\n") == 1
    assert lines[-1] == "data: [DONE]"
    assert json.loads(lines[-2].removeprefix("data: "))["choices"][0]["finish_reason"] == "abort"


def test_slow_headers_end_a_connection() -> None:
    with served(LLM(str(FOLDER), **OPTIONS), Access("guard_model", receive_timeout=0.2)) as one:
        with socket.create_connection(
            one.server.servers[0].sockets[0].getsockname(), timeout=30
        ) as slow:
            slow.sendall(b"GET /health HT")
            assert slow.recv(99) == b""
        assert one.http.get("/health").status_code == 200


def test_half_an_upload_does_not_delay_the_end() -> None:
    with served(LLM(str(FOLDER), **OPTIONS), grace=1000) as one:
        head = (
            b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-type: "
            b"application/json\r\ncontent-length: 99\r\n"
        )
        slow = socket.create_connection(one.server.servers[0].sockets[0].getsockname(), timeout=30)
        slow.sendall(head + b"expect: 100-continue\r\n\r\n")
        assert b"100 Continue" in slow.recv(999)  # the body is being read
        slow.sendall(b"{")
    slow.close()  # the server has ended before


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "", "no.such.host.invalid"])
def test_other_machines_need_a_key(host: str) -> None:
    said = (
        f"--host {host} can be reached from other machines: set HYBRID_KV_API_KEY, or use 127.0.0.1"
    )
    with pytest.raises(ConfigError, match=re.escape(said)):
        open_socket(host, 0, has_key=False)


def test_an_address_that_is_taken_is_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        code, out, err = run(capsys, "serve", "--port", str(port))
    assert (code, out) == (2, "")
    assert err == f"error: --host 127.0.0.1 --port {port}: Address already in use; give another\n"

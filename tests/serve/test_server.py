"""How the server begins and ends."""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import subprocess
import sys
from pathlib import Path

import httpx2
import pytest

from hybrid_kv import LLM
from hybrid_kv.accuracy.guard_model import FOLDER
from hybrid_kv.config import ConfigError
from hybrid_kv.serve.app import Access
from hybrid_kv.serve.server import open_socket
from tests.cli.run import run
from tests.serve.conftest import OPTIONS, QUESTION, served

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.parametrize("ending", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_ends_what_streams_in_order(ending: signal.Signals) -> None:
    command = [sys.executable, "-m", "hybrid_kv.cli", "serve", "--port", "0", "--grace", "0", "--device", "cpu"]
    environment = os.environ | {"HYBRID_KV_API_KEY": "secret"}
    body = {"prompt": QUESTION, "max_tokens": 4000, "ignore_eos": True, "stream": True}
    with subprocess.Popen(
        command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment
    ) as process:
        try:
            assert process.stdout is not None
            line = process.stdout.readline()
            (url,) = re.findall(r"^guard_model at (http://127\.0\.0\.1:\d+/v1); Ctrl-C ends it\n$", line)
            headers = {"Authorization": "Bearer secret"}
            with httpx2.stream("POST", f"{url}/completions", json=body, headers=headers, timeout=60) as answer:
                lines = (one for one in answer.iter_lines() if one)
                next(lines)
                process.send_signal(ending)
                *_, last, done = lines
            _, err = process.communicate(timeout=60)
        finally:
            process.kill()
    assert process.returncode == 0 and err.startswith("loading nemotron_h in float32: ") and err.count("\n") == 1
    assert done == "data: [DONE]"
    assert json.loads(last.removeprefix("data: "))["choices"][0]["finish_reason"] == "abort"


def test_slow_headers_end_a_connection() -> None:
    with served(LLM(str(FOLDER), **OPTIONS), Access("guard_model", receive_timeout=0.2)) as one:
        with socket.create_connection(one.server.servers[0].sockets[0].getsockname(), timeout=30) as slow:
            slow.sendall(b"GET /health HT")
            assert slow.recv(99) == b""
        assert one.http.get("/health").status_code == 200


def test_half_an_upload_does_not_delay_the_end() -> None:
    with served(LLM(str(FOLDER), **OPTIONS), grace=1000) as one:
        head = b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\ncontent-length: 99\r\n"
        slow = socket.create_connection(one.server.servers[0].sockets[0].getsockname(), timeout=30)
        slow.sendall(head + b"expect: 100-continue\r\n\r\n")
        assert b"100 Continue" in slow.recv(999)  # the body is being read
        slow.sendall(b"{")
    slow.close()  # the server has ended before


@pytest.mark.parametrize(
    ("host", "said"),
    [
        ("0.0.0.0", "--host 0.0.0.0 can be reached from other machines: set HYBRID_KV_API_KEY, or use 127.0.0.1"),
        ("::", "--host :: can be reached from other machines"),
        ("", "--host  can be reached from other machines"),
        ("no.such.host.invalid", "--host no.such.host.invalid can be reached from other machines"),
    ],
)
def test_other_machines_need_a_key(host: str, said: str) -> None:
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

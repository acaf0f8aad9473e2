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

from hybrid_kv.config import ConfigError
from hybrid_kv.serve.server import open_socket
from tests.cli.run import run
from tests.serve.conftest import QUESTION

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
    assert (process.returncode, err) == (0, "")
    assert done == "data: [DONE]"
    assert json.loads(last.removeprefix("data: "))["choices"][0]["finish_reason"] == "abort"


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

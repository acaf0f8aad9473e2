"""`hybrid-kv serve`: what the command line hands on, and what it refuses before anything is loaded."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from hybrid_kv.serve.server import Server
from tests.cli.run import run


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch) -> list[Server]:
    """Servers that would have run."""
    found: list[Server] = []
    monkeypatch.setattr(Server, "run", lambda self, sockets: found.append(self))
    monkeypatch.delenv("HYBRID_KV_API_KEY", raising=False)
    return found


def test_options_reach_the_engine_and_the_front(
    started: list[Server], capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    template = tmp_path / "chat.jinja"
    template.write_text("{{ messages }}")
    options: dict[str, Any] = {
        "max_num_seqs": 3, "max_num_batched_tokens": 40, "max_model_len": 300, "num_blocks": 50, "block_size": 16,
        "mamba_cache_mode": "align", "state_scheme": "replay", "speculative_method": "mtp", "num_speculative_tokens": 2,
        "async_scheduling": "on", "dtype": "float64", "mamba_ssm_cache_dtype": "float64", "device": "cpu",
        "attention_backend": "FLASH_ATTN", "kv_offload_bytes": 2**20,
    }  # fmt: skip
    words = [word for name, value in options.items() for word in (f"--{name.replace('_', '-')}", str(value))]
    front = [
        "--port",
        "0",
        "--max-waiting",
        "5",
        "--grace",
        "2",
        "--max-body-bytes",
        "99",
        "--chat-template",
        str(template),
    ]
    monkeypatch.setenv("HYBRID_KV_API_KEY", "secret")
    code, out, err = run(capsys, "serve", *words, *front, "--served-model-name", "toy", "--host", "0.0.0.0")
    assert (code, err) == (0, "") and out.startswith("toy at http://0.0.0.0:")
    (server,) = started
    llm, config = server.engine.llm, server.engine.llm.config
    assert server.engine.max_open == 3 + 5 and server.grace == 2
    assert (server.access.api_key, server.access.max_body_bytes) == ("secret", 99)
    assert (server.access.model, server.access.chat_template) == ("toy", "{{ messages }}")
    parts = (config, config.cache, config.scheduler, config.speculative)
    for name, value in (options | {"async_scheduling": True}).items():
        assert [getattr(part, name) for part in parts if hasattr(part, name)] == [value], name
    assert {weight.dtype for weight in llm.model.parameters()} == {torch.float64}  # type: ignore[attr-defined]


def test_without_the_extra_one_line_names_it(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "uvicorn", None)
    said = "error: uvicorn is not installed; run: pip install -e '.[serve]' in a checkout\n"
    assert run(capsys, "serve") == (2, "", said)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--host", "0.0.0.0"], "can be reached from other machines: set HYBRID_KV_API_KEY"),
        (["--chat-template", "no.jinja"], "no.jinja: No such file or directory"),
        (["--chat-template", "/dev/zero"], "/dev/zero is a device; name a file"),
        (["--chat-template", sys.executable], "is no text: byte"),
        (["--port", "65536"], "65536"),
        (["--model", "no/such/folder", "--port", "0"], "no/such/folder"),
        (["--async-scheduling", "maybe", "--port", "0"], "maybe"),
    ],
)
def test_what_cannot_be_served_is_one_line(
    started: list[Server], capsys: pytest.CaptureFixture[str], words: list[str], said: str
) -> None:
    code, out, err = run(capsys, "serve", *words)
    assert (code, out, err.count("\n")) == (2, "", 1) and said in err
    assert not started

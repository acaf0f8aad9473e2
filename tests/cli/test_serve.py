"""`hybrid-kv serve`: what the command line passes on, and refuses before anything is loaded."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from hybrid_kv.check.serve.server import Server
from tests.cli.run import refused, run


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch) -> list[Server]:
    """Servers that would have run."""
    found: list[Server] = []
    monkeypatch.setattr(Server, "run", lambda self, sockets: found.append(self))
    monkeypatch.delenv("HYBRID_KV_API_KEY", raising=False)
    return found


def test_options_reach_the_engine_and_the_front(
    started: list[Server],
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    template = tmp_path / "chat.jinja"
    template.write_text("{{ messages }}")
    options: dict[str, Any] = {
        "max_num_seqs": 3,
        "max_num_batched_tokens": 40,
        "max_model_len": 300,
        "num_blocks": 50,
        "block_size": 16,
        "mamba_cache_mode": "align",
        "state_scheme": "recompute",
        "speculative_method": "mtp",
        "num_speculative_tokens": 2,
        "async_scheduling": True,
        "dtype": "float64",
        "mamba_ssm_cache_dtype": "float64",
        "device": "cpu",
        "attention_backend": "FLASH_ATTN",
        "kv_offload_bytes": 2**20,
    }
    words = [
        f"--{name.replace('_', '-')}" + ("" if value is True else f"={value}")
        for name, value in options.items()
    ]
    front = [
        "--port",
        "0",
        "--max-waiting",
        "5",
        "--grace",
        "2",
        "--max-body-bytes",
        "99",
        "--receive-timeout",
        "7",
    ]
    monkeypatch.setenv("HYBRID_KV_API_KEY", "secret")
    front += ["--served-model-name", "toy", "--host", "0.0.0.0", "--chat-template", str(template)]
    code, out, err = run(capsys, "serve", *words, *front)
    assert code == 0 and out.startswith("toy at http://0.0.0.0:")
    assert err.startswith("loading nemotron_h in float64: ") and err.count("\n") == 1
    (server,) = started
    llm, config = server.engine.llm, server.engine.llm.config
    assert server.engine.max_open == 3 + 5 and server.grace == 2
    assert (server.access.api_key, server.access.max_body_bytes, server.access.receive_timeout) == (
        "secret",
        99,
        7,
    )
    assert (server.access.model, server.access.chat_template) == ("toy", "{{ messages }}")
    parts = (config, config.cache, config.scheduler, config.speculative)
    for name, value in options.items():
        assert [getattr(part, name) for part in parts if hasattr(part, name)] == [value], name
    assert {weight.dtype for weight in llm.model.parameters()} == {torch.float64}  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--host", "0.0.0.0"], "can be reached from other machines: set HYBRID_KV_API_KEY"),
        (["--chat-template", "/dev/zero"], "/dev/zero is not a regular file; name one"),
        (["--port", "65536"], "65536"),
        (["--model", "no/such/folder", "--port", "0"], "no/such/folder"),
        (["--async-scheduling=maybe", "--port", "0"], "does not take a value"),
    ],
)
def test_what_cannot_be_served_is_one_line(
    started: list[Server], capsys: pytest.CaptureFixture[str], words: list[str], said: str
) -> None:
    assert said in refused(capsys, "serve", *words)
    assert not started

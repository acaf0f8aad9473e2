"""`hybrid-kv generate`: prompts from arguments or standard input, text or JSON."""

from __future__ import annotations

import io
import json
from pathlib import Path
from typing import Any

import pytest

from tests.cli.run import run


class Stdin:
    def __init__(self, data: bytes) -> None:
        self.buffer = io.BytesIO(data)


@pytest.mark.parametrize(
    ("stdin", "said"),
    [
        (None, "no prompt: none is given as an argument, and standard input is closed"),
        (Stdin(b""), "no prompt: give one as an argument or on standard input"),
        (Stdin(b"ab\xff"), "standard input is no text: byte 2 is not UTF-8"),
    ],
)
def test_standard_input_that_holds_no_prompt_is_one_line(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], stdin: Any, said: str
) -> None:
    monkeypatch.setattr("sys.stdin", stdin)
    assert run(capsys, "generate") == (2, "", f"error: {said}\n")


def test_every_line_of_standard_input_is_a_prompt(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    monkeypatch.setattr("sys.stdin", Stdin("Question:\r\n\u00fc\n".encode()))
    file = tmp_path / "out.json"
    code, out, _ = run(capsys, "generate", "--max-tokens", "2", "--json", "--out", str(file), "--device", "cpu")
    assert code == 0
    outputs = json.loads(out)
    assert [output["prompt"] for output in outputs] == ["Question:", "\u00fc"]
    assert all(len(output["token_ids"]) <= 2 for output in outputs)
    assert json.loads(file.read_text()) == outputs

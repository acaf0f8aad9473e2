"""`hybrid-kv generate`: prompts from arguments or standard input, text or JSON."""

from __future__ import annotations

import io
import json
import re
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file, save_file

from hybrid_kv.models.random_checkpoint import write_checkpoint
from tests.cli.run import run


class Stdin:
    def __init__(self, data: bytes) -> None:
        self.buffer = io.BytesIO(data)


@pytest.mark.parametrize(
    ("stdin", "said"),
    [
        (None, "no prompt: give one as an argument; standard input is closed"),
        (Stdin(b""), "no prompt: give one as an argument or on standard input"),
        (Stdin(b"ab\xff"), "standard input is not text: byte 2 is not UTF-8"),
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
    code, out, _ = run(
        capsys, "generate", "--max-tokens", "2", "--json", "--out", str(file), "--device", "cpu"
    )
    assert code == 0
    outputs = json.loads(out)
    assert [output["prompt"] for output in outputs] == ["Question:", "\u00fc"]
    assert all(len(output["token_ids"]) <= 2 for output in outputs)
    assert json.loads(file.read_text()) == outputs


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_what_a_checkpoint_takes_is_printed_before_it_is_loaded(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, dtype: str
) -> None:
    write_checkpoint("qwen3_5_text", tmp_path)
    options = ("generate", "w5 w6", "--model", str(tmp_path), "--max-tokens", "2", "--dtype", dtype)
    code, out, err = run(capsys, *options)
    assert code == 0 and out.startswith("w5 w6")
    assert re.search(
        (
            rf"^loading qwen3_5_text in {dtype}: [\d,]+ B of weights on disk; a request of "
            rf"4,096 tokens takes"
        ),
        err,
        re.M,
    )
    file = tmp_path / "model.safetensors"
    weights = load_file(file)
    missing = min(weights)
    save_file({name: weights[name] for name in weights if name != missing}, file)
    code, out, err = run(capsys, *options)
    loading, *rest = err.splitlines()
    assert (code, out) == (2, "") and loading.startswith("loading qwen3_5_text in ")
    assert rest[-1].startswith("error: ") and missing in rest[-1]

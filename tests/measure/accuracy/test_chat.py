"""Conversations and reasoning: what is sent, what of an answer is read, what a baseline fixes."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from hybrid_kv import LLM
from hybrid_kv.check.guard_model import FOLDER
from hybrid_kv.check.serve.app import Access
from hybrid_kv.config import ConfigError, HybridKVError
from hybrid_kv.measure.accuracy import judge, run
from hybrid_kv.measure.accuracy.chat import ChatMode, mode_of
from hybrid_kv.measure.accuracy.tasks import NO_ANSWER
from tests.check.serve.conftest import OPTIONS, Served, served
from tests.cli.run import refused
from tests.support.answers import call

LIMIT = 4
# The guard model writes a calculation, `####` and the result: the calculation is its reasoning.
MODE = ChatMode(apply_chat_template=True, think_end_token="####", max_gen_toks=60)
ENGINE = {"device": "cpu", "max_model_len": 640}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The guard model with a chat template."""
    made = tmp_path_factory.mktemp("chat") / "guard_model"
    shutil.copytree(FOLDER, made)
    config = json.loads((made / "tokenizer_config.json").read_text())
    config["chat_template"] = "{% for message in messages %}{{ message.content }}{% endfor %}"
    (made / "tokenizer_config.json").write_text(json.dumps(config))
    return made


@pytest.fixture(scope="module")
def server(folder: Path) -> Iterator[Served]:
    with served(LLM(str(folder), **OPTIONS), Access(folder.name)) as one:
        yield one


@pytest.mark.parametrize(
    ("text", "answer"),
    [
        ("3 + 4\n#### 7", "7"),
        # a stop in the reasoning stops nothing
        (
            "Question: is it? #### 7 Question: and now?",
            "7 ",
        ),
        ("#### 3 or #### 7", "7"),
        ("3 + 4 = 7, so I am sure that", NO_ANSWER),  # 16,384 tokens were not enough
    ],
)
def test_the_reasoning_is_cut_off_before_the_filter(text: str, answer: str) -> None:
    assert MODE.answer(text, ["Question:", ""]) == answer
    assert ChatMode().answer(text, ["Question:"]) == text


def test_only_the_end_of_the_turn_stops_an_answer_with_reasoning() -> None:
    assert MODE.stops_while_generating(["Question:", ""], "<eos>") == ("<eos>",)
    assert ChatMode().stops_while_generating(["Question:", ""], "<eos>") == ("Question:",)


def check(result: run.AccuracyResult) -> None:
    """Right under the flexible filter; the strict one wants the mark that ends the reasoning."""
    assert result.accuracy_flexible == 1.0 and result.accuracy == 0.0
    assert {name: result.params[name] for name in vars(MODE)} == vars(MODE)


def test_this_engine_answers_with_reasoning(folder: Path) -> None:
    check(run.evaluate(folder, limit=LIMIT, progress=False, mode=MODE, **ENGINE))
    short = ChatMode(apply_chat_template=True, think_end_token="####", max_gen_toks=2)
    cut = run.evaluate(folder, limit=LIMIT, progress=False, mode=short, **ENGINE)
    assert (
        cut.invalid_rate == 1.0
        and cut.accuracy_flexible == 0.0
        and cut.num_output_tokens == 2 * LIMIT
    )


def test_a_server_answers_with_reasoning(folder: Path, server: Served) -> None:
    check(run.evaluate(folder, target=server.url, limit=LIMIT, progress=False, mode=MODE))


def test_a_baseline_fixes_the_mode(
    folder: Path, server: Served, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file, options = tmp_path / "base.jsonl", ["--filter", "flexible-extract", "--results", tmp_path]
    chat = ["--apply-chat-template", "--think-end-token", "####", "--max-gen-toks", "60"]
    model = ["--model", folder, "--max-model-len", "640"]
    code, _, error = call(
        capsys, *model, *chat, "--limit", LIMIT, "--samples", file, "--results", tmp_path
    )
    assert code == 0, error
    target = ["--model", folder, "--target", server.url]
    code, printed, error = call(capsys, *target, "--against", file, *options)
    assert code == 0 and "lost 0" in printed, error
    assert "evidence: 4 pairs" in printed
    error = refused(
        capsys, "accuracy", *target, "--against", file, "--max-gen-toks", "61", *options
    )
    assert "the prompts or answers would differ: ChatMode(" in error
    plain = tmp_path / "plain.jsonl"
    call(capsys, *model, "--limit", LIMIT, "--samples", plain, "--results", tmp_path)
    error = refused(capsys, "accuracy", "compare", plain, file, "--results", tmp_path)
    assert (
        "plain.jsonl has completions, 5 shots, at most 256 tokens; base.jsonl has chat, 5 shots"
        in error
    )


def test_a_model_without_a_template_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    error = refused(
        capsys, "accuracy", "--apply-chat-template", "--limit", 1, "--results", tmp_path
    )
    assert "has no chat template" in error


def test_odd_modes_are_refused() -> None:
    with pytest.raises(ConfigError, match="think_end_token is empty"):
        ChatMode(think_end_token="")
    with pytest.raises(ConfigError, match="max_gen_toks=0 must be at least 1"):
        ChatMode(max_gen_toks=0)
    with pytest.raises(HybridKVError, match="max_gen_toks '60' of the baseline cannot be used"):
        mode_of({"max_gen_toks": "60"})
    assert mode_of(MODE.params | {"seed": 0}) == MODE and ChatMode().params == {}
    assert ChatMode() == judge.PLAIN

"""A wrong cell of logits shrinks, survives as a file and a script, and stays wrong alike."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from hybrid_kv.check.guard import cases
from hybrid_kv.check.guard.cases import broken_rule, replay, reproduce
from hybrid_kv.check.guard.checks.guard_model import LOGIT_CELLS, NUM_NEW, Questions, result_of
from hybrid_kv.check.guard.exactness import MTP_CELLS, RECOMPUTE_CELLS, SLOTS_CELLS
from hybrid_kv.check.guard.logits import LogitCase, from_document, play_logits, to_json
from hybrid_kv.check.guard.run import GuardRunOptions, run_guard
from hybrid_kv.check.guard.trained import TRAINED
from hybrid_kv.config import ConfigError
from hybrid_kv.engine.llm import LLM, RequestOutput
from hybrid_kv.models.mixers import conv
from tests.support.injected_mistakes import late_window, next_expert, no_states

PROMPTS = [list(range(3, 23)), [*range(3, 20), 50, 51], [7] * 9]
ALONE = LogitCase(
    "alone", "lfm2", {"max_num_batched_tokens": 17, "preempts": 5}, PROMPTS, (0, 2), 4
)
WHOLE = LogitCase(
    "transformers", "granitemoehybrid", {"max_num_batched_tokens": 37}, PROMPTS, (), 4
)
PLAIN = LogitCase(
    "plain", "guard_model", {"dtype": "float64", "attention_backend": "TORCH"}, PROMPTS, (), 4
)


@pytest.mark.parametrize(
    ("case", "damage", "requests", "tokens"),
    [(ALONE, late_window, 1, 6), (WHOLE, next_expert, 1, 1), (PLAIN, no_states, 1, 1)],
)
def test_little_is_left_of_a_cell_that_is_wrong(
    case: LogitCase,
    damage: Callable[..., None],
    requests: int,
    tokens: int,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert play_logits(case) == ("", "")
    with monkeypatch.context() as patch:
        damage(patch)
        rule, _ = play_logits(case)
        assert rule in ("logits", "tokens")
        made = reproduce(to_json(case, rule), tmp_path)
        assert made.rule == rule and made.requests <= requests and made.tokens <= tokens
        assert (
            f"hybrid-kv replay {made.file}" in made.story and f"broken rule: {rule}" in made.story
        )
        assert broken_rule(Path(made.file)) == rule and replay(Path(made.file)) == 1
        assert capsys.readouterr().out.endswith(f"broken rule: {rule}\n")
    assert replay(Path(made.file)) == 0
    assert capsys.readouterr().out.endswith("no rule is broken\n")


@pytest.mark.parametrize("name", ["prompt_logprobs", "logprobs"])
def test_a_log_probability_that_the_plain_pass_does_not_have_is_seen(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    case = replace(PLAIN, cell={**PLAIN.cell, "logprobs": 2})
    assert play_logits(case) == ("", "")
    output = LLM.output

    def later(self: LLM, *given: Any) -> RequestOutput:
        found = output(self, *given)
        values = getattr(found, name)
        return replace(found, **{name: values and [*values[1:], values[0]]})

    monkeypatch.setattr(LLM, "output", later)
    rule, report = play_logits(case)
    assert rule == "logprobs" and "log-probabilities" in report


def test_an_engine_that_fails_by_itself_has_broken_a_rule(monkeypatch: pytest.MonkeyPatch) -> None:
    def no_window(*_: object) -> None:
        raise ValueError("injected")

    monkeypatch.setattr(conv, "windows_at", no_window)
    for case in (ALONE, PLAIN):
        assert play_logits(case) == ("ValueError in no_window", play_logits(case)[1])
        assert "injected" in play_logits(case)[1]


def test_the_guard_names_the_reproducer_of_a_logit(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    from hybrid_kv.check.guard.checks import guard_model

    monkeypatch.setattr(guard_model, "TRAINED", {"nemotron_h": TRAINED["nemotron_h"]})
    monkeypatch.setattr(guard_model, "LOGIT_CELLS", LOGIT_CELLS[1:3])
    monkeypatch.setattr(guard_model, "NUM_NEW", 4)
    monkeypatch.setattr(cases, "SECONDS", 0.0)  # the test above reduces some
    late_window(monkeypatch)
    first, second, _ = run_guard(
        {"guard model": 2}, GuardRunOptions(0, progress=False, repro=tmp_path, jobs=1)
    )
    (file,) = tmp_path.glob("logits-*.json")
    assert not first.passed and not second.passed
    assert f"hybrid-kv replay {file}" in first.detail and "replay" not in second.detail


def test_a_token_that_alone_is_wrong_is_a_case_too() -> None:
    model = TRAINED["nemotron_h"]
    found = Questions(model, 7, 2).run({**LOGIT_CELLS[0]}, "cpu")
    found.num_wrong = 1
    assert (
        found.broken == ("tokens", "other tokens in 1 places") and found.case.max_tokens == NUM_NEW
    )
    assert result_of(found, model, 0).passed  # the tokens of all cells have a line of their own


def changed(**values: Any) -> str:
    return json.dumps({**json.loads(to_json(ALONE, "logits")), **values})


def test_every_cell_survives_as_a_file() -> None:
    for cell in (*SLOTS_CELLS, *RECOMPUTE_CELLS, *MTP_CELLS):
        case = LogitCase("alone", "lfm2", {**cell}, PROMPTS, (1,))
        assert from_document(json.loads(to_json(case))) == case
    for cell in LOGIT_CELLS:
        case = LogitCase("plain", "guard_model", {**cell, "device": "cpu", "preempts": 11}, PROMPTS)
        assert from_document(json.loads(to_json(case))) == case


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        (changed(version=2), "version 2, not 1"),
        (changed(more=1), "'more' is unknown or missing"),
        (changed(against="nothing"), "against 'nothing', not plain or alone or transformers"),
        (changed(model="nothing"), "model 'nothing' is none of "),
        (changed(prompts=[[]]), "a prompt is empty, or again names none"),
        (changed(again=[3]), "a prompt is empty, or again names none"),
        (changed(prompts=[[-1]], again=[]), "-1 is no integer from 0"),
        (changed(cell={"blocks": 3}), "blocks"),
        (changed(against="plain", model="guard_model"), "cell has no dtype"),
        (changed(cell=[]), "'list' object has no attribute 'items'"),
    ],
)
def test_a_file_with_a_wrong_value_is_one_clear_error(
    text: str, problem: str, tmp_path: Path
) -> None:
    file = tmp_path / "case.json"
    file.write_text(text)
    with pytest.raises(ConfigError, match=problem) as raised:
        replay(file)
    assert str(raised.value).startswith(
        f"{file} is no scenario of this version: "
    ) and "\n" not in str(raised.value)

"""Answers with cheap states are paired with those of float32."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from hybrid_kv.config import ConfigError
from hybrid_kv.measure.accuracy import run
from hybrid_kv.measure.accuracy.state_forms import FORMS, evaluate_forms
from tests.support.answers import call, result_of, sha

GSM8K = Path(__file__).parents[3].parent / "shared" / "data" / "gsm8k"
WIDE = [(1, 2, 3, 4), (5, 6), (7,), (8, 9)]
# By the form: right answers, and tokens.
OTHERS: dict[str, tuple[list[bool], list[tuple[int, ...]]]] = {
    "float16, stochastic": ([True, True, False, False], WIDE),
    "int8": ([True, False, False, True], [(1, 2, 3, 5), (5,), (7,), (9, 9)]),
    "fp8": ([False, False, False, False], [(0,), (0,), (0,), (0,)]),
}


def made(right: Sequence[bool], tokens: Sequence[tuple[int, ...]]) -> run.AccuracyResult:
    result = result_of(["right" if flag else "wrong" for flag in right])
    records = tuple(
        replace(record, output_sha=sha(repr(answer)))
        for record, answer in zip(result.records, tokens, strict=True)
    )
    return replace(result, records=records, token_ids=tuple(tokens))


def answer(model: str, *, limit: int, **options: Any) -> run.AccuracyResult:
    """Answer as a model would that has these answers with each form."""
    assert (model, limit) == ("a model", 4)
    if options == {"mamba_ssm_cache_dtype": "float32"}:
        return made([True, True, False, False], WIDE)
    (form,) = (form for form, chosen in FORMS.items() if chosen == options)
    return made(*OTHERS[form.replace("8, stochastic", "8")])


def test_answers_are_paired_question_by_question() -> None:
    forms = evaluate_forms("a model", answer=answer, limit=4)
    assert [answers.form for answers in forms.of_forms] == list(FORMS)
    assert len(FORMS) == 5
    changed = {answers.form: answers.first_others for answers in forms.of_forms}
    assert changed["float16, stochastic"] == ()
    # Other last tokens, an answer that ends, other first tokens.
    assert changed["int8"] == (3, 1, 0) and changed["fp8"] == (0, 0, 0, 0)
    flips = {answers.form: answers.pairs for answers in forms.of_forms}
    assert (flips["int8"].lost, flips["int8"].gained) == (1, 1)
    assert (flips["fp8"].lost, flips["fp8"].gained) == (2, 0)
    document = forms.summary()["forms"][1]
    assert document["median_first_other_token"] == 1 and document["outputs_changed"] == 3
    assert [verdict.name for verdict in forms.verdicts][1] == "gsm8k_synth, int8"
    assert len(forms.rows()) == 5 * len(flips["int8"].rows())


def test_a_form_that_is_compared_cannot_be_chosen() -> None:
    with pytest.raises(ConfigError, match="mamba_ssm_cache_dtype is what is compared here"):
        evaluate_forms("a model", answer=answer, limit=4, mamba_ssm_cache_dtype="int8")


def test_the_guard_model_answers_in_each_form(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    """Rounded answers go through the engine; fp8 alone, as the others take as long."""
    monkeypatch.setattr(
        "hybrid_kv.measure.accuracy.state_forms.FORMS", {"fp8": {"mamba_ssm_cache_dtype": "fp8"}}
    )
    options = "--limit", "1", "--mamba-cache-mode", "all", "--results", tmp_path
    code, printed, _ = call(capsys, "states", *options)
    assert code == 0
    rows = {line.split()[0]: line.split()[1:] for line in printed.splitlines() if line.strip()}
    assert rows["float32"] == ["1", "of", "1"] and rows["fp8"][-1] == "1"


@pytest.mark.skipif(not GSM8K.is_dir(), reason="no gsm8k in ../shared/data: it is not distributed")
def test_gsm8k_itself_is_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        "hybrid_kv.measure.accuracy.state_forms.FORMS", {"int8": {"mamba_ssm_cache_dtype": "int8"}}
    )
    forms = evaluate_forms(
        None, "gsm8k", gsm8k_dir=GSM8K, limit=1, progress=False, mamba_cache_mode="all"
    )
    (answers,) = forms.of_forms
    assert answers.pairs.task == "gsm8k" and answers.pairs.n == 1
    assert answers.pairs.outputs_changed == len(answers.first_others)

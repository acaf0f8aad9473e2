"""Files of lm-eval, sgl-eval and vLLM: paired by question, refused if prompts differ."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from hybrid_kv.config import HybridKVError
from hybrid_kv.measure.accuracy import answers, unpaired
from hybrid_kv.measure.accuracy.answers import Answers, Protocol, Totals
from hybrid_kv.measure.accuracy.read import read_run
from hybrid_kv.measure.results import read_rows
from tests.cli.run import refused
from tests.support.answers import PARAMS, call, record, write
from tests.support.foreign_answers import sgl_metrics, vllm_result

QUESTION = "Ann has {} pens and buys 4 more. How many pens has she?"
CHAT = {"endpoint": "chat", "num_shots": 0, "max_tokens": 16384, "thinking": True}


def sgl_line(number: int, outcome: str = "right", **changes: Any) -> dict[str, Any]:
    """A line of sgl-eval 0.1.3's output-rs*.jsonl."""
    predicted = {"right": str(number + 4), "wrong": "0", "invalid": None}[outcome]
    return {
        "generation": f"\\boxed{{{predicted}}}",
        "reasoning_content": f"{number} + 4",
        "id": f"gsm8k-{number}",
        "expected_answer": str(number + 4),
        "num_generated_tokens": 40,
        "num_reasoning_tokens": 30,
        "num_answer_tokens": 10,
        "finish_reason": "stop",
        "problem": QUESTION.format(number),
        "generation_start_time": 1.0,
        "generation_end_time": 2.0,
        "predicted_answer": predicted,
        "symbolic_correct": outcome == "right",
        **changes,
    }


def sgl_folder(folder: Path, *repeats: Sequence[str], **changes: Any) -> Path:
    folder.mkdir()
    for place, outcomes in enumerate(repeats):
        lines = [sgl_line(number, outcome) for number, outcome in enumerate(outcomes)]
        # as they end, not as they were asked
        write(folder / f"output-rs{place}.jsonl", lines[::-1])
    score = repeats[0].count("right") / len(repeats[0])
    metrics = sgl_metrics(len(repeats[0]), score, len(repeats), **changes)
    (folder / "metrics.json").write_text(json.dumps(metrics))
    return folder


def lm_eval_files(
    folder: Path, outcomes: Sequence[str], chat: bool = True, max_tokens: int = 16384
) -> Path:
    """lm-eval 0.4.13's samples of a run, beside its results; the path of the former."""
    folder.mkdir()
    lines = []
    for number, outcome in enumerate(outcomes):
        found = {"right": str(number + 4), "wrong": "0", "invalid": "[invalid]"}[outcome]
        for answer_filter in ("strict-match", "flexible-extract"):
            lines.append(
                {
                    "doc_id": number,
                    "doc": {"question": QUESTION.format(number), "answer": f"#### {number + 4}"},
                    "target": f"#### {number + 4}",
                    "arguments": {
                        "gen_args_0": {
                            "arg_0": f"Question: {QUESTION.format(number)}\nAnswer:",
                            "arg_1": {"until": ["Question:"], "max_gen_toks": max_tokens},
                        }
                    },
                    "resps": [[f"#### {found}"]],
                    "filtered_resps": [found],
                    "filter": answer_filter,
                    "metrics": ["exact_match"],
                    "doc_hash": f"d{number}",
                    "prompt_hash": f"p{number}",
                    "target_hash": f"t{number}",
                    "exact_match": float(outcome == "right"),
                }
            )
    results = {
        "n-shot": {"gsm8k": 0 if chat else 5},
        "chat_template": "{{ messages }}" if chat else None,
    }
    (folder / "results_2026-11-28T12-00-00.5.json").write_text(json.dumps(results))
    return write(folder / "samples_gsm8k_2026-11-28T12-00-00.5.jsonl", lines)


def own_file(file: Path, outcomes: Sequence[str], **params: Any) -> Path:
    from hybrid_kv.measure.accuracy.run import question_digest

    own = PARAMS | {"task": "gsm8k", **params}
    lines = [
        record(i, outcome, params=own, question_sha=question_digest(QUESTION.format(i)))
        for i, outcome in enumerate(outcomes)
    ]
    return write(file, lines)


BEFORE = ["right"] * 12
AFTER = ["wrong"] * 6 + ["invalid"] + ["right"] * 5


def test_what_each_file_tells(tmp_path: Path) -> None:
    sgl = read_run(sgl_folder(tmp_path / "sgl", ["right", "wrong", "invalid"]))
    assert isinstance(sgl, Answers) and (sgl.task, sgl.repeats, sgl.params["model"]) == (
        "gsm8k",
        1,
        "Model",
    )
    assert sgl.protocol == Protocol(**CHAT)  # type: ignore[arg-type]
    assert [(one.correct, one.invalid) for _, one in sorted(sgl.by_doc.items())] == [
        (True, False),
        (False, False),
        (False, True),
    ]
    assert read_run(tmp_path / "sgl" / "metrics.json") == sgl  # the answers lie beside it
    lm = read_run(lm_eval_files(tmp_path / "lm", ["right"], chat=False, max_tokens=256))
    assert isinstance(lm, Answers) and lm.protocol == Protocol("completions", 5, 256)
    result = read_run(
        vllm_result(tmp_path / "v.json", 1246, model="org/Other", chat_template_kwargs=None)
    )
    assert isinstance(result, Totals) and (result.num_right, result.num_questions, result.task) == (
        1246,
        1319,
        "gsm8k",
    )
    assert result.protocol == Protocol("completions", 5, 256) and result.params["model"] == "Other"
    (tmp_path / "alone").mkdir()
    (tmp_path / "alone" / "metrics.json").write_text(json.dumps(sgl_metrics(200, 0.895)))
    alone = read_run(tmp_path / "alone")
    assert isinstance(alone, Totals) and (alone.num_right, alone.protocol) == (179, sgl.protocol)
    assert (
        answers.thinks({"reasoning_effort": "none", "chat_template_kwargs": {"thinking": True}})
        is False
    )


def pairs_of(folder: Path) -> list[tuple[Path, Path]]:
    """The same loss, in files of two programs each."""
    chat = {
        "apply_chat_template": True,
        "num_fewshot": 0,
        "max_gen_toks": 16384,
        "think_end_token": "</think>",
    }
    before = [
        sgl_folder(folder / "s0", BEFORE),
        lm_eval_files(folder / "l0", BEFORE),
        folder / "o0.jsonl",
    ]
    after = [
        sgl_folder(folder / "s1", AFTER),
        lm_eval_files(folder / "l1", AFTER),
        folder / "o1.jsonl",
    ]
    own_file(before[2], BEFORE, **chat)
    own_file(after[2], AFTER, **chat)
    return [(one, other) for one in before for other in after]


def test_any_two_are_paired_by_question(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for before, after in pairs_of(tmp_path):
        if {before.suffix, after.suffix} == {".jsonl"} and before.parent.name[
            0
        ] != after.parent.name[0]:
            continue  # lm-eval's hashes are of other documents than the ones made up for ours
        code, printed, _ = call(capsys, "compare", before, after, "--results", tmp_path)
        assert code == 1, (before, after, printed)
        assert "evidence: 12 pairs of answers to the same questions" in printed
        assert "lost 7 (1 of them invalid now), gained 0" in printed and "verdict: worse" in printed
        is_sgl = before.is_dir() or after.is_dir()
        assert ("a file does not keep its prompts" in printed) == is_sgl


def test_repeats_are_one_vote(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    once = ["right"] * 5 + ["wrong"]
    before = sgl_folder(tmp_path / "a", ["wrong"] * 6, once, once)
    after = sgl_folder(tmp_path / "b", once, ["wrong"] * 6, ["wrong"] * 6)
    code, printed, _ = call(capsys, "compare", before, after, "--results", tmp_path)
    # 2**-5: not 2**-10 or 2**-15
    assert code == 1 and "lost 5" in printed and "p = 0.0312" in printed
    assert "note: 3 answers to a question are one vote" in printed
    other = sgl_folder(tmp_path / "c", once)
    error = refused(capsys, "accuracy", "compare", before, other, "--results", tmp_path)
    assert "a asked each question 3 times, c 1" in error


def test_a_retry_of_the_same_run_is_said(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for file in (own_file(tmp_path / "a.jsonl", BEFORE), vllm_result(tmp_path / "v.json", 1246)):
        code, printed, _ = call(capsys, "compare", file, file, "--results", tmp_path)
        assert code == 0 and "note: both files are equal, byte by byte" in printed


def test_two_tables_of_1319_are_a_loss(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    before, after = vllm_result(tmp_path / "a.json", 1246), vllm_result(tmp_path / "b.json", 1180)
    code, printed, _ = call(capsys, "compare", before, after, "--results", tmp_path)
    assert code == 1 and "1246 of 1319     94.5%" in printed and "1180 of 1319     89.5%" in printed
    assert (
        "evidence: two scores of 1,319 questions, unpaired: a file has no answers by question"
        in printed
    )
    rows = read_rows(tmp_path / "accuracy.csv").set_index("metric")
    assert (
        rows.loc["fisher_p", "value"] < 1e-5
        and rows.loc["unpaired_difference", "verdict"] == "fail"
    )
    code, printed, _ = call(
        capsys, "compare", before, vllm_result(tmp_path / "c.json", 1231), "--results", tmp_path
    )
    assert (
        code == 0
        and "verdict: no loss shown" in printed
        and "a loss of 2.2 points; pairs see less" in printed
    )


def test_the_unpaired_test_keeps_its_level() -> None:
    from scipy.stats import binom

    # Of all tables that two equally good runs of 60 questions give, by their chance.
    chances = binom.pmf(range(61), 60, 0.9)
    alarms = 0.0
    for before, chance in enumerate(chances):
        for after in range(before):
            made = unpaired.UnpairedComparison(totals(before), totals(after), ())
            alarms += chance * chances[after] * (made.verdict == "worse")
    assert 0.01 < alarms <= 0.05


def totals(right: int, questions: int = 60) -> Totals:
    return Totals(f"{right}", f"{right}", "gsm8k", answers.UNKNOWN, questions, right, 0, {})


def test_the_interval_is_newcombes() -> None:
    made = unpaired.UnpairedComparison(totals(3, 10), totals(9, 10), ())
    assert made.interval == pytest.approx((0.1705, 0.8090), abs=1e-4)  # example (c) of his paper


def test_the_first_questions_are_said_to_be_easier(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    short = own_file(tmp_path / "a.jsonl", ["right"] * 200)
    code, printed, _ = call(
        capsys, "compare", short, own_file(tmp_path / "b.jsonl", ["right"] * 1319)
    )
    assert (
        code == 0
        and "note: a.jsonl holds the first 200 of 1,319 questions; these are compared" in printed
    )
    assert "a model had .68 on the first 200 where it had .642 on all" in printed
    # A score of 200 beside all answers: those to the same 200 are its rival.
    summary = vllm_result(tmp_path / "v.json", 180, questions=200)
    code, printed, _ = call(capsys, "compare", tmp_path / "b.jsonl", summary, "--results", tmp_path)
    assert (
        code == 1
        and "200 of 200" in printed
        and "holds the first 200 of 1,319 questions" in printed
    )
    error = refused(capsys, "accuracy", "compare", vllm_result(tmp_path / "w.json", 1246), summary)
    assert (
        "w.json has 1319 questions, v.json 200, and the longer one no answers by question" in error
    )


DIFFERENT: list[tuple[Callable[[Path], tuple[Path, Path]], str]] = [
    (
        lambda at: (own_file(at / "a.jsonl", BEFORE), sgl_folder(at / "s", BEFORE)),
        (
            "a.jsonl has completions, 5 shots, at most 256 tokens; s has chat, 0 shots, at "
            "most 16,384 tokens, thinking"
        ),
    ),
    (
        lambda at: (lm_eval_files(at / "a", BEFORE, chat=False), lm_eval_files(at / "b", BEFORE)),
        "completions, 5 shots, at most 16,384 tokens; .* has chat, 0 shots, at most 16,384 tokens",
    ),
    (
        lambda at: (
            vllm_result(at / "a.json", 1246, model=None),
            vllm_result(at / "b.json", 1246, endpoint="chat", reasoning_effort="none"),
        ),
        "a.json has completions, 5 shots, at most 256 tokens; b.json has chat, .*, not thinking",
    ),
    (
        lambda at: (vllm_result(at / "v.json", 12, questions=12), sgl_folder(at / "s", BEFORE)),
        "v.json has 5 shots, at most 256 tokens; s has chat, 0 shots",
    ),
]


@pytest.mark.parametrize(("files", "message"), DIFFERENT)
def test_differing_prompts_are_refused(
    files: Callable[[Path], tuple[Path, Path]],
    message: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    import re

    error = refused(capsys, "accuracy", "compare", *files(tmp_path), "--results", tmp_path)
    assert "the prompts differ: " in error and re.search(message, error), error
    assert not (tmp_path / "accuracy.csv").exists()


def broken(at: Path, name: str, text: str) -> Path:
    file = at / name
    file.parent.mkdir(exist_ok=True)
    file.write_text(text)
    return file


NOT_READ: list[tuple[Callable[[Path], Path], str]] = [
    (
        lambda at: broken(at, "a.json", "{}"),
        "is neither a metrics.json of sgl-eval nor a result of vLLM's",
    ),
    (lambda at: broken(at, "a.json", "[" * 9), "is not a JSON object; was the file cut off"),
    (
        lambda at: broken(at, "output-rs0.jsonl", ""),
        "no answers of filter 'strict-match': the file is empty",
    ),
    (lambda at: broken(at, "run/none.txt", "").parent, "has neither output-rs"),
    (
        lambda at: broken(at, "a.jsonl", json.dumps(sgl_line(0, symbolic_correct=1))),
        "line 1 is not an answer of sgl",
    ),
    (
        lambda at: broken(at, "a.jsonl", json.dumps(sgl_line(0, finish_reason="error"))),
        "the engine refused question",
    ),
    (
        lambda at: write(at / "a.jsonl", [sgl_line(0), sgl_line(0)]),
        "line 2: question gsm8k-0 is there twice",
    ),
    (
        lambda at: sgl_folder(at / "s", BEFORE, partial=True),
        "sgl-eval says that the run is partial",
    ),
    (
        lambda at: sgl_folder(at / "s", BEFORE, AFTER[1:]),
        "output-rs1.jsonl has other questions than output-rs0",
    ),
    (
        lambda at: broken(at, "m.json", json.dumps(sgl_metrics(0, 0.5))),
        "do not make a score of questions",
    ),
    (lambda at: vllm_result(at / "v.json", 1400), "do not make a number of right answers"),
    (
        lambda at: broken(
            at, "v.json", vllm_result(at / "w.json", 5, 10).read_text().replace("0.5", "0.55")
        ),
        "do not",
    ),
]


@pytest.mark.parametrize(("file", "message"), NOT_READ)
def test_what_says_nothing_is_refused(
    file: Callable[[Path], Path], message: str, tmp_path: Path
) -> None:
    with pytest.raises(HybridKVError, match=message):
        read_run(file(tmp_path))


def test_no_common_question_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    other = tmp_path / "s"
    sgl_folder(other, BEFORE)
    lines = [sgl_line(number, problem=f"Another one, number {number}?") for number in range(12)]
    write(other / "output-rs0.jsonl", lines)
    error = refused(
        capsys,
        "accuracy",
        "compare",
        sgl_folder(tmp_path / "t", BEFORE),
        other,
        "--results",
        tmp_path,
    )
    assert "t has 12 questions, s 12, 0 are in both" in error


def test_a_score_is_no_baseline_of_a_run(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    error = refused(capsys, "accuracy", "--against", vllm_result(tmp_path / "v.json", 1246))
    assert "v.json has the score alone; a file with every answer is needed" in error

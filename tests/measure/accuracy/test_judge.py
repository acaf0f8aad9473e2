"""A run against an earlier one or a floor, by command: checks before it, files after it."""

from __future__ import annotations

import errno
import json
import os
from pathlib import Path
from typing import Any

import pytest

from hybrid_kv.measure.accuracy import judge, run, tasks
from hybrid_kv.measure.results import append, read_rows
from tests.cli.run import raising, refused
from tests.support.answers import COMMIT, PARAMS, call, record, result_of, write
from tests.support.gsm8k import write_gsm8k


@pytest.fixture
def no_questions(monkeypatch: pytest.MonkeyPatch) -> None:
    """A model that must not run."""
    monkeypatch.setattr(run, "evaluate", lambda *_, **__: pytest.fail("sent"))


def only_lost(folder: Path) -> tuple[Path, dict[str, Any]]:
    """Return the file of the lost question, and its line."""
    (file,) = (folder / "repro").glob("lost-*.jsonl")
    (line,) = map(json.loads, file.read_text().splitlines())
    return file, line


def test_against_on_the_command_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    baseline = write(tmp_path / "a.jsonl.gz", [record(i) for i in range(300)])
    out, summary, samples = tmp_path / "accuracy.csv", tmp_path / "s.json", tmp_path / "b.jsonl"
    calls: list[dict[str, Any]] = []
    outcomes = ["wrong"] * 11 + ["right"] * 289

    def evaluate(model: object, task: str, **options: Any) -> run.AccuracyResult:
        calls.append({"model": model, "task": task, **options})
        return result_of(outcomes[: options["limit"]], questions=options["questions"])

    monkeypatch.setattr(run, "evaluate", evaluate)
    monkeypatch.setattr(
        judge, "question_hashes", lambda _, __, limit, *more: {i: () for i in range(limit)}
    )
    monkeypatch.chdir(tmp_path)
    given = ["--against", baseline, "--results", tmp_path, "--out", summary, "--samples", samples]
    code, printed, _ = call(capsys, *given, "--num-blocks", "9")
    assert code == 1 and "verdict: worse" in printed and "239 of 250" in printed
    # The seed is the baseline's.
    common = {
        "model": None,
        "task": "gsm8k_synth",
        "seed": 3,
        "gsm8k_dir": None,
        "num_blocks": 9,
        "mode": judge.PLAIN,
    }
    assert calls[0] == {**common, "limit": 250, "questions": None}
    # Then as few of those that were lost as lose one again, the shortest one if it does.
    assert calls[1] == {**common, "limit": 300, "questions": calls[1]["questions"]}
    assert sorted(calls[1]["questions"]) == list(range(11)) and len(calls[-1]["questions"]) == 1
    file, line = only_lost(tmp_path)
    texts = [doc["question"] for doc in tasks.load_task("gsm8k_synth", 3, 300).eval_docs]
    assert line["question"] == texts[line["doc_id"]] and line["question"] in printed
    assert len(line["question"]) == min(map(len, texts[:11]))
    assert f"hybrid-kv accuracy --against {file.relative_to(tmp_path)}, same options" in printed
    calls.clear()
    for outcome, code in (("wrong", 1), ("right", 0)):
        outcomes[line["doc_id"]] = outcome
        assert call(capsys, "--against", file, "--results", tmp_path)[0] == code
        assert calls.pop()["questions"] == [line["doc_id"]] and not calls
    document = json.loads(summary.read_text())
    assert document["n"] == 250 and document["comparison"]["lost"] == 11
    assert len(samples.read_text().splitlines()) == 250
    frame = read_rows(out)
    assert {"exact_match_strict", "paired_difference"} <= set(frame["metric"])
    assert set(frame.loc[frame["metric"] == "mcnemar_p", "baseline_commit"]) == {COMMIT}

    outcomes[:] = ["right"] * 300
    code, printed, _ = call(capsys, *given, "--limit", "100")
    assert code == 0 and "100 of 100" in printed and calls[-1]["limit"] == 100
    assert "so the run ends here" not in printed
    code, printed, _ = call(capsys, *given)
    assert (
        code == 0
        and "no question lost, so the run ends here: 95 % sure that fewer than 1.2% are lost"
        in printed
    )

    calls.clear()
    for more, message in (
        (["--seed", "4"], "--seed 4 does not fit --against, whose run had 3"),
        (["--task", "gsm8k"], "--task gsm8k does not fit --against, whose run had gsm8k_synth"),
        (["--check-floor"], "exclude each other"),
    ):
        assert message in refused(capsys, "accuracy", *given, *more)
    assert not calls


def test_against_with_the_engine(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    samples = tmp_path / "a.jsonl.gz"
    given = ("--limit", "3", "--seed", "5", "--samples", samples)
    assert call(capsys, *given, "--results", tmp_path, "--device", "cpu")[0] == 0
    options = [
        "--speculative-method",
        "mtp",
        "--num-speculative-tokens",
        "2",
        "--mamba-cache-mode",
        "all",
    ]
    code, printed, _ = call(
        capsys, "--against", samples, "--results", tmp_path, "--device", "cpu", *options
    )
    assert code == 0 and "3 of 3" in printed and "tokens of 0 answers differ" in printed
    chosen = judge.write_lost(samples, [1, 2], {1: "Why?", 2: "How?"}, tmp_path)
    code, printed, _ = call(
        capsys, "--against", chosen, "--results", tmp_path, "--device", "cpu", *options
    )
    assert code == 0 and "2 of 2" in printed and "tokens of 0 answers differ" in printed


def test_other_questions_are_refused_before_one_is_asked(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], no_questions: None
) -> None:
    hashes = tasks.question_hashes("gsm8k_synth", 3, 4)
    good = [record(i, doc_hash=hashes[i][0], prompt_hash=hashes[i][1]) for i in range(4)]
    for damage, message in (
        (
            {"doc_hash": "x"},
            (
                "documents of 1 of 4 questions differ (doc_hash of question 2): another "
                "data set or seed"
            ),
        ),
        ({"prompt_hash": "x"}, "prompts of 1 of 4 questions differ (prompt_hash of question 2)"),
        ({"doc_id": 7}, "a.jsonl has 4 questions, this run 4, 3 are in both"),
    ):
        a = write(
            tmp_path / "a.jsonl", [one | damage if one["doc_id"] == 2 else one for one in good]
        )
        assert message in refused(capsys, "accuracy", "--against", a, "--results", tmp_path)
    assert not (tmp_path / "accuracy.csv").exists()


@pytest.mark.parametrize(
    ("params", "message"),
    [
        ({**PARAMS, "seed": 1.5}, "seed 1.5 is not an integer"),
        ({**PARAMS, "task": ["gsm8k_synth"]}, "is unknown; use one of gsm8k_synth, gsm8k"),
    ],
)
def test_an_odd_baseline_is_refused_before_a_question_is_asked(
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    no_questions: None,
    params: dict[str, Any],
    message: str,
) -> None:
    a = write(tmp_path / "a.jsonl", [record(i, params=params) for i in range(3)])
    assert message in refused(capsys, "accuracy", "--against", a, "--results", tmp_path)


def test_samples_do_not_replace_the_baseline(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], no_questions: None
) -> None:
    a = write(tmp_path / "a.jsonl", [record(0)])
    (tmp_path / "link.jsonl").symlink_to(a)
    before = a.read_bytes()
    given = ["--against", a, "--samples", tmp_path / "link.jsonl", "--results", tmp_path]
    assert (
        "would replace the baseline" in refused(capsys, "accuracy", *given)
        and a.read_bytes() == before
    )


def test_a_floor_for_more_questions_than_there_are_is_refused_before_the_run(
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    no_questions: None,
) -> None:
    monkeypatch.setattr(judge.threshold, "find_floor", lambda *_: None)
    write_gsm8k(tmp_path)
    given = [
        "--task",
        "gsm8k",
        "--gsm8k-dir",
        tmp_path,
        "--limit",
        "5",
        "--check-floor",
        "--results",
        tmp_path,
    ]
    assert (
        refused(capsys, "accuracy", *given)
        == "error: the floor is for 5 questions, the task has 3\n"
    )


@pytest.fixture
def answered(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run, "evaluate", lambda *_, **__: result_of(["right"] * 4))


@pytest.mark.parametrize("option", ["--samples", "--out"])
def test_a_full_disk_keeps_rows_and_table(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], answered: None, option: str
) -> None:
    code, printed, error = call(capsys, "--limit", "4", "--results", tmp_path, option, "/dev/full")
    assert (code, error.count("\n")) == (
        2,
        1,
    ) and "/dev/full cannot be written: No space left on device" in error
    assert "100.0%" in printed
    assert "exact_match_strict" in set(read_rows(tmp_path / "accuracy.csv")["metric"])


def test_rows_that_cannot_be_appended_cost_nothing_else(
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    answered: None,
) -> None:
    # As the kernel has it: without a file's name.
    monkeypatch.setattr(
        append.os, "write", raising(OSError(errno.ENOSPC, os.strerror(errno.ENOSPC)))
    )
    samples = tmp_path / "a.jsonl"
    code, printed, error = call(capsys, "--limit", "4", "--results", tmp_path, "--samples", samples)
    assert (code, error.count("\n")) == (2, 1) and "accuracy.csv: No space left on device" in error
    assert "100.0%" in printed and len(samples.read_text().splitlines()) == 4

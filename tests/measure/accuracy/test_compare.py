"""Files of ours and of lm-eval's, paired by question: refusals, counts, rows."""

from __future__ import annotations

import gzip
import json
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from hybrid_kv.check.guard_model import FOLDER as GUARD_MODEL
from hybrid_kv.config import HybridKVError
from hybrid_kv.measure.accuracy import compare, judge, paired, run
from hybrid_kv.measure.accuracy.answers import Answers
from hybrid_kv.measure.accuracy.read import read_answers
from hybrid_kv.measure.accuracy.samples import answers_of
from hybrid_kv.measure.results import read_rows
from tests.cli.run import refused
from tests.support.answers import COMMIT, PARAMS, call, logged, record, result_of, write


def answers(file: Path, outcomes: list[str], answer_filter: str = run.STRICT) -> Answers:
    return read_answers(write(file, [record(i, o) for i, o in enumerate(outcomes)]), answer_filter)


def test_counts_and_verdict(tmp_path: Path) -> None:
    before = ["right"] * 6 + ["wrong", "wrong", "invalid", "invalid"]
    after = [
        "right",
        "wrong",
        "invalid",
        "invalid",
        "right",
        "right",
        "right",
        "wrong",
        "right",
        "wrong",
    ]
    made = compare.compare(
        answers(tmp_path / "a.jsonl", before), answers(tmp_path / "b.jsonl.gz", after)
    )
    assert made.n == 10
    assert (made.lost, made.lost_to_invalid, made.gained, made.gained_from_invalid) == (3, 2, 2, 1)
    assert made.outputs_changed == 6
    assert made.difference == pytest.approx(-0.1)
    document = made.summary()
    assert document["p"] == made.p == paired.mcnemar_p(3, 2) == 0.5
    assert document["difference_ci"] == paired.difference_interval(3, 2, 10)
    assert document["baseline"]["accuracy_ci"] == run.wilson_interval(6, 10)
    baseline, candidate = document["baseline"], document["candidate"]
    assert (baseline["correct"], baseline["wrong"], baseline["invalid"]) == (6, 2, 2)
    assert (candidate["correct"], candidate["wrong"], candidate["invalid"]) == (5, 3, 2)
    assert document["detectable_loss"] == paired.detectable_loss(5, 10)
    assert made.verdict == document["verdict"] == "no loss shown"
    # some loss, no more than chance
    assert [row.verdict for row in made.rows()] == ["pass", "", "", ""]
    json.dumps(document, allow_nan=False)


def test_five_percent_of_250_answers_are_significant_and_none_are_not(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    whole = ["right" if i % 10 else "wrong" for i in range(250)]
    injected = [
        ("invalid" if i % 40 == 1 else "wrong") if i % 20 == 1 else o for i, o in enumerate(whole)
    ]
    a = write(tmp_path / "a.jsonl.gz", [record(i, o) for i, o in enumerate(whole)])
    b = write(tmp_path / "b.jsonl", [record(i, o) for i, o in enumerate(injected)])
    out, summary = tmp_path / "accuracy.csv", tmp_path / "summary.json"
    code, printed, _ = call(capsys, "compare", a, b, "--results", tmp_path, "--out", summary)
    assert code == 1
    for part in (
        "225 of 250",
        "212 of 250",
        "lost 13 (7 of them invalid now), gained 0",
        "verdict: worse",
        "Tango",
    ):
        assert part in printed
    assert "tokens of 13 answers differ" in printed
    assert json.loads(summary.read_text())["p"] == 2**-13
    assert "detectable at 13 flips, with 80 % power: a loss of 5.3 points" in printed

    code, printed, _ = call(capsys, "compare", a, a, "--results", tmp_path)
    assert code == 0
    assert (
        "lost 0" in printed
        and "tokens of 0 answers differ" in printed
        and "verdict: no loss shown" in printed
    )

    code, printed, _ = call(capsys, "compare", b, a, "--results", tmp_path)  # better is not worse
    assert code == 0 and "gained 13 (7 invalid before)" in printed

    frame = read_rows(out)
    assert len(frame) == 15
    differences = frame[frame["metric"] == "paired_difference"]
    assert differences["verdict"].tolist() == ["fail", "pass", "pass"]
    assert differences["value"].tolist() == [-13 / 250, 0, 13 / 250]
    assert (differences["ci_low"] <= differences["value"]).all() and (
        differences["ci_high"] >= 0
    ).tolist()[1:]
    assert set(frame["baseline_commit"]) == {COMMIT} and set(frame["n"]) == {250}
    values = frame.set_index("metric")["value"].iloc[:5].to_dict()
    assert (values["mcnemar_p"], values["questions_lost"], values["questions_gained"]) == (
        2**-13,
        13,
        0,
    )
    assert values["detectable_loss"] == pytest.approx(0.053, abs=1e-3)
    params = json.loads(frame["params"][0])
    assert (
        params["model"] == "guard_model"
        and params["filter"] == run.STRICT
        and params["candidate_commit"] == COMMIT
    )
    assert params["baseline"].startswith("a.jsonl.gz ") and params["candidate"].startswith(
        "b.jsonl "
    )
    assert params["baseline"].split()[1] != params["candidate"].split()[1]


@pytest.mark.parametrize("answer_filter", [run.STRICT, run.FLEXIBLE])
def test_lm_evals_files(tmp_path: Path, answer_filter: str) -> None:
    outcomes = ["right", "wrong", "invalid", "flexible"]
    lines = [line for i, o in enumerate(outcomes) for line in logged(i, o)]
    # As lm-eval writes them: all lines of a filter, then all of the next.
    file = write(
        tmp_path / "samples_gsm8k_synth_2026-11-21T09-48-38.67.jsonl", lines[::2] + lines[1::2]
    )
    theirs = read_answers(file, answer_filter)
    assert (theirs.task, theirs.params, theirs.commit) == ("gsm8k_synth", {}, "")
    ours = answers(tmp_path / "ours.jsonl", outcomes, answer_filter)
    flexible = answer_filter == run.FLEXIBLE
    for one in (ours, theirs):
        assert [one.by_doc[i].correct for i in range(4)] == [True, False, False, flexible]
        assert [one.by_doc[i].invalid for i in range(4)] == [False, False, True, not flexible]
    made = compare.compare(ours, theirs, answer_filter=answer_filter)
    assert (made.lost, made.gained, made.outputs_changed) == (0, 0, None)
    # A backend's file of an unchanged run, and one that lost a question.
    worse = write(tmp_path / "b.jsonl", [line for i in range(4) for line in logged(i, "wrong")])
    made = compare.compare(theirs, read_answers(worse, answer_filter), answer_filter=answer_filter)
    assert (made.lost, made.gained) == (1 + flexible, 0)
    assert {row.benchmark for row in made.rows()} == {"gsm8k_synth"}


def test_a_real_run_of_lm_evals_hf_backend_agrees_with_the_engine(tmp_path: Path) -> None:
    from lm_eval.evaluator import simple_evaluate
    from lm_eval.loggers import EvaluationTracker
    from lm_eval.tasks import TaskManager

    from hybrid_kv.measure.accuracy import tasks

    manager = TaskManager(include_path=Path(tasks.__file__).parent, include_defaults=False)
    arguments = {"pretrained": str(GUARD_MODEL), "dtype": "float32"}
    with tasks.quiet_lm_eval():
        results = simple_evaluate(
            "hf",
            arguments,
            tasks=["gsm8k_synth"],
            task_manager=manager,
            limit=1,
            bootstrap_iters=0,
            device="cpu",
        )
    tracker = EvaluationTracker(output_path=str(tmp_path / "out.json"))
    tracker.general_config_tracker.model_name_sanitized = "guard_model"
    tracker.date_id = "2026-11-21T09-48-38.67"
    tracker.save_results_samples("gsm8k_synth", results["samples"]["gsm8k_synth"])
    (file,) = tmp_path.glob("samples_*.jsonl")
    engine = run.evaluate(limit=1, progress=False, device="cpu", max_model_len=640)
    made = compare.compare(read_answers(file), answers_of(engine))
    assert (made.n, made.lost, made.gained, made.task) == (1, 0, 0, "gsm8k_synth")
    assert made.summary()["baseline"]["correct"] == 1


REFUSALS: list[tuple[Callable[[list[dict[str, Any]]], object], str]] = [
    (lambda lines: lines.pop(0), r"a.jsonl has 6 questions, b.jsonl 5, 5 are in both.*--limit"),
    (
        lambda lines: lines[2].update(doc_hash="x"),
        r"documents of 1 of 6 .*doc_hash of question 2.*another data set",
    ),
    (
        lambda lines: [line.update(prompt_hash="x") for line in lines[1:]],
        r"prompts of 5 of 6 .*question 1.*shots",
    ),
    (
        lambda lines: lines[0].update(target_hash="x"),
        r"targets of 1 of 6.*target_hash of question 0",
    ),
    (lambda lines: lines.append(record(3)), r"b.jsonl line 7: question 3 is there twice"),
    (lambda lines: lines[4].update(correct=1), r"line 5 .*1 has the wrong type"),
    (lambda lines: lines[4].update(doc_id=True), r"line 5 .*True has the wrong type"),
    (
        lambda lines: lines[4].update(invalid=None),
        r"line 5 is not an answer.*None has the wrong type",
    ),
    (lambda lines: lines[4].update(doc_hash=5), r"line 5 .*5 has the wrong type"),
    (lambda lines: lines[1].pop("target_hash"), r"line 2 is not an answer.*'target_hash'.*missing"),
    (lambda lines: lines.clear(), r"no answers of filter 'strict-match': the file is empty"),
    (
        lambda lines: lines[3].update(error="5 tokens\nwere too many"),
        r"1 of 6 .*refused.*the first: 5 tokens were",
    ),
    (
        lambda lines: lines.insert(3, {"filter": "none", "doc_id": 0}),
        r"b.jsonl line 1 is of another format",
    ),
    (lambda lines: lines[0].update(commit="main"), r"b.jsonl: commit 'main' is not a full hash"),
]


@pytest.mark.parametrize(("name", "value"), [("task", "gsm8k\nsynth"), ("seed", float("nan"))])
def test_parameters_that_no_row_can_hold_leave_nothing_behind(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], name: str, value: object
) -> None:
    a = write(tmp_path / "a.jsonl", [record(0)])
    b = write(tmp_path / "b.jsonl", [record(0, params={**PARAMS, name: value})])
    error = refused(
        capsys, "accuracy", "compare", a, b, "--results", tmp_path, "--out", tmp_path / "c.json"
    )
    assert "b.jsonl cannot become rows" in error
    assert sorted(file.name for file in tmp_path.iterdir()) == ["a.jsonl", "b.jsonl"]


@pytest.mark.parametrize(("damage", "message"), REFUSALS)
def test_what_cannot_be_compared_is_one_line_and_exit_code_2(
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    damage: Callable[[list[dict[str, Any]]], object],
    message: str,
) -> None:
    lines = [record(i) for i in range(6)]
    a = write(tmp_path / "a.jsonl", lines)
    damage(lines)
    b = write(tmp_path / "b.jsonl", lines)
    out = tmp_path / "accuracy.csv"
    for pair in ((a, b), (b, a)):
        refused(capsys, "accuracy", "compare", *pair, "--results", tmp_path)
    assert not out.exists()
    with pytest.raises(HybridKVError) as raised:
        compare.compare(read_answers(a), read_answers(b))
    assert re.search(message, " ".join(str(raised.value).split())), raised.value


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"exact_match": 0.5}, "line 1 is not an answer"),
        ({"exact_match": [1]}, "line 1 is not an answer"),
        ({"filtered_resps": []}, "line 1 is not an answer"),
        ({"filter": "none"}, "no answers of filter 'strict-match': its filters are 'none'"),
        ({"filter": ["strict-match"]}, "no answers of filter"),
    ],
)
def test_odd_lines_of_lm_evals(tmp_path: Path, changes: dict[str, Any], message: str) -> None:
    file = write(tmp_path / "a.jsonl", logged(0, **changes))
    with pytest.raises(HybridKVError, match=message):
        read_answers(file)


@pytest.mark.parametrize(
    ("name", "data", "message"),
    [
        ("a.jsonl", b'{"doc_id": 0', "line 1 is not a JSON object; was the file cut off"),
        ("a.jsonl", b"[1]\n", "line 1 is not a JSON object"),
        ("a.jsonl", b"[" * 100_000, "line 1 is not a JSON object"),
        ("a.jsonl", b"\xff\xfe", "is not text: byte 0 is not UTF-8"),
        ("a.jsonl.gz", b"{}", "cannot be read: Not a gzipped file"),
        ("a.jsonl.gz", gzip.compress(b"{}" * 500, mtime=0)[:-9], "cannot be read"),
        (
            "a.jsonl.gz",
            gzip.compress(b"{}", mtime=0)[:10] + b"\xff" * 20,
            "cannot be read: Error -3 while decompress",
        ),
        ("nowhere.jsonl", None, "cannot be read: No such file"),
    ],
)
def test_broken_files(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], name: str, data: bytes | None, message: str
) -> None:
    if data is not None:
        (tmp_path / name).write_bytes(data)
    good = write(tmp_path / "good.jsonl", [record(0)])
    assert message in refused(
        capsys, "accuracy", "compare", good, tmp_path / name, "--results", tmp_path
    )
    assert not (tmp_path / "accuracy.csv").exists()


def test_options_of_a_run_are_refused_before_a_command(capsys: pytest.CaptureFixture[str]) -> None:
    error = refused(capsys, "accuracy", "--limit", "3", "compare", "a", "b")
    assert "limit belongs to a run; give options after 'compare'" in error


# -------------------------------------------------------------------------------------------------
# live


@pytest.mark.parametrize(
    ("lost", "verdict", "sent", "alpha"),
    [
        ([], "no loss shown", [250], 0.001),
        # the price of stopping: never sent
        ([300, 301, 302, 303, 304, 305], "no loss shown", [250], 0.001),
        (range(10), "worse", [250], 0.001),
        (range(9), "worse", [250, 400], 0.049),
        ([0, 1, 2, 3, 399], "worse", [250, 400], 0.049),
        ([0, 1, 2, 399], "no loss shown", [250, 400], 0.049),
    ],
)
def test_live_asks_as_few_questions_as_decide(
    tmp_path: Path, lost: list[int], verdict: str, sent: list[int], alpha: float
) -> None:
    baseline = answers(tmp_path / "a.jsonl", ["right"] * 400)
    outcomes = ["wrong" if i in lost else "right" for i in range(400)]
    calls: list[int] = []

    def ask(questions: int) -> run.AccuracyResult:
        calls.append(questions)
        return result_of(outcomes[:questions])

    result, made = compare.compare_live(baseline, ask)
    assert (calls, made.verdict, made.alpha) == (sent, verdict, pytest.approx(alpha))
    assert made.n == result.n == sent[-1] and made.final == (sent[-1] == 400)


def test_live_needs_the_first_questions(tmp_path: Path) -> None:
    file = write(tmp_path / "a.jsonl", [record(i) for i in (0, 1, 3)])
    with pytest.raises(HybridKVError, match=r"a.jsonl does not hold the first 3 questions"):
        compare.compare_live(read_answers(file), lambda _: pytest.fail("sent"))


def test_a_loss_that_takes_the_others_company_keeps_all_that_were_lost(tmp_path: Path) -> None:
    baseline = answers(tmp_path / "a.jsonl", ["right"] * 20)
    made = compare.compare(baseline, answers_of(result_of(["wrong"] * 9 + ["right"] * 11)))
    texts = {i: "x" * (20 - i) for i in range(20)}
    sent: list[list[int]] = []

    def ask(questions: Sequence[int], company: int) -> run.AccuracyResult:
        sent.append(sorted(questions))
        return result_of(["wrong" if len(questions) >= company else "right"] * 20, questions)

    assert judge.fewest(baseline, made, texts, lambda only: ask(only, 10)) == list(
        range(9)
    ) and sent == [[*range(9)]]
    assert judge.fewest(baseline, made, texts, lambda only: ask(only, 2)) == [7, 8]

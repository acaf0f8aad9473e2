"""Acceptance length: a fall fails, a rise proves nothing, a broken verifier is seen."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest

from hybrid_kv.engine import runner
from hybrid_kv.measure.accuracy import acceptance, compare, judge, run
from hybrid_kv.measure.accuracy.acceptance import AcceptanceChange, DraftCounts
from hybrid_kv.measure.accuracy.samples import answers_of
from hybrid_kv.measure.results import read_rows
from tests.support.acceptance import accepts_everything
from tests.support.answers import call, record, result_of, write

SPECULATIVE = {
    "speculative_method": "ngram",
    "num_speculative_tokens": 3,
    "device": "cpu",
    "max_model_len": 640,
}


def questions(lengths: Sequence[float], steps: int = 20) -> list[DraftCounts]:
    return [DraftCounts(steps, round(steps * (length - 1))) for length in lengths]


def drawn(mean: float, seed: int, count: int = 100) -> list[DraftCounts]:
    return questions(np.random.default_rng(seed).normal(mean, 0.3, count).clip(1, 4).tolist())


def test_the_length_is_that_of_vllm() -> None:
    assert DraftCounts(100, 150).acceptance_length == 2.5
    assert DraftCounts(0, 0).acceptance_length is None


def test_a_fall_fails_and_an_equal_engine_does_not() -> None:
    fell = AcceptanceChange(drawn(2.8, 0), drawn(2.6, 1), 0)
    assert fell.verdict.word == "failed" and "fell: 2.822 before, 2.575 now" in fell.verdict.message
    same = AcceptanceChange(drawn(2.8, 0), drawn(2.8, 0), 0)
    assert same.verdict.word == "ok" and same.p_values == (1.0, 1.0)


def test_a_rise_is_void_unless_no_answer_changed() -> None:
    for changed, word in ((0, "ok"), (3, "void"), (None, "void")):
        change = AcceptanceChange(drawn(2.6, 0), drawn(2.8, 1), changed)
        assert change.verdict.word == word
    assert "an unknown number of answers have other tokens" in change.verdict.message
    (row,) = change.rows("gsm8k", {}, "")
    assert (row.metric, row.verdict, row.better) == ("acceptance_length_change", "void", "equal")


def test_false_alarms_are_as_rare_as_claimed() -> None:
    alarms = [
        AcceptanceChange(drawn(2.7, 2 * i), drawn(2.7, 2 * i + 1), 1).p_values for i in range(200)
    ]
    # of a binomial with 1 %: 1 in 1,000 has more
    assert sum(fall <= acceptance.ALPHA for fall, _ in alarms) <= 7
    assert sum(rise <= acceptance.ALPHA for _, rise in alarms) <= 7


def test_a_broken_verifier_raises_it_and_is_no_gain(monkeypatch: pytest.MonkeyPatch) -> None:
    right = run.evaluate(limit=12, progress=False, **SPECULATIVE)
    monkeypatch.setattr(runner, "verify", accepts_everything)
    broken = run.evaluate(limit=12, progress=False, **SPECULATIVE)
    lengths = [result.drafts.acceptance_length for result in (right, broken)]
    assert lengths[0] is not None and lengths[1] is not None and lengths[1] > lengths[0] + 0.5
    assert sum(one.n_verifications for one in right.records) == right.num_verifications > 0
    made = compare.compare(answers_of(right), answers_of(broken))
    assert made.acceptance is not None and made.outputs_changed
    assert (
        made.acceptance.verdict.word == "void"
        and "no gain by itself" in made.acceptance.verdict.message
    )


@pytest.mark.parametrize(("minimum", "code", "verdict"), [("2.4", 0, "pass"), ("2.6", 1, "fail")])
def test_a_floor_of_it_on_the_command_line(
    minimum: str,
    code: int,
    verdict: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    import dataclasses

    made = dataclasses.replace(
        result_of(["right"] * 5), num_verifications=100, num_accepted_draft_tokens=150
    )
    monkeypatch.setattr(judge.run, "evaluate", lambda *_, **__: made)
    left, printed, _ = call(capsys, "--min-acceptance-length", minimum, "--results", tmp_path)
    assert (
        left == code
        and f"acceptance length 2.500 {'>=' if code == 0 else '<'} floor {minimum}" in printed
    )
    rows = read_rows(tmp_path / "accuracy.csv").set_index("metric")
    assert (
        rows.loc["acceptance_length", "value"] == 2.5
        and rows.loc["acceptance_length", "verdict"] == verdict
    )


def test_a_floor_without_drafts_is_void(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(judge.run, "evaluate", lambda *_, **__: result_of(["right"] * 5))
    left, printed, _ = call(capsys, "--min-acceptance-length", "2", "--results", tmp_path)
    assert left == 3 and "nothing was drafted" in printed


def test_files_are_compared_by_their_drafts(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def file(name: str, accepted: int) -> Path:
        lines = [record(i, n_verifications=10, n_accepted=accepted + i % 2) for i in range(40)]
        return write(tmp_path / name, lines)

    code, printed, _ = call(
        capsys, "compare", file("a.jsonl", 15), file("b.jsonl", 12), "--results", tmp_path, "--json"
    )
    assert code == 1 and '"acceptance_length": [\n    2.55,\n    2.25\n  ]' in printed
    rows = read_rows(tmp_path / "accuracy.csv").set_index("metric")
    assert rows.loc["acceptance_length_change", "verdict"] == "fail"
    assert rows.loc["acceptance_length_change", "value"] == pytest.approx(-0.3)
